// paged_attention on GPUs: integers that the host prepares for the kernels, and the element types of tensors.
#pragma once

#include "arch/platform.hpp"

namespace hopwell::ops::paged_attention {

// A divisor with its multiplicative inverse: a / b = a · ⌈2^shift / b⌉ / 2^shift, exact for 0 ≤ a < 2^31.
// Aligned so that kernels load shift and factor together.
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

HOPWELL_HOST_DEVICE int smaller(int a, int b) { return a < b ? a : b; }
HOPWELL_HOST_DEVICE int larger(int a, int b) { return a > b ? a : b; }
HOPWELL_HOST_DEVICE int ceil_div(int a, const Divisor& b) { return (a + b.value - 1) / b; }
// a / b for non-negative numbers. Numbers above 32 bits are rare, and their division is four times slower.
HOPWELL_HOST_DEVICE int64_t quotient(int64_t a, int64_t b) {
  return uint64_t(a | b) >> 32 ? a / b : int64_t{uint32_t(a) / uint32_t(b)};
}

enum class Float : int { fp32, fp16, bf16 };

}  // namespace hopwell::ops::paged_attention
