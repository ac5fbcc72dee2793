// Conversions to and from 8-bit floats.
// "PTX:" anchors are sections of https://docs.nvidia.com/cuda/parallel-thread-execution/
#pragma once

#include "../sm80/convert.hpp"

namespace hopwell::arch {

#if HOPWELL_HAS_SM90
/// cvt.rn.satfinite.e4m3x2.f32 (from sm_89 on): two fp32, `low` in bits 0-7. PTX:
/// #data-movement-and-conversion-instructions-cvt
HOPWELL_DEVICE uint16_t pack_e4m3(float low, float high) {
#if HOPWELL_ON_DEVICE
  uint16_t r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
  return r;
#else
  return uint16_t(emu::to_e4m3_bits(high) << 8 | emu::to_e4m3_bits(low));
#endif
}

/// cvt.rn.f16x2.e4m3x2: two e4m3 to two fp16, exact. PTX: #data-movement-and-conversion-instructions-cvt
HOPWELL_DEVICE uint32_t unpack_e4m3(uint16_t pair) {
#if HOPWELL_ON_DEVICE
  uint32_t r;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"(pair));
  return r;
#else
  return uint32_t{emu::to_fp16_bits(emu::from_e4m3(uint8_t(pair >> 8)))} << 16 |
         emu::to_fp16_bits(emu::from_e4m3(uint8_t(pair)));
#endif
}

/// max.u16x2: maxima of the 16-bit halves of two words. PTX: #integer-arithmetic-instructions-max
HOPWELL_DEVICE uint32_t max_u16x2(uint32_t a, uint32_t b) {
#if HOPWELL_ON_DEVICE
  uint32_t r;
  asm("max.u16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
#else
  const auto larger = [](uint32_t x, uint32_t y) { return x > y ? x : y; };
  return larger(a >> 16, b >> 16) << 16 | larger(a & 0xffff, b & 0xffff);
#endif
}

/// set.gt.u32.bf16x2: for each half of two pairs of bf16, all ones if a > b, else 0. PTX:
/// #half-precision-comparison-instructions-set
HOPWELL_DEVICE uint32_t greater_bf16(uint32_t a, uint32_t b) {
#if HOPWELL_ON_DEVICE
  uint32_t r;
  asm("set.gt.u32.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
#else
  const auto greater = [](uint32_t x, uint32_t y) { return emu::from_bf16(uint16_t(x)) > emu::from_bf16(uint16_t(y)); };
  return (greater(a >> 16, b >> 16) ? 0xffff0000u : 0) | (greater(a, b) ? 0xffffu : 0);
#endif
}
#endif

}  // namespace hopwell::arch
