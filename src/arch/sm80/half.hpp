// Arithmetic on pairs of fp16.
// "PTX:" anchors are sections of https://docs.nvidia.com/cuda/parallel-thread-execution/
#pragma once

#include "../platform.hpp"
#if !HOPWELL_ON_DEVICE
#include "../emu/numeric.hpp"
#endif

namespace hopwell::arch {

#if !HOPWELL_ON_DEVICE
namespace emu {
/// a · b + c, rounded once. The product is exact in double. So is the rounding error of the sum; if the sum is halfway
/// between two fp16 numbers, the sign of that error decides.
inline float fma_fp16(uint32_t a, uint32_t b, uint32_t c) {
  const double product = double{from_fp16(uint16_t(a))} * from_fp16(uint16_t(b)), addend = from_fp16(uint16_t(c));
  const double sum = product + addend, of_addend = sum - product;
  const double rest = (product - (sum - of_addend)) + (addend - of_addend);
  auto bits = bit_cast<uint64_t>(sum);
  if (rest == rest && rest != 0 && bits % 2 == 0) bits += (rest > 0) == (sum > 0) ? 1 : -1;  // round to odd
  const auto odd = bit_cast<double>(bits);
  auto nearest = float(odd);
  if (double{nearest} == odd || nearest != nearest) return from_fp16(to_fp16_bits(nearest));
  auto word = bit_cast<uint32_t>(nearest);
  if (std::fabs(double{nearest}) > std::fabs(odd)) --word;
  return from_fp16(to_fp16_bits(bit_cast<float>(word | 1)));
}
}  // namespace emu
#endif

/// fma.rn.f16x2: a · b + c of pairs of fp16, rounded to nearest even. PTX:
/// #half-precision-floating-point-instructions-fma
HOPWELL_DEVICE uint32_t fma_fp16(uint32_t a, uint32_t b, uint32_t c) {
#if HOPWELL_ON_DEVICE
  uint32_t r;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
#else
  return uint32_t{emu::to_fp16_bits(emu::fma_fp16(a >> 16, b >> 16, c >> 16))} << 16 |
         emu::to_fp16_bits(emu::fma_fp16(a, b, c));
#endif
}

/// fma.rn.sat.f16x2: the same, clamped to [0, 1]; 0 for NaN. PTX: #half-precision-floating-point-instructions-fma
HOPWELL_DEVICE uint32_t fma_saturated_fp16(uint32_t a, uint32_t b, uint32_t c) {
#if HOPWELL_ON_DEVICE
  uint32_t r;
  asm("fma.rn.sat.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
#else
  const auto saturated = [](float x) { return emu::to_fp16_bits(!(x > 0) ? 0.f : x > 1 ? 1.f : x); };
  return uint32_t{saturated(emu::fma_fp16(a >> 16, b >> 16, c >> 16))} << 16 | saturated(emu::fma_fp16(a, b, c));
#endif
}

}  // namespace hopwell::arch
