// A tile of scores of 64 heads and 64 keys in the accumulators of a warpgroup's wgmma: mask, maximum, exponentials,
// sums, and P as A fragments of the products with V.
//
// A thread has two rows (heads) of its warp's 16 (fragment.hpp). The sum of a tile is
//
//     Σ over keys 16 w + 8 j + 2 c + b: over j, then b, then w in pairs, for each c
#pragma once

#include <cmath>

#include "arch/sm90/cluster.hpp"
#include "tile/gpu/fragment.hpp"
#include "tile/gpu/panel.hpp"
#include "tile/gpu/softmax.hpp"
#include "tile/gpu/warp.hpp"

namespace hopwell::tile {

/// Panel multiplied at position n of a score: RoPE in the middle, where its copy delays no other panel.
template <int kDqk>
HOPWELL_HOST_DEVICE constexpr int score_panel(int n) {
  return kDqk == 512 || n < 4 ? n : n == 4 ? 8 : n - 1;
}

/// Valid keys of a tile for all heads, 32 per word.
struct TileMask {
  uint32_t low, high;

  HOPWELL_DEVICE bool lacks_any() const { return (low & high) != 0xffffffff; }
  HOPWELL_DEVICE bool has(int, int half, int column) const { return ((half == 0 ? low : high) >> column) & 1; }
};

/// Masks the scores and computes the maximum of each row, in log 2. Returns the unit of the scores in log 2.
/// kMostlyPartial: almost no tile is complete.
template <bool kMostlyPartial, class Mask>
HOPWELL_DEVICE float tile_row_max(float scale_log2, const Mask& mask, float (&scores)[32], float (&max)[2]) {
  const int column = fragment_column();
  float unit = scale_log2;
  if (kMostlyPartial && scale_log2 > 0) {
    HOPWELL_UNROLL
    for (int i = 0; i < 32; ++i)
      if (!mask.has(i / 2 % 2, i / 16, column + i / 4 % 4 * 8 + i % 2)) scores[i] = -INFINITY;
  } else if (mask.lacks_any() || !(scale_log2 > 0)) {
    unit = 1;
    HOPWELL_UNROLL
    for (int i = 0; i < 32; ++i) {
      const bool counts = mask.has(i / 2 % 2, i / 16, column + i / 4 % 4 * 8 + i % 2);
      scores[i] = counts ? scores[i] * scale_log2 : -INFINITY;
    }
  }
  float part[4] = {scores[0], scores[1], scores[2], scores[3]};
  HOPWELL_UNROLL
  for (int i = 4; i < 32; ++i) part[i % 4] = fmaxf(part[i % 4], scores[i]);
  HOPWELL_UNROLL
  for (int r = 0; r < 2; ++r) {
    max[r] = fmaxf(part[2 * r], part[2 * r + 1]);
    max[r] = max_of_quad(max[r]) * unit;
  }
  return unit;
}

/// Sum of exponentials of 16 keys. A lane has the keys with one value of c. `value(j, b)`: of key 8 j + 2 c + b.
template <class Value>
HOPWELL_DEVICE float sum_of_16(const Value& value) {
  return (value(0, 0) + value(1, 0)) + (value(0, 1) + value(1, 1));
}
HOPWELL_DEVICE float sum_of_tile(const float (&sums)[4]) { return (sums[0] + sums[1]) + (sums[2] + sums[3]); }

/// Replaces scores by probabilities, and adds the sums over the thread's columns to `sum`.
HOPWELL_DEVICE void exponentiate(float unit, const float (&row_max)[2], float (&scores)[32], float (&sum)[2]) {
  const float shift[2] = {finite_row_max(row_max[0]), finite_row_max(row_max[1])};
  float sums[2][4];
  HOPWELL_UNROLL
  for (int i = 0; i < 32; ++i) scores[i] = arch::exp2_approx(fmaf(scores[i], unit, -shift[i / 2 % 2]));
  HOPWELL_UNROLL
  for (int i = 0; i < 8; ++i)
    sums[i % 2][i / 2] = sum_of_16([&](int j, int b) { return scores[i / 2 * 8 + 4 * j + i % 2 * 2 + b]; });
  HOPWELL_UNROLL
  for (int r = 0; r < 2; ++r) sum[r] += sum_of_tile(sums[r]);
}

/// P as A fragments of the products with V.
struct Probabilities {
  uint32_t fragment[4][4];

  /// Address of a lane's row for stmatrix and ldmatrix of 16 keys. `panel`: address of P.
  static HOPWELL_DEVICE uint32_t address(uint32_t panel, int step) {
    const uint32_t lane = uint32_t(arch::lane_index()), row = uint32_t(arch::warp_index() % 4 * 16) + lane % 16;
    return panel + swizzled(row, uint32_t(2 * step) + lane / 16);
  }
  /// Rounds the probabilities and stores them.
  HOPWELL_DEVICE void round_and_store(const float (&scores)[32], uint32_t panel) {
    HOPWELL_UNROLL
    for (int step = 0; step < 4; ++step) {
      HOPWELL_UNROLL
      for (int i = 0; i < 4; ++i)
        fragment[step][i] = arch::pack_bf16(scores[8 * step + 2 * i], scores[8 * step + 2 * i + 1]);
      arch::stmatrix(address(panel, step), fragment[step]);
    }
  }
  HOPWELL_DEVICE void load(uint32_t panel) {
    HOPWELL_UNROLL
    for (int step = 0; step < 4; ++step) arch::ldmatrix(fragment[step], address(panel, step));
  }
};

}  // namespace hopwell::tile
