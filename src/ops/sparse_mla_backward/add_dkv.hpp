// sparse_mla_backward on GPUs: how a main kernel adds its part of dKV to dkv_accum in global memory.
//
// Accumulators (of mma.sync, of wgmma, and of tcgen05.ld.16x256b) give a lane pairs of adjacent columns at a distance
// of eight. So dkv_accum permutes the columns: a lane adds its values of 16 columns unmodified with one instruction.
// The postprocess (postprocess_dkv.hpp) restores the order. Adjacent quads of lanes first exchange 16 columns for 16,
// so that eight lanes share a row: an instruction adds full lines of 128 bytes.
#pragma once

#include "arch/sm80/memory.hpp"
#include "ops/sparse_mla_backward/params.hpp"
#include "tile/gpu/fixed_point.hpp"

namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET {

// Position of column c in a row of dkv_accum: of each 16 columns, the four of a lane are adjacent.
HOPWELL_DEVICE int sum_position(int c) { return c / 16 * 16 + c / 2 % 4 * 4 + c / 8 % 2 * 2 + c % 2; }
// The same for fixed-point sums, in words of two adjacent columns: eight lanes that add to 32 columns of a row add to
// eight adjacent words at a time.
HOPWELL_DEVICE int sum_word(int c) { return c / 32 * 16 + c / 8 % 2 * 8 + c / 16 % 2 * 4 + c / 2 % 4; }

// Offsets at which a lane adds: four columns of each of four keys. In units of four fp32, or of one 64-bit word, from
// the first row's panel on; negative if nothing is added. 32 bits are enough, because unsupported() in plan.cpp refuses
// more than 2^33 elements.
template <bool kFixed>
struct SumRows {
  int at[4];
  float scale[kFixed ? 4 : 1];
};

// For a warp's 16 keys, of the 64 of a step. keys[i] is negative for an invalid entry. kEveryKey: then it is ~k, and
// its zero sums are added to key k.
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

// Adds four columns of row i: this lane's columns among the 32 from `column` on. kEveryKey: every row has a key, so no
// branch is needed.
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
