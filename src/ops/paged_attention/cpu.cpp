// Paged decode attention on the CPU, split by keys (flash decoding).
//
// A sequence's visible keys are divided into chunks of whole tiles, its (head, query) rows into groups. A work item is
// a chunk of a group and produces (max, sum, unnormalised out) of its rows. A second pass merges the chunks of each row
// in order. The division depends on the sequence's own length alone, so its result has the same bits for any number of
// threads and in any batch.
//
// An item processes its chunk in tiles of kTile keys, which are runs of consecutive slots of pages:
//   logits = (q + u) . k       all runs, each page's heads together, a KV head's rows sharing every load of k
//   logits -> p                bias, scale, masks, running maximum and sum, row by row
//   acc   += p . v             all runs
// Keys and values are converted to fp32 in registers; q + u, logits and p are fp32 throughout. Long chunks are summed
// in parts of kMaxTerms terms, which bounds the rounding error.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/paged_attention/cpu.cpp"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include "ops/paged_attention/cpu-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace hopwell::ops::paged_attention::HWY_NAMESPACE {

void ScoreF32(const Run<float>& run, const RowGroup& rows, const float* q, float* logits) {
  Score(run, rows, q, logits);
}
void ScoreF16(const Run<float16>& run, const RowGroup& rows, const float* q, float* logits) {
  Score(run, rows, q, logits);
}
void ScoreBF16(const Run<bfloat16>& run, const RowGroup& rows, const float* q, float* logits) {
  Score(run, rows, q, logits);
}
void AccumulateF32(const Run<float>& run, const RowGroup& rows, const float* p, float* acc) {
  Accumulate(run, rows, p, acc);
}
void AccumulateF16(const Run<float16>& run, const RowGroup& rows, const float* p, float* acc) {
  Accumulate(run, rows, p, acc);
}
void AccumulateBF16(const Run<bfloat16>& run, const RowGroup& rows, const float* p, float* acc) {
  Accumulate(run, rows, p, acc);
}

}  // namespace hopwell::ops::paged_attention::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include <algorithm>
#include <cmath>
#include <limits>

#include "tile/cpu/parallel.hpp"
#include "tile/cpu/vector.hpp"

