// Weights of nvfp4_linear for several columns: decoded, and times their scales, as x's type has them.
//
// Two at a time are multiplied by their scale, exactly: in fp16 code · 2^-14 · scale is a multiple of 2^-24, and in bf16
// code · 2^-126 · scale · 2^118 has six digits.
// Budget    a word of 8 codes: bf16 9 instructions of logic, 4 products that shift, 4 multiplications; fp16 7, 4 and 4
#pragma once

#include "arch/sm80/matrix.hpp"
#include "ops/nvfp4/sm80_ring.hpp"

namespace hopwell::ops::nvfp4 {
namespace {

// Weights as x is: decoded, and times their scales, 1 / kUnit.
template <class T>
struct Weights;

template <>
struct Weights<fp16> {
  static constexpr double kUnit = LinearConfig::kCodeUnit;
  uint32_t scales;  // of two blocks

  HOPWELL_DEVICE explicit Weights(uint16_t bytes) { scales = scales_fp16(bytes); }
  template <bool kSecond>
  HOPWELL_DEVICE void decode(uint32_t word, uint32_t (&pairs)[4]) const {
    decode_word(word, pairs);
    HOPWELL_UNROLL
    for (uint32_t& pair : pairs) pair = arch::multiply_fp16(pair, arch::half_twice<kSecond>(scales));
  }
  HOPWELL_DEVICE static void multiply(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    arch::mma_m16n8k16_fp16(d, a, b);
  }
};

template <>
struct Weights<bf16> {
  static constexpr double kUnit = 0x1p8;
  uint32_t scales;

  HOPWELL_DEVICE explicit Weights(uint16_t bytes) {
    const ScalePair pair = scale_pair(bytes);
    scales = arch::pack_bf16(pair.low * 0x1p118f, pair.high * 0x1p118f);
  }
  // Pairs (k, k + 4) as in decode_word, s to bit 15, e e m to bits 8 to 6: a product brings both to their places at once.
  template <bool kSecond>
  HOPWELL_DEVICE void decode(uint32_t word, uint32_t (&pairs)[4]) const {
    constexpr uint32_t kLow = 0x000f000fu, kHigh = 0x00f000f0u, kCodes = 0x81c081c0u;
    pairs[0] = (word & kLow) * 0x1040 & kCodes;
    pairs[1] = (word & kHigh) * 0x104 & kCodes;
    pairs[2] = (word >> 8 & kLow) * 0x1040 & kCodes;
    pairs[3] = (word >> 8 & kHigh) * 0x104 & kCodes;
    HOPWELL_UNROLL
    for (uint32_t& pair : pairs) pair = arch::multiply_bf16(pair, arch::half_twice<kSecond>(scales));
  }
  HOPWELL_DEVICE static void multiply(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    arch::mma_m16n8k16_bf16(d, a, b);
  }
};

}  // namespace
}  // namespace hopwell::ops::nvfp4
