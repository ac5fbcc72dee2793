// e4m3 codes as operands of products of fp16 or bf16. Both represent every e4m3 number exactly, subnormals too.
//
//     ShiftedCodes   fp16 of the codes · kUnit, by integer shifts, for any GPU. 7 instructions for 4 codes
//     ScaledCodes    bf16(code · scale), for Hopper and later. 10 instructions for 4 codes
#pragma once

#include "arch/sm80/bits.hpp"
#include "arch/sm90/convert.hpp"

namespace hopwell::tile {

/// Two of four codes as fp16 in one word, and the two others.
struct CodePairs {
  uint32_t first, second;
};

/// s eeee mmm at bits 15 and 13 to 7 of an fp16 is the code times 2^-8.
struct ShiftedCodes {
  static constexpr float kUnit = 0x1p-8F;

  /// Codes 0 and 2 of a word, and codes 1 and 3. A NaN code becomes ±480.
  HOPWELL_DEVICE static CodePairs even_odd(uint32_t codes) {
    constexpr uint32_t kMagnitudes = 0x3f803f80, kSigns = 0x80008000;
    return {(codes << 7 & kMagnitudes) | (codes << 8 & kSigns), (codes >> 1 & kMagnitudes) | (codes & kSigns)};
  }
  /// Bits 7, 15, 23 and 31 are set where a code is NaN.
  HOPWELL_DEVICE static uint32_t nan_bits(uint32_t codes) { return (codes & 0x7f7f7f7f) + 0x01010101; }
};

#if HOPWELL_HAS_SM90
/// bf16(code · scale) by a shift and one product: s eeee mmm at bits 15 and 10 to 4 of a bf16 is the code times 2^-120.
/// The caller decodes in another way if a scale is not `exact` or if a code is NaN.
struct ScaledCodes {
  static constexpr uint32_t kNan = 0x07f007f0;  // magnitudes of two NaN codes
  uint32_t largest;                             // magnitudes of the codes so far

  /// bf16(scale · 2^120) twice, and whether products with it are right: |scale| is 0, or a bf16 number from 2^-124 to
  /// below 2^8.
  struct Factor {
    uint32_t pair;
    bool exact;
  };
  static HOPWELL_DEVICE Factor factor_of(float scale) {
    const uint32_t bits = arch::bit_cast<uint32_t>(scale * 0x1p120F), magnitude = bits & 0x7fffffff;
    constexpr uint32_t kLeast = 3 + 120, kMost = 254;  // exponents
    const bool in_range = magnitude == 0 || magnitude - (kLeast << 23) < (kMost + 1 - kLeast) << 23;
    return {arch::permute_bytes<0x3232>(bits, 0), (bits & 0xffff) == 0 && in_range};
  }
  /// The same for a scale 2^(byte - 127).
  static HOPWELL_DEVICE Factor factor_of_ue8m0(uint32_t byte) {
    return {(byte + 120) * 0x00800080U, byte - 3 <= 134 - 3};
  }

  /// Codes 0 and 2 of a word, or, if `odd`, codes 1 and 3.
  HOPWELL_DEVICE uint32_t decode(uint32_t codes, bool odd, uint32_t factor) {
    constexpr uint32_t kSigns = 0x80008000;
    const uint32_t magnitudes = (odd ? codes >> 4 : codes << 4) & kNan, signs = (odd ? codes : codes << 8) & kSigns;
    largest = arch::max_u16x2(largest, magnitudes);
    return arch::multiply_bf16(signs | magnitudes, factor);
  }
  /// exact: whether all factors are.
  HOPWELL_DEVICE explicit ScaledCodes(bool exact) : largest(exact ? 0 : kNan) {}
  /// False if a factor is not exact or a code was NaN.
  HOPWELL_DEVICE bool is_right() const { return ((largest + 0x00100010) & 0x08000800) == 0; }
};
#endif

/// The value of one code, exactly; NaN for 0x7f and 0xff.
HOPWELL_DEVICE float e4m3_to_float(uint32_t code) {
  const uint32_t magnitude = code & 0x7f;
  const float value = arch::bit_cast<float>((code & 0x80) << 24 | magnitude << 20) * 0x1p120F;
  return magnitude == 0x7f ? arch::bit_cast<float>(0x7fc00000U) : value;
}

}  // namespace hopwell::tile