namespace hopwell::ops::paged_attention {
namespace {

HWY_EXPORT(ScoreF32);
HWY_EXPORT(ScoreF16);
HWY_EXPORT(ScoreBF16);
HWY_EXPORT(AccumulateF32);
HWY_EXPORT(AccumulateF16);
HWY_EXPORT(AccumulateBF16);

void score(const Run<float>& run, const RowGroup& rows, const float* q, float* logits) {
  HWY_DYNAMIC_DISPATCH(ScoreF32)(run, rows, q, logits);
}
void score(const Run<float16>& run, const RowGroup& rows, const float* q, float* logits) {
  HWY_DYNAMIC_DISPATCH(ScoreF16)(run, rows, q, logits);
}
void score(const Run<bfloat16>& run, const RowGroup& rows, const float* q, float* logits) {
  HWY_DYNAMIC_DISPATCH(ScoreBF16)(run, rows, q, logits);
}
void accumulate(const Run<float>& run, const RowGroup& rows, const float* p, float* acc) {
  HWY_DYNAMIC_DISPATCH(AccumulateF32)(run, rows, p, acc);
}
void accumulate(const Run<float16>& run, const RowGroup& rows, const float* p, float* acc) {
  HWY_DYNAMIC_DISPATCH(AccumulateF16)(run, rows, p, acc);
}
void accumulate(const Run<bfloat16>& run, const RowGroup& rows, const float* p, float* acc) {
  HWY_DYNAMIC_DISPATCH(AccumulateBF16)(run, rows, p, acc);
}

constexpr float kNegInf = -std::numeric_limits<float>::infinity();
constexpr float kHidden = -1;            // stands for the weight of a key that a row does not see
constexpr std::int64_t kTile = 256;      // keys whose logits are in memory at the same time
constexpr std::int64_t kMaxChunks = 64;  // chunks of a sequence: bounds the memory of partial results
constexpr std::int64_t kMaxRows = 64;    // rows of a group: bounds a thread's scratch
constexpr std::int64_t kMaxTerms = 512;  // terms that are added one by one to an fp32 sum
constexpr std::int64_t kTokenBytes =
    8192;  // bytes of a token that a group reads, if it has enough heads: suits the prefetchers
constexpr std::int64_t kLdLogits = kTile + 8;  // kernels write up to three logits past the last

// Calls function(pointer to the view's element `offset`, typed).
template <class Function>
auto with_type(const View& view, std::int64_t offset, Function function) {
  switch (view.dtype) {
    case DType::kFloat16:
      return function(view.as<const float16>() + offset);
    case DType::kBFloat16:
      return function(view.as<const bfloat16>() + offset);
    default:
      return function(view.as<const float>() + offset);
  }
}

void load(const View& view, std::int64_t offset, std::int64_t count, float* to) {
  with_type(view, offset, [&](const auto* from) { cpu::to_float(from, to, static_cast<std::size_t>(count)); });
}

// The keys of a sequence: at least one query sees each key of [first, last).
struct Sequence {
  std::int64_t context, first, last, chunk;
  [[nodiscard]] std::int64_t chunks() const { return last > first ? (last - first + chunk - 1) / chunk : 0; }
};

Sequence sequence(const Problem& p, std::int64_t n) {
  const std::int64_t given = p.context_lens.as<const std::int32_t>()[n * p.context_lens.stride[0]];
  const std::int64_t context = std::clamp<std::int64_t>(given, 0, p.max_blocks * p.block);
  const std::int64_t position = context - p.q_len;  // of the first query
  const std::int64_t first = p.window > position ? 0 : position - p.window + 1;
  const std::int64_t tiles = (context - first + kTile - 1) / kTile;
  return {context, first, context, kTile * std::max<std::int64_t>(1, (tiles + kMaxChunks - 1) / kMaxChunks)};
}

// Division of a sequence's h_q * q_len rows, in the order [h_q][q_len], into groups: a group has whole KV heads, or a
// part of a KV head.
struct Grouping {
  std::int64_t rows_per_head, rows, groups;

  explicit Grouping(const Problem& p) : rows_per_head(p.h_q / p.h_kv * p.q_len) {
    const std::int64_t wanted = kTokenBytes / (p.d * static_cast<std::int64_t>(size_of(p.q.dtype)));
    const std::int64_t heads = std::clamp<std::int64_t>(std::min(wanted, kMaxRows / rows_per_head), 1, p.h_kv);
    rows = std::min(heads * rows_per_head, kMaxRows);
    groups_per_head_ = rows_per_head > kMaxRows ? (rows_per_head + kMaxRows - 1) / kMaxRows : 1;
    groups = rows_per_head > kMaxRows ? p.h_kv * groups_per_head_ : (p.h_kv + heads - 1) / heads;
  }
  [[nodiscard]] std::int64_t first_row(std::int64_t group) const {
    return rows_per_head > kMaxRows ? group / groups_per_head_ * rows_per_head + group % groups_per_head_ * kMaxRows
                                    : group * rows;
  }
  [[nodiscard]] std::int64_t end_row(std::int64_t group, std::int64_t all_rows) const {
    const std::int64_t end = rows_per_head > kMaxRows ? (group / groups_per_head_ + 1) * rows_per_head : all_rows;
    return std::min(first_row(group) + rows, end);
  }

 private:
  std::int64_t groups_per_head_ = 1;
};

// Partial results of (chunk, row): [max, sum, acc[d]] with acc = sum_j exp(logit_j - max) * v_j.
struct Partials {
  const Problem& p;
  std::vector<std::int64_t> first_chunk;  // [b + 1]
  cpu::Scratch<float> data;

  explicit Partials(const Problem& problem)
      : p(problem), first_chunk(counts(problem)), data(first_chunk.back() * rows() * (p.d + 2)) {}
  [[nodiscard]] std::int64_t rows() const { return p.h_q * p.q_len; }
  [[nodiscard]] float* at(std::int64_t chunk, std::int64_t row) const {
    return data.get() + (chunk * rows() + row) * (p.d + 2);
  }

