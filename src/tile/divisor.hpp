// Division of numbers below 2^31 by a number that the host knows.
#pragma once

#include "arch/platform.hpp"

namespace hopwell::tile {

/// A divisor with its multiplicative inverse: a / b = a · ⌈2^shift / b⌉ / 2^shift, exact for 0 ≤ a < 2^31.
/// Aligned so that kernels load shift and factor together.
struct alignas(8) Divisor {
  int shift = 31;
  uint32_t factor = 1U << 31;
  int value = 1;
  Divisor() = default;
  Divisor(int of) : value(of) {  // NOLINT(google-explicit-constructor)
    while (int64_t{1} << (shift - 31) < of) ++shift;
    factor = uint32_t(((uint64_t{1} << shift) + uint64_t(of) - 1) / uint64_t(of));
  }
  HOPWELL_HOST_DEVICE operator int() const { return value; }  // NOLINT(google-explicit-constructor)
};
HOPWELL_HOST_DEVICE int operator/(int a, const Divisor& b) { return int(uint64_t(uint32_t(a)) * b.factor >> b.shift); }
HOPWELL_HOST_DEVICE int operator%(int a, const Divisor& b) { return a - a / b * b.value; }

}  // namespace hopwell::tile
