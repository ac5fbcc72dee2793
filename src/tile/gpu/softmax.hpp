// A row's softmax as its scores come, in units of log 2: its reference, from which exponentials are counted; and what
// becomes of reference, sum and maximum in the end.
#pragma once

#include <cmath>

#include "arch/sm80/convert.hpp"
#include "tile/gpu/numbers.hpp"

namespace hopwell::tile {

/// How far a score may pass its row's reference before the reference moves. P ≤ 2^8 is as exact in bf16 as P ≤ 1, and
/// outputs are seldom scaled.
inline constexpr float kReferenceSlack = 8;
/// The reference for scores up to `maximum`.
HOPWELL_DEVICE float next_reference(float reference, float maximum) {
  return maximum > reference + kReferenceSlack ? maximum : reference;
}
/// Moves a row's reference. Returns what its output and its sum shrink by.
HOPWELL_DEVICE float move_reference(float& reference, float to) {
  const float factor = to == reference ? 1 : arch::exp2_approx(reference - to);
  reference = to;
  return factor;
}
/// A sum that shrinks, rounded before anything is added to it: of a product and a sum the compiler would make one
/// operation, with one rounding, in one kernel and not in another, which then has other bits.
HOPWELL_DEVICE float shrunk(float sum, float factor) { return fmaf(sum, factor, 0.0F); }
/// The same as above, and its sum has shrunk.
HOPWELL_DEVICE float move_reference(float& reference, float& sum, float to) {
  const float factor = move_reference(reference, to);
  sum = shrunk(sum, factor);
  return factor;
}
/// What is subtracted from scores: 0 where the reference is −∞, as all scores are, for −∞ − −∞ is NaN.
HOPWELL_DEVICE float finite_reference(float reference) { return reference == -INFINITY ? 0 : reference; }

/// log Σ exp(score) of sum = Σ exp2(score · log2 e − reference); `empty` where there are no keys, NaN where a score is.
HOPWELL_DEVICE float lse_of(float reference, float sum, float empty = INFINITY) {
  return sum == 0 ? empty : (reference + arch::log2_approx(sum)) * kLn2;
}
/// What a sink divides the output of a row by: 1 + exp(sink − lse).
HOPWELL_DEVICE float sink_divisor(float sink, float lse) { return 1 + arch::exp2_approx((sink - lse) * kLog2E); }
/// The maximum of scores that fmaxf has made, which loses NaN; their sum has kept it.
HOPWELL_DEVICE float max_or_nan(float maximum, float sum) { return sum != sum && maximum != INFINITY ? sum : maximum; }

}  // namespace hopwell::tile