 private:
  static std::vector<std::int64_t> counts(const Problem& p) {
    std::vector<std::int64_t> first(static_cast<std::size_t>(p.b) + 1);
    for (std::int64_t n = 0; n < p.b; ++n)
      first[static_cast<std::size_t>(n) + 1] = first[static_cast<std::size_t>(n)] + sequence(p, n).chunks();
    return first;
  }
};

// Computes one chunk of keys for one group of rows. A thread constructs one worker and uses it for many items.
template <class T>
class Worker {
 public:
  Worker(const Problem& p, const Grouping& grouping)
      : p_(p),
        grouping_(grouping),
        columns_(p.v.group == 1 ? kLanesOfColumn : 1),
        q_u_(grouping.rows * p.d),
        q_v_(p.r ? grouping.rows * p.d : 0),
        logits_(grouping.rows * kLdLogits),
        bias_(kLdLogits),
        acc_(grouping.rows * p.d * columns_),
        totals_(grouping.rows * p.d),
        max_(grouping.rows),
        sum_(grouping.rows) {}

  void run(const Partials& partials, std::int64_t n, std::int64_t chunk, std::int64_t group) {
    n_ = n;
    sequence_ = sequence(p_, n);
    row0_ = grouping_.first_row(group);
    rows_ = grouping_.end_row(group, p_.h_q * p_.q_len) - row0_;
    load_queries();
    std::fill_n(acc_.get(), rows_ * p_.d * columns_, 0.0F);
    std::fill_n(max_.get(), rows_, kNegInf);
    std::fill_n(sum_.get(), rows_, 0.0);
    has_totals_ = false;
    const std::int64_t first = sequence_.first + chunk * sequence_.chunk,
                       last = std::min(first + sequence_.chunk, sequence_.last), part = kMaxTerms * columns_;
    for (std::int64_t key = first; key < last; key += kTile) {
      if (key > first && (key - first) % part == 0) move_to_totals();
      tile(key, std::min(kTile, last - key));
    }
    for (std::int64_t row = 0; row < rows_; ++row) {
      float* to = partials.at(partials.first_chunk[static_cast<std::size_t>(n)] + chunk, row0_ + row);
      to[0] = max_.get()[row], to[1] = static_cast<float>(sum_.get()[row]);
      for (std::int64_t e = 0; e < p_.d; ++e) to[2 + e] = total(row, e);
      const bool finite = std::all_of(to + 2, to + 2 + p_.d, [](float x) { return std::isfinite(x); });
      if (!finite && std::isfinite(to[1])) count_whole(row, first, last, to + 2);
    }
  }

 private:
  static constexpr std::int64_t kLanesOfColumn = 8;

  // Keys [at, at + tokens) of the tile lie in page `page` from slot `slot` on.
  struct Extent {
    std::int64_t page, slot, at, tokens;
  };

  // (q + u) and (q + v) of the group's rows, in fp32.
  void load_queries() {
    for (std::int64_t row = 0; row < rows_; ++row) {
      const std::int64_t h = (row0_ + row) / p_.q_len, i = (row0_ + row) % p_.q_len;
      float* q = q_u_.get() + row * p_.d;
      load(p_.q, n_ * p_.q.stride[0] + i * p_.q.stride[1] + h * p_.q.stride[2], p_.d, q);
      if (p_.r) {
        float* q_v = q_v_.get() + row * p_.d;
        std::copy_n(q, p_.d, q_v);
        add(p_.pos_bias_v, h, q_v);
      }
      add(p_.pos_bias_u, h, q);
    }
  }
  void add(const View& bias, std::int64_t h, float* q) {
    if (!bias) return;
    load(bias, h * bias.stride[0], p_.d, bias_.get());
    cpu::add(bias_.get(), q, static_cast<std::size_t>(p_.d));
  }

