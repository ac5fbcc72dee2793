// Online softmax of a row, in units of log 2: row_max, which is subtracted from scores before
// exponentials, and the final values of the sum, LSE and maximum.
#pragma once

#include <cmath>

#include "arch/sm80/convert.hpp"
#include "tile/gpu/numbers.hpp"

namespace hopwell::tile {

/// rescale_threshold: how far a score may exceed row_max before row_max moves. P ≤ 2^8 is as accurate in bf16 as P ≤ 1,
/// and outputs are rarely rescaled.
inline constexpr float kRescaleThreshold = 8;
/// The new row_max for scores up to `maximum`.
HOPWELL_DEVICE float next_row_max(float row_max, float maximum) {
  return maximum > row_max + kRescaleThreshold ? maximum : row_max;
}
/// Updates row_max. Returns row_scale, the factor that rescales the row's output and sum.
HOPWELL_DEVICE float update_row_max(float& row_max, float to) {
  const float factor = to == row_max ? 1 : arch::exp2_approx(row_max - to);
  row_max = to;
  return factor;
}
/// A rescaled sum, rounded before the next addition. Otherwise the compiler fuses the product and the addition, with
/// one rounding, in some kernels and not in others, and their bits differ.
HOPWELL_DEVICE float rescaled(float sum, float factor) { return fmaf(sum, factor, 0.0F); }
/// Updates row_max and rescales the sum.
HOPWELL_DEVICE float update_row_max(float& row_max, float& sum, float to) {
  const float factor = update_row_max(row_max, to);
  sum = rescaled(sum, factor);
  return factor;
}
/// The value subtracted from scores: 0 if row_max is −∞, because then all scores are −∞, and −∞ − −∞ is NaN.
HOPWELL_DEVICE float finite_row_max(float row_max) { return row_max == -INFINITY ? 0 : row_max; }

/// log Σ exp(score) for sum = Σ exp2(score · log2 e − row_max); `empty` if there are no keys, NaN if a score is NaN.
HOPWELL_DEVICE float lse_of(float row_max, float sum, float empty = INFINITY) {
  return sum == 0 ? empty : (row_max + arch::log2_approx(sum)) * kLn2;
}
/// Divisor that a sink applies to the output of a row: 1 + exp(sink − lse).
HOPWELL_DEVICE float sink_divisor(float sink, float lse) { return 1 + arch::exp2_approx((sink - lse) * kLog2E); }
/// The maximum of scores with NaN restored: fmaxf ignores NaN, but the sum of the row has kept it.
HOPWELL_DEVICE float max_or_nan(float maximum, float sum) { return sum != sum && maximum != INFINITY ? sum : maximum; }

}  // namespace hopwell::tile
