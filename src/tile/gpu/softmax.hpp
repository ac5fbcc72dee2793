// The end of a row's softmax, in units of log 2: what becomes of reference, sum and maximum.
#pragma once

#include "arch/sm80/convert.hpp"
#include "tile/gpu/numbers.hpp"

namespace hopwell::tile {

/// log Σ exp(score) of sum = Σ exp2(score · log2 e − reference); +inf where there are no keys, NaN where a score is.
HOPWELL_DEVICE float lse_of(float reference, float sum) {
  return sum == 0 ? INFINITY : (reference + arch::log2_approx(sum)) * kLn2;
}
/// What a sink divides the output of a row by: 1 + exp(sink − lse).
HOPWELL_DEVICE float sink_divisor(float sink, float lse) { return 1 + arch::exp2_approx((sink - lse) * kLog2E); }
/// The maximum of scores that fmaxf has made, which loses NaN; their sum has kept it.
HOPWELL_DEVICE float max_or_nan(float maximum, float sum) { return sum != sum && maximum != INFINITY ? sum : maximum; }

}  // namespace hopwell::tile