  void tile(std::int64_t key, std::int64_t keys) {
    find_pages(key, keys);
    const RowGroup rows{std::min(rows_, grouping_.rows_per_head), p_.d, kLdLogits};
    for (std::size_t e = 0; e < extents_.size(); ++e) {
      const T* next = e + 1 < extents_.size() ? first_k(extents_[e + 1]) : first_v(extents_[0]);
      score(run_of(first_k(extents_[e]), next, p_.k, extents_[e]), rows, q_u_.get(), logits_.get() + extents_[e].at);
    }
    bool all_seen = true;
    for (std::int64_t row = 0; row < rows_; ++row) all_seen &= softmax(row, key, keys);
    for (std::size_t e = 0; e < extents_.size(); ++e) {
      const T* next = e + 1 < extents_.size() ? first_v(extents_[e + 1]) : first_k(following_);
      const Run<T> run = run_of(first_v(extents_[e]), next, p_.v, extents_[e]);
      const RowGroup to{rows.rows_per_head, p_.d * columns_, kLdLogits};
      if (all_seen)
        accumulate(run, to, logits_.get() + extents_[e].at, acc_.get());
      else
        accumulate_seen(run, to, logits_.get() + extents_[e].at);
    }
  }

  // Finds the tile's extents and the extent after the tile, which is only a prefetch hint.
  void find_pages(std::int64_t key, std::int64_t keys) {
    extents_.clear();
    const std::int32_t* table = p_.block_tables.as<const std::int32_t>() + n_ * p_.block_tables.stride[0];
    const auto mapped = [&](std::int64_t page) { return page >= 0 && page < p_.blocks; };
    for (std::int64_t at = 0; at < keys;) {
      const std::int64_t slot = (key + at) % p_.block, tokens = std::min(p_.block - slot, keys - at);
      const std::int64_t page = table[(key + at) / p_.block];
      if (mapped(page)) extents_.push_back({page, slot, at, tokens});
      at += tokens;
    }
    const std::int64_t after = key + keys;
    const std::int64_t page = after < sequence_.last ? table[after / p_.block] : -1;
    if (!extents_.empty()) following_ = mapped(page) ? Extent{page, after % p_.block, 0, 0} : extents_[0];
  }

  // The first vector of the group's heads.
  const T* first_k(const Extent& extent) const { return first(p_.k_cache, p_.k, extent); }
  const T* first_v(const Extent& extent) const { return first(p_.v_cache, p_.v, extent); }
  const T* first(const View& cache, const CacheStrides& s, const Extent& extent) const {
    const std::int64_t kv_head = row0_ / grouping_.rows_per_head;
    return cache.as<const T>() + extent.page * s.page + kv_head * s.head + extent.slot * s.slot;
  }
  Run<T> run_of(const T* data, const T* next, const CacheStrides& s, const Extent& extent) const {
    const std::int64_t heads = (rows_ + grouping_.rows_per_head - 1) / grouping_.rows_per_head;
    return {data, next, s, heads, extent.tokens, p_.d};
  }

  // A row's query, and the keys [first, last) of a tile that causality and the window let it see.
  struct Reach {
    std::int64_t h, i, position, first, last;
  };
  [[nodiscard]] Reach reach(std::int64_t row, std::int64_t key, std::int64_t keys) const {
    const std::int64_t h = (row0_ + row) / p_.q_len, i = (row0_ + row) % p_.q_len;
    const std::int64_t position = sequence_.context - p_.q_len + i;
    const std::int64_t first =
        std::clamp<std::int64_t>(p_.window > position ? 0 : position - p_.window + 1 - key, 0, keys);
    return {h, i, position, first, std::clamp<std::int64_t>(position + 1 - key, first, keys)};
  }

