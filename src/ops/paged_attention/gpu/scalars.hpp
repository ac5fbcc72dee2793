// paged_attention on GPUs: integers that the host prepares for the kernels, and the element types of tensors.
#pragma once

#include "tile/divisor.hpp"

namespace hopwell::ops::paged_attention {

using tile::Divisor;

HOPWELL_HOST_DEVICE int smaller(int a, int b) { return a < b ? a : b; }
HOPWELL_HOST_DEVICE int larger(int a, int b) { return a > b ? a : b; }
HOPWELL_HOST_DEVICE int ceil_div(int a, const Divisor& b) { return (a + b.value - 1) / b; }
// a / b for non-negative numbers. Numbers above 32 bits are rare, and their division is four times slower.
HOPWELL_HOST_DEVICE int64_t quotient(int64_t a, int64_t b) {
  return uint64_t(a | b) >> 32 ? a / b : int64_t{uint32_t(a) / uint32_t(b)};
}

enum class Float : int { fp32, fp16, bf16 };

}  // namespace hopwell::ops::paged_attention
