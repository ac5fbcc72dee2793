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

/// cvt.rn.f16x2.e2m1x2, four times: eight e2m1, adjacent values in one byte, to four pairs of fp16, exact. PTX:
/// #data-movement-and-conversion-instructions-cvt
HOPWELL_DEVICE void unpack_e2m1(uint32_t word, uint32_t (&pairs)[4]) {
#if HOPWELL_ON_DEVICE
  asm("{ .reg .b8 b0, b1, b2, b3; mov.b32 {b0, b1, b2, b3}, %4; cvt.rn.f16x2.e2m1x2 %0, b0; "
      "cvt.rn.f16x2.e2m1x2 %1, b1; cvt.rn.f16x2.e2m1x2 %2, b2; cvt.rn.f16x2.e2m1x2 %3, b3; }"
      : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3])
      : "r"(word));
#else
  const auto half = [&](int i) { return uint32_t{emu::to_fp16_bits(emu::from_e2m1(uint8_t(word >> 4 * i & 15)))}; };
  for (int i = 0; i < 4; ++i) pairs[i] = half(2 * i + 1) << 16 | half(2 * i);
#endif
}
#endif

}  // namespace hopwell::arch