  // Turns a row's dot products into exp(logit - running maximum). Returns true if the row sees all keys of the tile.
  // Otherwise the weights of hidden keys become kHidden.
  bool softmax(std::int64_t row, std::int64_t key, std::int64_t keys) {
    float* x = logits_.get() + row * kLdLogits;
    const auto [h, i, position, first, last] = reach(row, key, keys);
    bool all_seen = first == 0 && last == keys;
    if (last > first) all_seen &= finish_logits(row, h, i, position, key + first, last - first, x + first);
    std::fill(x, x + first, kNegInf);
    std::fill(x + last, x + keys, kNegInf);
    std::int64_t mapped = 0;
    for (const Extent& extent : extents_) {
      std::fill(x + mapped, x + extent.at, kNegInf);
      mapped = extent.at + extent.tokens;
    }
    std::fill(x + mapped, x + keys, kNegInf);

    const float peak = cpu::max(x, static_cast<std::size_t>(keys));
    if (peak > max_.get()[row]) {
      const float factor = std::exp(max_.get()[row] - peak);
      cpu::scale(acc_.get() + row * p_.d * columns_, factor, static_cast<std::size_t>(p_.d * columns_));
      if (has_totals_) cpu::scale(totals_.get() + row * p_.d, factor, static_cast<std::size_t>(p_.d));
      sum_.get()[row] *= static_cast<double>(factor);
      max_.get()[row] = peak;
    }
    const float shift = max_.get()[row] == kNegInf ? 0 : max_.get()[row];  // keeps a NaN among nothing but -inf
    sum_.get()[row] += static_cast<double>(cpu::exp_sum(x, 1, shift, static_cast<std::size_t>(keys)));
    if (all_seen) return true;
    std::fill(x, x + first, kHidden);
    std::fill(x + last, x + keys, kHidden);
    for (std::int64_t j = first; j < last && (p_.bias || p_.r); ++j)
      if (bias_.get()[j - first] == kNegInf) x[j] = kHidden;
    return false;
  }

  // x = scale * (x + bias) - slope * delta, or -inf if the bias is -inf. Returns true if no bias was -inf.
  bool finish_logits(std::int64_t row, std::int64_t h, std::int64_t i, std::int64_t position, std::int64_t key,
                     std::int64_t keys, float* x) {
    const float scale = p_.scale;
    bool all_seen = true;
    if (!p_.bias && !p_.r) {
      for (std::int64_t j = 0; j < keys; ++j) x[j] *= scale;
    } else {
      const float* bias = bias_.get();
      load_bias(row, h, i, position, key, keys);
      for (std::int64_t j = 0; j < keys; ++j) {
        const bool hidden = bias[j] == kNegInf;
        all_seen &= !hidden;
        const float logit = p_.post_scale ? scale * x[j] + bias[j] : scale * (x[j] + bias[j]);
        x[j] = hidden ? kNegInf : logit;
      }
    }
    if (p_.alibi_slopes) {
      const float slope = p_.alibi_slopes.as<const float>()[h * p_.alibi_slopes.stride[0]];
      for (std::int64_t j = 0; j < keys; ++j)
        x[j] = x[j] == kNegInf ? kNegInf : x[j] - slope * static_cast<float>(position - key - j);
    }
    return all_seen;
  }

  // Loads the biases of `keys` keys from `key` on into bias_. All keys are at or before `position`.
  void load_bias(std::int64_t row, std::int64_t h, std::int64_t i, std::int64_t position, std::int64_t key,
                 std::int64_t keys) {
    float* to = bias_.get();
    if (p_.bias && p_.bias_kind == HOPWELL_BIAS_KEY) {  // columns [key, inside) exist, the rest does not
      const std::int64_t inside = std::clamp<std::int64_t>(p_.extent - key, 0, keys);
      const std::int64_t from = n_ * p_.bias.stride[0] + h * p_.bias.stride[1] + i * p_.bias.stride[2];
      if (inside > 0) load(p_.bias, from + key, inside, to);
      if (inside < keys)
        std::fill(to + inside, to + keys, beyond([&](float* last) { load(p_.bias, from + p_.extent - 1, 1, last); }));
      return;
    }
    // Distances fall as keys rise: the first `outside` keys lie beyond the last column.
    const std::int64_t outside = std::clamp<std::int64_t>(position - key - p_.extent + 1, 0, keys);
    const std::int64_t nearest = position - (key + keys - 1);
    if (p_.r) {
      if (outside < keys) score_r(row, h, position - key - outside, keys - outside, to + outside);
      if (outside > 0)
        std::fill(to, to + outside, beyond([&](float* last) { score_r(row, h, p_.extent - 1, 1, last); }));
    } else {
      const std::int64_t from = n_ * p_.bias.stride[0] + h * p_.bias.stride[1];
      if (outside < keys) load(p_.bias, from + nearest, keys - outside, to + outside);
      std::reverse(to + outside, to + keys);
      if (outside > 0)
        std::fill(to, to + outside, beyond([&](float* last) { load(p_.bias, from + p_.extent - 1, 1, last); }));
    }
  }

