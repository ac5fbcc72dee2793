// paged_attention on GPUs: merges the partial results of a row block.
//
// If a warp has only a part of a row block, it keeps a partial result (maximum, sum, sum · V) in shared memory. These
// are at most the first and the last row block of its share. When all warps are done the CTA merges the partial
// results. If a row block continues in the next CTA, its partial result goes through the workspace (combine.hpp).
//
//     CTA 3                                        CTA 4
//     warp 0 │ warp 1 │ warp 2 │ … │ warp 7         warp 0 │ warp 1 │ …
//     ▓▓▓▓▓▓▓│▓▓▓▒▒▒▒▒│▒▒▒▒▒▒▒▒│▒▒▒│▒▒▒▒▒▒▒▒        ▒▒▒▒▒▒▒│▒▒░░░░░░│░░
//     └ read from CTA 2 ──┘└ merged, published ──┘   └ reads ┘
#pragma once

#include "arch/sm80/bits.hpp"
#include "ops/paged_attention/gpu/params.hpp"
#include "ops/paged_attention/gpu/values.hpp"
#include "tile/gpu/softmax.hpp"

namespace hopwell::ops::paged_attention::HOPWELL_TARGET {

// ---- one row ------------------------------------------------------------------------------------------------------

struct OutputRow {
  int head, query;
  bool exists;  // false for padding rows of the last pass
};
HOPWELL_DEVICE OutputRow output_row_of(const Params& p, int row_block, int row) {
  const Schedule& schedule = p.schedule;
  const int kv_head = row_block / schedule.passes * schedule.heads + row / schedule.queries;
  const int of_group = row_block % schedule.passes * schedule.queries + row % schedule.queries;
  const int g = of_group / p.query.q_len;
  return {kv_head * p.query.group + g, of_group - g * p.query.q_len, g < p.query.group};
}

// Address of a row's result.
template <class T>
HOPWELL_DEVICE T* out_at(const Output& output, int sequence, const OutputRow& row) {
  T* out = static_cast<T*>(output.out) + sequence * output.strides[0] + row.query * output.strides[1];
  return out + row.head * output.strides[2];
}
HOPWELL_DEVICE float* lse_at(const Output& output, int sequence, const OutputRow& row) {
  return output.lse + sequence * output.lse_strides[0] + row.query * output.lse_strides[1] +
         row.head * output.lse_strides[2];
}

// Neighbouring values of a row: sums of exp2(logit − maximum) · v, and the sum of exp2(logit − maximum).
template <int kTheValues>
struct PartialSums {
  static constexpr int kValues = kTheValues;
  float maximum = -INFINITY, sum = 0, value[kValues] = {};
  HOPWELL_DEVICE void add(const PartialSums& other) {
    const float larger = fmaxf(maximum, other.maximum), base = tile::finite_row_max(larger);
    const float mine = arch::exp2_approx(maximum - base), its = arch::exp2_approx(other.maximum - base);
    maximum = larger, sum = sum * mine + other.sum * its;
    for (int i = 0; i < kValues; ++i) value[i] = value[i] * mine + other.value[i] * its;
  }
  HOPWELL_DEVICE float lse() const { return tile::lse_of(maximum, sum, -INFINITY); }
  HOPWELL_DEVICE bool may_be_infinite() const {
    float all = 0;
    for (int i = 0; i < kValues; ++i) all += value[i];
    return all * 0 != 0 && sum > 0 && sum < INFINITY;
  }
};
using PairSums = PartialSums<2>;
using QuadSums = PartialSums<4>;

// Merges up to kMost partial sums. All loads are in flight together. The code runs once, so its time is the length
// of its dependency chain.
template <int kMost, class PartialOf>
HOPWELL_DEVICE auto merge_partials(int count, const PartialOf& partial_of) {
  decltype(partial_of(0)) partial[kMost], all;
  HOPWELL_UNROLL
  for (int i = 0; i < kMost; ++i)
    if (i < count) partial[i] = partial_of(i);
  HOPWELL_UNROLL
  for (int i = 0; i < kMost; ++i) all.maximum = fmaxf(all.maximum, partial[i].maximum);
  const float base = tile::finite_row_max(all.maximum);
  HOPWELL_UNROLL
  for (int i = 0; i < kMost; ++i) {
    const float weight = arch::exp2_approx(partial[i].maximum - base);
    all.sum += weight * partial[i].sum;
    for (int e = 0; e < all.kValues; ++e) all.value[e] += weight * partial[i].value[e];
  }
  return all;
}

// Recomputes elements [e, end) of a result if visible values are not finite. Such values count with weight 1, because
// an infinity times a weight that has rounded to 0, or times the low part of a weight in mma tiles, becomes NaN.
template <class T>
HOPWELL_DEVICE void store_infinite(const Params& p, int sequence, OutputRow row, int e, int end) {
  const int context = p.cache.context_of(sequence), position = context - p.query.q_len + row.query;
  const Keys visible = p.bias.visible_keys(position);
  const int64_t bias = p.bias.row_offset(sequence, row.query, row.head);
  T* out = out_at<T>(p.output, sequence, row);
  HOPWELL_NO_UNROLL
  for (; e < end; ++e) {
    float sum = 0;
    HOPWELL_NO_UNROLL
    for (int key = visible.begin; key < visible.end; ++key) {
      const int page = p.cache.page_of(sequence, key);
      const int column = p.bias.exists() ? p.bias.column_of(position, key) : -1;
      if (page < 0 ||
          (column >= 0 && decode(load_bits(p.bias.bias, p.bias.type, bias + column), p.bias.type) == -INFINITY))
        continue;
      const float value =
          to_fp32(*element_of<T>(p.cache.v, p.cache.v_at, page, row.head / p.query.group, key % p.cache.block, e));
      if (!(fabsf(value) < INFINITY)) sum += value;
    }
    if (sum != 0) from_fp32(sum, out + e);
  }
}
// Not inlined, for kernels that have no registers left for it.
template <class T>
HOPWELL_NO_INLINE void call_store_infinite(const Params& p, int sequence, OutputRow row, int e, int end) {
  store_infinite<T>(p, sequence, row, e, end);
}

// Result from the sum of exp2 and the sum of exp2 · v: 0 if all logits are −∞, whatever the values are.
HOPWELL_DEVICE float mean_of(float sum, float value) { return sum == 0 ? 0 : value * (1 / sum); }
// Stores element e of a row's result.
template <class T>
HOPWELL_DEVICE void store_value(const Params& p, int sequence, const OutputRow& row, int e, float maximum, float sum,
                                float value) {
  if (!row.exists) return;
  from_fp32(mean_of(sum, value), out_at<T>(p.output, sequence, row) + e);
  if (e == 0 && p.output.lse) *lse_at(p.output, sequence, row) = tile::lse_of(maximum, sum, -INFINITY);
}

// Pair of values in a row block: `pair` is 0 to half − 1 within a row.
struct PairIndex {
  int row, pair;
  HOPWELL_DEVICE PairIndex(const Params& p, int of_row_block)
      : row(of_row_block / p.query.half), pair(of_row_block - row * p.query.half) {}
};

template <class T, int kValues>
HOPWELL_DEVICE void store_sums(const Params& p, int sequence, int row_block, const PairIndex& at,
                               const PartialSums<kValues>& sums) {
  const OutputRow row = output_row_of(p, row_block, at.row);
  HOPWELL_UNROLL
  for (int i = 0; i < kValues; ++i)
    store_value<T>(p, sequence, row, 2 * at.pair + i, sums.maximum, sums.sum, sums.value[i]);
  if (row.exists && sums.may_be_infinite())
    call_store_infinite<T>(p, sequence, row, 2 * at.pair, 2 * at.pair + kValues);
}

// Writes zeros for sequences whose queries see no key.
template <class T>
HOPWELL_DEVICE void store_empty(const Params& p) {
  const Query& query = p.query;
  for (int n = arch::block_index(); n < query.b; n += arch::grid_size()) {
    const int context = p.cache.context_of(n);
    if (tiles_of(p, keys_of_sequence(p, context)) > 0) continue;
    for (int o = arch::thread_index(); o < query.q_len * query.h_q * query.d; o += p.schedule.threads) {
      const int row = o / query.d, e = o - row * query.d, i = row / query.h_q;
      store_value<T>(p, n, {row - i * query.h_q, i, true}, e, -INFINITY, 0, 0);
    }
  }
}

// ---- partial results of the warps of a CTA -------------------------------------------------------------------------

struct RowStats {
  float maximum, sum;
};
// Partial result of a warp for one segment, in shared memory.
template <int kTheValues, int kTheRows>
struct WarpPartial {
  static constexpr int kValues = kTheValues, kRows = kTheRows;
  alignas(16) float values[kValues];  // [rows][pitch]: sums of exp2(logit − maximum) · v
  RowStats stats[kRows];
};
enum : int { kBegunBefore, kBegunHere };  // selects a warp's first or second partial result

enum class Extent : int { none, continues, ends };  // whether its row block continues in the next warp or ends here
struct PartialInfo {
  Extent extent;
  int sequence, row_block;
  int64_t begin;  // first tile of the row block
};

struct MergeStorage {
  PartialInfo info[kMaxWarps][2];
  QuadSums sums[kMaxThreads];
};

// Partial results of one row block in consecutive shares: partial result `which` of the first share, and
// partial result kBegunBefore of each later share.
struct WarpChain {
  int share, which, count;
  bool ends;
};

// Partial results that exist, one bit per share. A share's warp of the first head stores its PartialInfo.
struct WarpChains {
  uint32_t begins, continues, ends;
  HOPWELL_DEVICE explicit WarpChains(const Params& p, const MergeStorage& s) {
    const int lane = arch::lane_index();
    const bool exists = lane < p.schedule.shares;
    const Extent before = exists ? s.info[lane][kBegunBefore].extent : Extent::none;
    begins = arch::ballot(exists && s.info[lane][kBegunHere].extent != Extent::none);
    continues = arch::ballot(before == Extent::continues), ends = arch::ballot(before == Extent::ends);
  }
  HOPWELL_DEVICE WarpChain from(int share, int which) const {
    const int next = which == kBegunBefore ? share : share + 1;  // the first share in which it may continue
    const uint32_t stops = ~(continues >> next);
    const int last = next + int(arch::bfind(stops & (0U - stops)));
    const bool has_end = ends >> last & 1;
    return {share, which, last - share + (has_end ? 1 : 0), has_end};
  }
};

template <int kValues, class Partial>
HOPWELL_DEVICE PartialSums<kValues> load_sums(const Partial& partial, int pitch, const PairIndex& at) {
  struct alignas(4 * kValues) Values {
    float of[kValues];
  };
  const RowStats stats = partial.stats[at.row];
  const auto values = *reinterpret_cast<const Values*>(&partial.values[at.row * pitch + 2 * at.pair]);
  PartialSums<kValues> sums{stats.maximum, stats.sum};
  for (int e = 0; e < kValues; ++e) sums.value[e] = values.of[e];
  return sums;
}

// `partial_of(warp, which)` returns a partial result: of all rows of the row block, or of one head if warps interleave
// heads. Consecutive shares have a constant stride, so that all loads are in flight together, without branches.
template <int kValues, class PartialOf>
HOPWELL_DEVICE PartialSums<kValues> merge_chain(const Params& p, const WarpChain& chain, const PartialOf& partial_of,
                                                int pitch, const PairIndex& at) {
  const int head = p.schedule.interleaved_heads > 1 ? at.row / p.schedule.queries : 0;
  PairIndex of_warp = at;
  of_warp.row -= head * p.schedule.queries;
  const int first = head * p.schedule.shares + chain.share;
  return merge_partials<kMaxWarps>(chain.count, [&](int i) {
    return load_sums<kValues>(partial_of(first + i, i == 0 ? chain.which : kBegunBefore), pitch, of_warp);
  });
}

}  // namespace hopwell::ops::paged_attention::HOPWELL_TARGET
