// Conversions and approximate functions.
// "PTX:" anchors are sections of https://docs.nvidia.com/cuda/parallel-thread-execution/
#pragma once

#include "../platform.hpp"
#if !HOPWELL_ON_DEVICE
#include "../emu/numeric.hpp"
#endif

namespace hopwell::arch {

/// cvt.rn.bf16x2.f32 / cvt.rn.f16x2.f32: two fp32 rounded to nearest even; `low` in bits 0-15. PTX:
/// #data-movement-and-conversion-instructions-cvt
HOPWELL_DEVICE uint32_t pack_bf16(float low, float high) {
#if HOPWELL_ON_DEVICE
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
#else
  return uint32_t{emu::to_bf16_bits(high)} << 16 | emu::to_bf16_bits(low);
#endif
}
HOPWELL_DEVICE uint32_t pack_fp16(float low, float high) {
#if HOPWELL_ON_DEVICE
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
#else
  return uint32_t{emu::to_fp16_bits(high)} << 16 | emu::to_fp16_bits(low);
#endif
}

/// mul.rn.f16x2: products of two pairs of fp16, rounded to nearest even. PTX:
/// #half-precision-floating-point-instructions-mul
HOPWELL_DEVICE uint32_t multiply_fp16(uint32_t a, uint32_t b) {
#if HOPWELL_ON_DEVICE
  uint32_t r;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
#else
  const auto product = [](uint32_t x, uint32_t y) {
    return uint32_t{emu::to_fp16_bits(emu::from_fp16(uint16_t(x)) * emu::from_fp16(uint16_t(y)))};
  };
  return product(a >> 16, b >> 16) << 16 | product(a, b);
#endif
}

/// fma.rn.bf16x2 with -0: products of two pairs of bf16, rounded to nearest even. PTX:
/// #half-precision-floating-point-instructions-fma
HOPWELL_DEVICE uint32_t multiply_bf16(uint32_t a, uint32_t b) {
#if HOPWELL_ON_DEVICE
  uint32_t r;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(0x80008000u));
  return r;
#else
  const auto product = [](uint32_t x, uint32_t y) {
    return uint32_t{emu::to_bf16_bits(emu::from_bf16(uint16_t(x)) * emu::from_bf16(uint16_t(y)))};
  };
  return product(a >> 16, b >> 16) << 16 | product(a, b);
#endif
}

HOPWELL_DEVICE bf16 to_bf16(float x) { return {uint16_t(pack_bf16(x, 0.f))}; }

/// cvt.f32.f16, exact. PTX: #data-movement-and-conversion-instructions-cvt
HOPWELL_DEVICE float to_float(fp16 x) {
#if HOPWELL_ON_DEVICE
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(x.bits));
  return f;
#else
  return emu::from_fp16(x.bits);
#endif
}

/// cvt.rni.s32.f32: the nearest integer, ties to even. Saturates to the range of int32; 0 for NaN. PTX:
/// #data-movement-and-conversion-instructions-cvt
HOPWELL_DEVICE int round_to_int(float x) {
#if HOPWELL_ON_DEVICE
  int i;
  asm("cvt.rni.s32.f32 %0, %1;" : "=r"(i) : "f"(x));
  return i;
#else
  if (x != x) return 0;
  return x >= 0x1p31F ? INT32_MAX : x < -0x1p31F ? INT32_MIN : int(std::nearbyint(x));
#endif
}

/// max.NaN.f32: the maximum; NaN if either operand is NaN. PTX: #floating-point-instructions-max
HOPWELL_DEVICE float max_nan(float a, float b) {
#if HOPWELL_ON_DEVICE
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
#else
  return a != a || b != b ? emu::canonical(a + b) : a > b || (a == b && !std::signbit(a)) ? a : b;
#endif
}

/// ex2.approx.ftz.f32: 2^x, relative error 2^-22; subnormals are zero. PTX: #floating-point-instructions-ex2
HOPWELL_DEVICE float exp2_approx(float x) {
#if HOPWELL_ON_DEVICE
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return emu::canonical(emu::flushed(emu::exp2(x)));
#endif
}

/// lg2.approx.ftz.f32: log2(x), absolute error 2^-22 around 1. PTX: #floating-point-instructions-lg2
HOPWELL_DEVICE float log2_approx(float x) {
#if HOPWELL_ON_DEVICE
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return emu::canonical(emu::log2(emu::flushed(x)));
#endif
}

}  // namespace hopwell::arch
