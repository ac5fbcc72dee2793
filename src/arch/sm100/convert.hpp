// Conversions to and from 4-bit floats.
// "PTX:" anchors are sections of https://docs.nvidia.com/cuda/parallel-thread-execution/
#pragma once

#include "../sm90/convert.hpp"

namespace hopwell::arch {

#if HOPWELL_HAS_SM100A
/// cvt.rn.satfinite.e2m1x2.f32: two fp32 to a byte, `low` in bits 0-3. PTX:
/// #data-movement-and-conversion-instructions-cvt
HOPWELL_DEVICE uint8_t pack_e2m1(float low, float high) {
#if HOPWELL_ON_DEVICE
  uint32_t r;
  asm("{ .reg .b8 b; cvt.rn.satfinite.e2m1x2.f32 b, %1, %2; cvt.u32.u8 %0, b; }" : "=r"(r) : "f"(high), "f"(low));
  return uint8_t(r);
#else
  return uint8_t(emu::to_e2m1_bits(high) << 4 | emu::to_e2m1_bits(low));
#endif
}

/// cvt.rn.f16x2.e2m1x2: a byte of two e2m1 to two fp16, exact. PTX: #data-movement-and-conversion-instructions-cvt
HOPWELL_DEVICE uint32_t unpack_e2m1(uint8_t pair) {
#if HOPWELL_ON_DEVICE
  uint32_t r;
  asm("{ .reg .b8 b; cvt.u8.u32 b, %1; cvt.rn.f16x2.e2m1x2 %0, b; }" : "=r"(r) : "r"(uint32_t(pair)));
  return r;
#else
  return uint32_t{emu::to_fp16_bits(emu::from_e2m1(pair >> 4))} << 16 | emu::to_fp16_bits(emu::from_e2m1(pair & 15));
#endif
}
#endif

}  // namespace hopwell::arch
