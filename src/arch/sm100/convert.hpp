// Conversions to and from 8- and 4-bit floats.
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
#endif

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
