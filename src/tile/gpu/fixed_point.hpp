// Sums whose bits do not depend on the order of their additions: sums of integers. Each contribution is rounded to a
// multiple of a unit 2^-e, and the multiples are added by atomic additions: in any order the same bits.
//
// Scale     All sums of a row, such as the gradient of a key, have one unit. Before anything is added, whoever will
//           contribute to a row notes a bound of its contribution's magnitude (SumBounds). With n contributions, none
//           above `largest`, no sum exceeds bound = n · largest. e is the largest for which bound < 2^kBits units.
// Headroom  Rounding moves a contribution by at most half a unit (truncation by one), and `bound` is a product of
//           floats, which may be too small by 2^-23 of it. So a sum of n stays within 2^kBits (1 + 2^-23) + n/2
//           units, which leaves room for the sign:
//               two sums of 32 bits in a word, kPairedBits = 29:  n < 3 · 2^30 (n/2 is less than 2^31 − 2^29 − 2^6)
//               one sum of 64 bits, kWideBits = 61:               any n of 32 bits
// Error     A contribution is off by at most half a unit, 2^-kBits · n · largest; truncation doubles it. Paired, never by
//           less than 2^-kPairedBitsOfOne · largest.
// Layout    Wide: a word a sum. Paired: two neighbouring sums in one 64-bit word as low + 2^32 high, both signed, so
//           that one 64-bit addition adds to both; a negative low borrows from high, which unpack_pair gives back.
// Rounding  Paired contributions are rounded by an addition to 3/2 · 2^23, whose floats are one apart for 2^22 to either
//           side, so that the bits of the sum are those of 3/2 · 2^23 + the multiple. They are added as they are: n of them
//           are too large by n times the bits of 3/2 · 2^23, in either half of a word, which comes off at the end. So a
//           contribution costs one fused multiplication and addition.
// Invalid   Where the bound is infinite or NaN there is no unit, and the row becomes NaN.
#pragma once

#include <cmath>

#include "arch/sm80/convert.hpp"
#include "arch/sm80/memory.hpp"
#include "arch/sm80/reduce.hpp"

namespace hopwell::tile {

inline constexpr int kPairedBits = 29, kPairedBitsOfOne = 22, kWideBits = 61;

/// What is known of the contributions to the sums of each row, in global memory, zeros at first.
struct SumBounds {
  uint32_t* largest;  // [rows]: the bits of the largest bound of a contribution
  uint32_t* count;    // [rows]: contributions

  /// One more contribution to a row, of a magnitude of at most |bound|. Infinities and NaN are above all numbers.
  HOPWELL_DEVICE void note(int64_t row, float bound) const {
    arch::red_max(largest + row, arch::bit_cast<uint32_t>(bound) & 0x7fffffff);
    arch::red_add(count + row, 1u);
  }
  /// Of one contribution to the row, and of the row's sums; infinite or NaN if there is none.
  HOPWELL_DEVICE float bound_of_one(int64_t row) const { return arch::bit_cast<float>(largest[row]); }
  HOPWELL_DEVICE float bound(int64_t row) const { return bound_of_one(row) * float(count[row]); }
};

/// e of the unit 2^-e: sums of which none exceeds `bound` stay below 2^kBits units.
template <int kBits>
HOPWELL_DEVICE int unit_exponent(float bound) {
  const int above = int(arch::bit_cast<uint32_t>(bound) >> 23) - 126;  // 2^above > bound
  return kBits - above;
}

/// 2^e, exactly, for −126 <= e <= 127 and −1022 <= e <= 1023.
HOPWELL_DEVICE float power_of_two(int e) { return arch::bit_cast<float>(uint32_t(e + 127) << 23); }
HOPWELL_DEVICE double wide_power_of_two(int e) { return arch::bit_cast<double>(uint64_t(e + 1023) << 52); }

/// What is 1 in paired sums of such a bound, and such a bound of each contribution: 2^e as a float, with e at most 126, or
/// NaN.
HOPWELL_DEVICE float paired_scale(float bound, float bound_of_one) {
  const int of_sum = unit_exponent<kPairedBits>(bound), of_one = unit_exponent<kPairedBitsOfOne>(bound_of_one);
  const int largest = of_sum < of_one ? of_sum : of_one, e = largest > 126 ? 126 : largest;
  return bound < INFINITY ? power_of_two(e) : NAN;
}

/// What is added to a paired sum for 0, and as a float.
inline constexpr uint32_t kFixedZero = 0x4b400000;
inline constexpr float kFixedZeroAsFloat = 0x1.8p23F;
/// For x: the multiple that it is rounded to, and kFixedZero.
HOPWELL_DEVICE uint32_t to_fixed(float x, float scale) {
  return arch::bit_cast<uint32_t>(x * scale + kFixedZeroAsFloat);  // x · scale is exact
}
HOPWELL_DEVICE int64_t pack_pair(uint32_t low, uint32_t high) { return int64_t(uint64_t{high} << 32 | low); }

/// A word of two sums of n contributions.
HOPWELL_DEVICE int64_t without_fixed_zeros(int64_t word, uint32_t n) {
  return int64_t(uint64_t(word) - n * ((uint64_t{kFixedZero} << 32) + kFixedZero));
}
HOPWELL_DEVICE int unpack_pair(int64_t word, bool high) {
  const int low = int(uint32_t(uint64_t(word)));
  return high ? int(uint32_t((uint64_t(word) - uint64_t(int64_t{low})) >> 32)) : low;
}
HOPWELL_DEVICE float from_fixed(int sum, float scale) { return float(double(sum) / double(scale)); }

/// A contribution to a wide sum, and the sum; the scale is wide_power_of_two(e).
HOPWELL_DEVICE int64_t to_wide_fixed(float x, double scale) { return int64_t(double(x) * scale); }
HOPWELL_DEVICE float from_wide_fixed(int64_t sum, int e) { return float(double(sum) * wide_power_of_two(-e)); }

}  // namespace hopwell::tile