  // The bias of columns beyond the last column; `load_last` loads the last column's bias.
  template <class LoadLast>
  float beyond(LoadLast load_last) const {
    float last[4] = {};  // kernels write four
    if (p_.out_of_range == HOPWELL_OUT_OF_RANGE_NEG_INF) return kNegInf;
    if (p_.out_of_range == HOPWELL_OUT_OF_RANGE_CLAMP) load_last(last);
    return last[0];
  }

  // to[t] = (q + v) . r[delta - t]
  void score_r(std::int64_t row, std::int64_t h, std::int64_t delta, std::int64_t count, float* to) {
    with_type(p_.r, h * p_.r.stride[0] + delta * p_.r.stride[1], [&](const auto* r) {
      const CacheStrides back{.slot = -p_.r.stride[1], .group = p_.d, .group_stride = p_.d};
      score(Run<std::remove_cvref_t<decltype(*r)>>{r, r, back, 1, count, p_.d}, RowGroup{1, p_.d, kLdLogits},
            q_v_.get() + row * p_.d, to);
    });
  }

  // Accumulates row by row, without the keys that a row does not see, because their values may be NaN.
  void accumulate_seen(const Run<T>& run, const RowGroup& rows, const float* p) {
    const RowGroup one{1, rows.ld_vector, rows.ld_logits};
    for (std::int64_t row = 0; row < rows_; ++row, p += rows.ld_logits) {
      const T* v = run.data + row / rows.rows_per_head * run.strides.head;
      for (std::int64_t t = 0; t < run.tokens;) {
        std::int64_t end = t;
        while (end < run.tokens && p[end] != kHidden) ++end;
        const T* seen = v + t * run.strides.slot;
        if (end > t)
          accumulate(Run<T>{seen, seen, run.strides, 1, end - t, run.d}, one, p + t, acc_.get() + row * rows.ld_vector);
        t = end + 1;
      }
    }
  }

  [[nodiscard]] float total(std::int64_t row, std::int64_t e) const {
    const float* acc = acc_.get() + (row * p_.d + e) * columns_;
    float sum = has_totals_ ? totals_.get()[row * p_.d + e] : 0;
    for (std::int64_t lane = 0; lane < columns_; ++lane) sum += acc[lane];
    return sum;
  }
  void move_to_totals() {
    for (std::int64_t row = 0; row < rows_; ++row)
      for (std::int64_t e = 0; e < p_.d; ++e) totals_.get()[row * p_.d + e] = total(row, e);
    has_totals_ = true;
    std::fill_n(acc_.get(), rows_ * p_.d * columns_, 0.0F);
  }

  // Adds values that a row sees and that are not finite to `sums` [d] with weight 1, because a positive weight that
  // rounds to 0 would turn an infinity into NaN.
  void count_whole(std::int64_t row, std::int64_t first_key, std::int64_t last_key, float* sums) {
    std::vector<float> whole(static_cast<std::size_t>(p_.d));
    for (std::int64_t key = first_key; key < last_key; key += kTile) {
      const std::int64_t keys = std::min(kTile, last_key - key);
      const auto [h, i, position, first, last] = reach(row, key, keys);
      const bool has_bias = last > first && (p_.bias || p_.r);
      if (has_bias) load_bias(row, h, i, position, key + first, last - first);
      find_pages(key, keys);
      for (const Extent& extent : extents_) {
        const T* v = first_v(extent) + row / grouping_.rows_per_head * p_.v.head;
        for (std::int64_t j = extent.at; j < extent.at + extent.tokens; ++j, v += p_.v.slot) {
          if (j < first || j >= last || (has_bias && bias_.get()[j - first] == kNegInf)) continue;
          for (std::int64_t e = 0; e < p_.d; ++e) {
            const float value = to_float(v[e / p_.v.group * p_.v.group_stride + e % p_.v.group]);
            if (!std::isfinite(value)) whole[static_cast<std::size_t>(e)] += value;
          }
        }
      }
    }
    for (std::int64_t e = 0; e < p_.d; ++e)
      if (const float value = whole[static_cast<std::size_t>(e)]; value != 0) sums[e] = value;
  }

