// Sums whose bits do not depend on the order of their additions, because they are integer sums. Each contribution is
// rounded to a multiple of a unit 2^-e, and atomic additions sum the multiples.
//
// Scale     All sums of a row, such as the gradient of a key, share one unit. Before any addition, every contributor to
//           a row records a bound of its contribution's magnitude (SumBounds). With n contributions, none above
//           `largest`, no sum exceeds bound = n · largest. e is the largest exponent for which bound < 2^kBits units.
// Headroom  Rounding changes a contribution by at most half a unit (truncation by one unit). `bound` is a product of
//           floats, which may be too small by a relative 2^-23. So a sum of n contributions stays within 2^kBits (1 +
//           2^-23) + n/2 units, which leaves room for the sign:
//               two sums of 32 bits in a word, kPairedBits = 29:  n < 3 · 2^30 (n/2 is less than 2^31 − 2^29 − 2^6)
//               one sum of 64 bits, kWideBits = 61:               any n of 32 bits
// Error     A contribution is off by at most half a unit, 2^-kBits · n · largest; truncation doubles it. Paired: by at
//           most that or 2^-kPairedBitsOfOne · largest, whichever is larger.
// Layout    Wide: one 64-bit word per sum. Paired: two adjacent sums in one 64-bit word as low + 2^32 high, both
//           signed, so that one 64-bit addition adds to both. A negative low borrows from high; unpack_pair corrects
//           this.
// Rounding  A paired contribution is rounded by adding it to 3/2 · 2^23. Floats within 2^22 of this value have a
//           spacing of 1, so the bits of the result are the bits of 3/2 · 2^23 plus the multiple. The kernel adds these
//           bits unmodified. So after n additions each half of a word is too large by n times the bits of 3/2 · 2^23,
//           which is subtracted at the end. A contribution costs one fused multiplication and addition.
// Invalid   If the bound is infinite or NaN, there is no unit, and the row becomes NaN.
#pragma once

#include <cmath>

#include "arch/sm80/convert.hpp"
#include "arch/sm80/memory.hpp"
#include "arch/sm80/reduce.hpp"

namespace hopwell::tile {

inline constexpr int kPairedBits = 29, kPairedBitsOfOne = 22, kWideBits = 61;

/// Bounds of the contributions to the sums of each row, in global memory, initially zero.
struct SumBounds {
  uint32_t* largest;  // [rows]: bits of the largest recorded bound
  uint32_t* count;    // [rows]: number of contributions

  /// Records one more contribution to a row, of magnitude at most |bound|. Infinities and NaN compare above all
  /// numbers.
  HOPWELL_DEVICE void note(int64_t row, float bound) const {
    arch::red_max(largest + row, arch::bit_cast<uint32_t>(bound) & 0x7fffffff);
    arch::red_add(count + row, 1u);
  }
  /// Bound of one contribution to the row, and of the row's sums; infinite or NaN if no bound exists.
  HOPWELL_DEVICE float bound_of_one(int64_t row) const { return arch::bit_cast<float>(largest[row]); }
  HOPWELL_DEVICE float bound(int64_t row) const { return bound_of_one(row) * float(count[row]); }
};

/// e of the unit 2^-e: sums of magnitude up to `bound` stay below 2^kBits units.
template <int kBits>
HOPWELL_DEVICE int unit_exponent(float bound) {
  const int above = int(arch::bit_cast<uint32_t>(bound) >> 23) - 126;  // 2^above > bound
  return kBits - above;
}

/// 2^e, exactly, for −126 <= e <= 127 and −1022 <= e <= 1023.
HOPWELL_DEVICE float power_of_two(int e) { return arch::bit_cast<float>(uint32_t(e + 127) << 23); }
HOPWELL_DEVICE double wide_power_of_two(int e) { return arch::bit_cast<double>(uint64_t(e + 1023) << 52); }

/// Scale of paired sums for a bound of the sums and a bound of each contribution: 2^e as a float, with e at most 126,
/// or NaN.
HOPWELL_DEVICE float paired_scale(float bound, float bound_of_one) {
  const int of_sum = unit_exponent<kPairedBits>(bound), of_one = unit_exponent<kPairedBitsOfOne>(bound_of_one);
  const int largest = of_sum < of_one ? of_sum : of_one, e = largest > 126 ? 126 : largest;
  return bound < INFINITY ? power_of_two(e) : NAN;
}

/// The value added to a paired sum for a contribution of 0, and the same as a float.
inline constexpr uint32_t kFixedZero = 0x4b400000;
inline constexpr float kFixedZeroAsFloat = 0x1.8p23F;
/// For x: its rounded multiple plus kFixedZero.
HOPWELL_DEVICE uint32_t to_fixed(float x, float scale) {
  return arch::bit_cast<uint32_t>(x * scale + kFixedZeroAsFloat);  // x · scale is exact
}
HOPWELL_DEVICE int64_t pack_pair(uint32_t low, uint32_t high) { return int64_t(uint64_t{high} << 32 | low); }

/// Removes the kFixedZero of n contributions from a word of two sums.
HOPWELL_DEVICE int64_t without_fixed_zeros(int64_t word, uint32_t n) {
  return int64_t(uint64_t(word) - n * ((uint64_t{kFixedZero} << 32) + kFixedZero));
}
HOPWELL_DEVICE int unpack_pair(int64_t word, bool high) {
  const int low = int(uint32_t(uint64_t(word)));
  return high ? int(uint32_t((uint64_t(word) - uint64_t(int64_t{low})) >> 32)) : low;
}
HOPWELL_DEVICE float from_fixed(int sum, float scale) { return float(double(sum) / double(scale)); }

/// A contribution to a wide sum, and the final sum. The scale is wide_power_of_two(e).
HOPWELL_DEVICE int64_t to_wide_fixed(float x, double scale) { return int64_t(double(x) * scale); }
HOPWELL_DEVICE float from_wide_fixed(int64_t sum, int e) { return float(double(sum) * wide_power_of_two(-e)); }

}  // namespace hopwell::tile
