// Number types in memory and in computation.
#pragma once

#include "arch/sm80/convert.hpp"

namespace hopwell::tile {

/// Kernels compute exponentials and logarithms to base 2: exp(x) = exp2(x · kLog2E), log(x) = log2(x) · kLn2.
inline constexpr float kLog2E = 1.44269504088896F, kLn2 = 0.693147180559945F;

/// To fp32, exactly.
HOPWELL_DEVICE float to_fp32(float x) { return x; }
HOPWELL_DEVICE float to_fp32(arch::bf16 x) { return arch::to_float(x); }
HOPWELL_DEVICE float to_fp32(arch::fp16 x) { return arch::to_float(x); }

/// Element i of an array of bf16 or fp32.
HOPWELL_DEVICE float load_fp32(const void* data, bool is_bf16, int64_t i) {
  return is_bf16 ? to_fp32(static_cast<const arch::bf16*>(data)[i]) : static_cast<const float*>(data)[i];
}

/// Stores x, rounded to nearest even.
HOPWELL_DEVICE void from_fp32(float x, float* to) { *to = x; }
HOPWELL_DEVICE void from_fp32(float x, arch::bf16* to) { *to = arch::to_bf16(x); }
HOPWELL_DEVICE void from_fp32(float x, arch::fp16* to) { *to = {uint16_t(arch::pack_fp16(x, 0))}; }

}  // namespace hopwell::tile