  const Problem& p_;
  const Grouping& grouping_;
  std::int64_t columns_;  // partial sums of an element of acc
  bool has_totals_ = false;
  cpu::Scratch<float> q_u_, q_v_, logits_, bias_, acc_, totals_, max_;
  cpu::Scratch<double> sum_;
  std::vector<Extent> extents_;
  Extent following_{};
  Sequence sequence_{};
  std::int64_t n_ = 0, row0_ = 0, rows_ = 0;
};

// out and lse of one row from its chunks, in order.
template <class T>
void merge(const Partials& partials, std::int64_t n, std::int64_t row, double* acc, float* rounded) {
  const Problem& p = partials.p;
  const std::int64_t begin = partials.first_chunk[static_cast<std::size_t>(n)],
                     end = partials.first_chunk[static_cast<std::size_t>(n) + 1];
  float peak = kNegInf;
  for (std::int64_t chunk = begin; chunk < end; ++chunk) peak = std::max(peak, *partials.at(chunk, row));
  double sum = 0;
  std::fill_n(acc, p.d, 0.0);
  for (std::int64_t chunk = begin; chunk < end; ++chunk) {
    const float* part = partials.at(chunk, row);
    const double weight = part[0] == kNegInf ? 0 : std::exp(static_cast<double>(part[0]) - static_cast<double>(peak));
    sum += weight * static_cast<double>(part[1]);
    for (std::int64_t e = 0; e < p.d; ++e) {
      const auto value = static_cast<double>(part[2 + e]);
      acc[e] += std::isfinite(value) ? weight * value : value;
    }
  }
  for (std::int64_t e = 0; e < p.d; ++e) rounded[e] = sum == 0 ? 0.0F : static_cast<float>(acc[e] / sum);
  const std::int64_t h = row / p.q_len, i = row % p.q_len;
  T* out = p.out.as<T>() + n * p.out.stride[0] + i * p.out.stride[1] + h * p.out.stride[2];
  cpu::from_float(rounded, out, static_cast<std::size_t>(p.d));
  if (!p.lse) return;
  const float lse = sum == 0 ? kNegInf : static_cast<float>(static_cast<double>(peak) + std::log(sum));
  p.lse.as<float>()[n * p.lse.stride[0] + i * p.lse.stride[1] + h * p.lse.stride[2]] = lse;
}

template <class T>
void launch_as(const Problem& p) {
  const Grouping grouping(p);
  const Partials partials(p);
  const auto& first_chunk = partials.first_chunk;
  cpu::parallel_for(
      first_chunk.back() * grouping.groups, [&] { return Worker<T>(p, grouping); },
      [&](std::int64_t item, Worker<T>& worker) {
        const std::int64_t chunk = item / grouping.groups;
        const auto after = std::upper_bound(first_chunk.begin(), first_chunk.end(), chunk);
        worker.run(partials, after - first_chunk.begin() - 1, chunk - *(after - 1), item % grouping.groups);
      });
  cpu::parallel_for(
      p.b, [&] { return std::pair(cpu::Scratch<double>(p.d), cpu::Scratch<float>(p.d)); },
      [&](std::int64_t n, auto& scratch) {
        for (std::int64_t row = 0; row < partials.rows(); ++row)
          merge<T>(partials, n, row, scratch.first.get(), scratch.second.get());
      });
}

void launch(const Problem& p, Stream /*stream*/) {
  switch (p.q.dtype) {
    case DType::kFloat32:
      return launch_as<float>(p);
    case DType::kFloat16:
      return launch_as<float16>(p);
    default:
      return launch_as<bfloat16>(p);
  }
}

const runtime::Registration cpu{"cpu", launch};

}  // namespace
}  // namespace hopwell::ops::paged_attention

#endif  // HWY_ONCE
