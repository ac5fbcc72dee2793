// sparse_mla_backward on GPUs: how a main kernel adds its share of dKV to global memory.
//
// Accumulators (of mma.sync, of wgmma, and of tcgen05.ld.16x256b) give a lane pairs of neighbouring columns, eight
// apart. Sums therefore lie with their columns permuted, so that what a lane holds of 16 columns goes out by one
// instruction as it is; finish_dkv.hpp puts them in order. Neighbouring quads of lanes only trade 16 columns for 16
// first, so that eight lanes share a row: an instruction adds full lines of 128 bytes.
#pragma once

#include "arch/sm80/memory.hpp"
#include "ops/sparse_mla_backward/params.hpp"
#include "tile/gpu/fixed_point.hpp"

namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET {

// Where column c of a row lies among its sums: of each 16 columns, a lane's four side by side.
HOPWELL_DEVICE int sum_position(int c) { return c / 16 * 16 + c / 2 % 4 * 4 + c / 8 % 2 * 2 + c % 2; }
// The same of fixed-point sums, in words of two neighbouring columns: eight lanes that add to 32 columns of a row add
// to eight neighbours at a time.
HOPWELL_DEVICE int sum_word(int c) { return c / 32 * 16 + c / 8 % 2 * 8 + c / 16 % 2 * 4 + c / 2 % 4; }

// Where a lane adds: four columns of each of four keys. In units of four fp32 or of one 64-bit word from the first
// row's panel on; negative where nothing is added. 32 bits are enough for 2^33 elements: see check_plan.
template <bool kFixed>
struct SumRows {
  int at[4];
  float scale[kFixed ? 4 : 1];
};

// Of a warp's 16 keys, of the 64 of a step. keys[i]: below 0 where there is none. kEveryKey: ~k there, where k is a key that
// takes its sums, which are zeros.
template <int kDqk, bool kFixed, bool kEveryKey = false, class Keys>
HOPWELL_DEVICE SumRows<kFixed> load_sum_rows(const Params& p, const Keys& keys, int t) {
  const bool wanted = kFixed || kEveryKey || p.dkv;
  const int first = t / 32 * 16 + (t % 32 / 4 & ~1), own = t & 7, stride = kFixed ? kDqk / 2 : p.dkv_stride / 4;
  SumRows<kFixed> rows;
  HOPWELL_UNROLL
  for (int i = 0; i < 4; ++i) {
    int key = wanted ? keys[first + (i & 1) + 8 * (i >> 1)] : -1;
    if (kEveryKey) key ^= key >> 31;
    rows.at[i] = !kEveryKey && key < 0 ? -1 : key * stride + own;
    if constexpr (kFixed) rows.scale[i] = key < 0 ? 0 : p.scale[key];
  }
  return rows;
}

// Adds four columns of row i, those of the 32 from `column` on that are this lane's. kEveryKey: there is a row for
// each, and no branch.
template <bool kEveryKey, bool kFixed>
HOPWELL_DEVICE void add_columns(const Params& p, const SumRows<kFixed>& rows, int i, int column, const float (&v)[4]) {
  const int at = rows.at[i];
  if constexpr (kFixed) {
    HOPWELL_UNROLL
    for (int pair = 0; pair < 2; ++pair) {
      const int64_t word =
          tile::pack_pair(tile::to_fixed(v[2 * pair], rows.scale[i]), tile::to_fixed(v[2 * pair + 1], rows.scale[i]));
      if (at >= 0) arch::red_add(p.fixed_dkv + int64_t{at} + column / 2 + 8 * pair, word);
    }
  } else {
    float* to = p.dkv + int64_t{at} * 4 + column;
#if HOPWELL_HAS_SM90
    if (kEveryKey || at >= 0) arch::red_add_v4(to, v[0], v[1], v[2], v[3]);
#else
    HOPWELL_UNROLL
    for (int c = 0; c < 4; ++c)
      if (at >= 0) arch::red_add(to + c, v[c]);
#endif
  }
}

// Adds a warp's [16 keys][2 kSize columns] from `column` on.
template <bool kEveryKey = false, bool kFixed, int kSize>
HOPWELL_DEVICE void add_panel(const Params& p, const float (&acc)[kSize], int column, const SumRows<kFixed>& rows) {
  const bool odd_quad = arch::thread_index_anew() & 4;
  HOPWELL_UNROLL
  for (int e = 0; e < kSize; e += 16) {  // 32 columns
    HOPWELL_UNROLL
    for (int r = 0; r < 2; ++r) {
      float v[2][4];
      HOPWELL_UNROLL
      for (int i = 0; i < 4; ++i) {
        const float low = acc[e + i / 2 * 4 + 2 * r + i % 2], high = acc[e + 8 + i / 2 * 4 + 2 * r + i % 2];
        const float theirs = arch::shuffle_xor(odd_quad ? low : high, 4);
        v[0][i] = odd_quad ? theirs : low;
        v[1][i] = odd_quad ? high : theirs;
      }
      add_columns<kEveryKey>(p, rows, 2 * r, column + 2 * e, v[0]);
      add_columns<kEveryKey>(p, rows, 2 * r + 1, column + 2 * e, v[1]);
    }
  }
}

}  // namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET
