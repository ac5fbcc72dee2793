// The split kernel of sparse_mla_decode for 64 heads: the output O += P V, and the stores of results. See
// many_heads.hpp.
#pragma once

#include "ops/sparse_mla_decode/sm80/many_heads_scores.hpp"
#include "ops/sparse_mla_decode/sm80/split_output.hpp"

namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET {

// ---- O += P V ---------------------------------------------------------------------------------------------------------

// A warp's 64 columns of the output of all heads: eight columns for each n.
template <class Config>
using OutputOfHeads = float[Config::kHeadGroups][8][4];

template <class Config>
HOPWELL_DEVICE void rescale(const ManyHeadsStorage<Config>& s, OutputOfHeads<Config>& out) {
  const int lane = WarpAndLane().lane;
  HOPWELL_UNROLL
  for (int m = 0; m < Config::kHeadGroups; ++m) {
    const int head = 16 * m + tile::fragment_row(lane);
    const float factor[2] = {s.heads[0][head].factor, s.heads[0][head + 8].factor};
    if (arch::ballot(factor[0] != 1 || factor[1] != 1) == 0) continue;
    HOPWELL_UNROLL
    for (int x = 0; x < 32; ++x) out[m][x / 4][x % 4] *= factor[x % 4 / 2];
  }
}

// P of 16 heads and 16 keys from `key` on, as operand A.
template <class Config>
HOPWELL_DEVICE void load_p(const ManyHeadsStorage<Config>& s, int group, int key, uint32_t (&a)[4]) {
  const int lane = WarpAndLane().lane;
  arch::ldmatrix(a, arch::shared_address(&s.p[16 * group + lane % 16][key + lane / 16 * 8]));
}

// Adds the products of P (a) of all heads and 16 keys from `key` on with 16 columns: chunk `chunk` of the warp's block.
template <Products kProducts, class Config>
HOPWELL_DEVICE void accumulate_chunk(const ManyHeadsStorage<Config>& s, int key, int chunk,
                                     const uint32_t (&a)[Config::kHeadGroups][4], OutputOfHeads<Config>& out) {
  const auto [warp, lane] = WarpAndLane();
  uint32_t b[4];
  arch::ldmatrix<arch::Transpose::yes>(
      b, arch::shared_address(&s.decoded[key + lane % 16][128 * warp + 32 * chunk + lane / 16 * 16]));
  const uint32_t left[2] = {b[0], b[1]}, right[2] = {b[2], b[3]};
  HOPWELL_UNROLL
  for (int m = 0; m < Config::kHeadGroups; ++m) {
    float (&of_left)[4] = out[m][2 * chunk], (&of_right)[4] = out[m][2 * chunk + 1];
    multiply<kProducts>(of_left, a[m], left), multiply<kProducts>(of_right, a[m], right);
  }
}

// For codes with exact scales. The products of P and scales are rounded to fp16.
template <class Config>
HOPWELL_DEVICE void accumulate_codes(const ManyHeadsStorage<Config>& s, int key, OutputOfHeads<Config>& out) {
  using Row = typename Config::Row;
  const auto [warp, lane] = WarpAndLane();
  HOPWELL_UNROLL
  for (int i = 0; i < Row::kScales; ++i) {
    uint32_t a[Config::kHeadGroups][4];
    HOPWELL_UNROLL
    for (int m = 0; m < Config::kHeadGroups; ++m) load_p(s, m, key, a[m]);
    if constexpr (Row::kHasScales) {
      HOPWELL_UNROLL
      for (int n = 0; n < 2; ++n) {
        const uint32_t scales =
            *reinterpret_cast<const uint32_t*>(&s.scales[warp][i][key + 8 * n + tile::fragment_column(lane)]);
        HOPWELL_UNROLL
        for (int x = 0; x < 2 * Config::kHeadGroups; ++x) {
          uint32_t& word = a[x / 2][2 * n + x % 2];
          word = arch::multiply_fp16(word, scales);
        }
      }
    }
    HOPWELL_UNROLL
    for (int chunk = Row::kChunksOfScale * i; chunk < Row::kChunksOfScale * (i + 1); ++chunk)
      accumulate_chunk<Products::fp16>(s, key, chunk, a, out);
  }
}

// For blocks of bf16, and of codes that were decoded to it. unit: factor of P.
template <class Config>
HOPWELL_DEVICE void accumulate_bf16(const ManyHeadsStorage<Config>& s, int key, float unit,
                                    OutputOfHeads<Config>& out) {
  uint32_t a[Config::kHeadGroups][4];
  HOPWELL_UNROLL
  for (int m = 0; m < Config::kHeadGroups; ++m) {
    load_p(s, m, key, a[m]);
    HOPWELL_UNROLL
    for (uint32_t& word : a[m]) word = bf16_of_p(word, unit);
  }
  HOPWELL_UNROLL
  for (int chunk = 0; chunk < 4; ++chunk) accumulate_chunk<Products::bf16>(s, key, chunk, a, out);
}

template <class Config>
HOPWELL_DEVICE void accumulate(const ManyHeadsStorage<Config>& s, OutputOfHeads<Config>& out) {
  using Row = typename Config::Row;
  const int warp = WarpAndLane().warp;
  rescale(s, out);
  HOPWELL_UNROLL
  for (int key = 0; key < Config::kKeys; key += 16) {
    if (!Row::is_plain(warp) && (!Row::kHasScales || s.exact[warp]))
      accumulate_codes(s, key, out);
    else if constexpr (Row::kHasPlain || Row::kHasScales)
      accumulate_bf16(s, key, unit_of_output<Config>(warp), out);
  }
}

// ---- results ----------------------------------------------------------------------------------------------------------

// Calls store(head, column, low, high) for all pairs of adjacent columns of a lane's output.
template <class Config, class Store>
HOPWELL_DEVICE void for_each_pair(const OutputOfHeads<Config>& out, const Store& store) {
  const auto [warp, lane] = WarpAndLane();
  const int t = tile::quad_lane(lane);
  const bool plain = Config::Row::is_plain(warp);
  const float unit = 1 / unit_of_output<Config>(warp);
  HOPWELL_UNROLL
  for (int row = 0; row < 2 * Config::kHeadGroups; ++row) {
    HOPWELL_UNROLL
    for (int chunk = 0; chunk < 4; ++chunk) {
      const float (&left)[4] = out[row / 2][2 * chunk], (&right)[4] = out[row / 2][2 * chunk + 1];
      const float a = left[row % 2 * 2] * unit, b = left[row % 2 * 2 + 1] * unit, c = right[row % 2 * 2] * unit,
                  d = right[row % 2 * 2 + 1] * unit;
      const int head = 8 * row + tile::fragment_row(lane), column = 64 * warp + 16 * chunk;
      store(head, column + (plain ? 2 : 4) * t, a, plain ? b : c);
      store(head, column + (plain ? 8 + 2 * t : 4 * t + 2), plain ? c : b, d);
    }
  }
}

// Writes the results of a query that has no other splits.
template <class Config>
HOPWELL_DEVICE void store_results(const SplitParams& p, ManyHeadsStorage<Config>& s, const Stats& stats,
                                  const OutputOfHeads<Config>& out) {
  const Work work = work_of<Config>(p);
  const int thread = arch::thread_index_anew(), of_thread = thread / Config::kLanesOfHead;
  arch::syncthreads();  // before factors are written again
  if (thread % Config::kLanesOfHead == 0 && work.first_head + of_thread < p.h_q)
    s.heads[0][of_thread].factor = finish_head(p, work.query, work.first_head + of_thread, stats, true);
  arch::syncthreads();
  for_each_pair<Config>(out, [&](int head, int column, float low, float high) {
    if (work.first_head + head >= p.h_q) return;
    const int64_t at = row_of_out(p, work.query, work.first_head + head) + column;
    const float factor = s.heads[0][head].factor;
    low = final_value(low, factor), high = final_value(high, factor);
    if (p.out_is_fp32)
      static_cast<float*>(p.out)[at] = low, static_cast<float*>(p.out)[at + 1] = high;
    else
      *reinterpret_cast<uint32_t*>(static_cast<bf16*>(p.out) + at) = arch::pack_bf16(low, high);
  });
}

// Writes the partial result of a split.
template <class Config>
HOPWELL_DEVICE void store_partial(const SplitParams& p, const Stats& stats, const OutputOfHeads<Config>& out,
                                  bool empty) {
  const Work work = work_of<Config>(p);
  const int64_t first = partial_row(p, work.query, work.split) + work.first_head;
  const int thread = arch::thread_index_anew(), of_thread = thread / Config::kLanesOfHead;
  if (thread % Config::kLanesOfHead == 0 && work.first_head + of_thread < p.h_q)
    p.partial_stats[first + of_thread] = arch::bit_cast<arch::Words2>(stats);
  if (empty) return;
  for_each_pair<Config>(out, [&](int head, int column, float low, float high) {
    if (work.first_head + head >= p.h_q) return;
    arch::store_vector(p.partial_out + (first + head) * kDv + column,
                       arch::Words2{{arch::bit_cast<uint32_t>(low), arch::bit_cast<uint32_t>(high)}});
  });
}

}  // namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET
