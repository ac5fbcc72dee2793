// e4m3 codes as operands of products of fp16. fp16 represents every e4m3 number exactly, subnormals too.
//
// Two ways to decode. Each gives codes · kUnit, and pairs of a word's four codes 0, 1, 2, 3:
//
//     ShiftedCodes     integer shifts, for any GPU. 7 instructions for 4 codes. A NaN code becomes ±480
//     ConvertedCodes   cvt of sm_89 and later. 2 instructions for 4 codes, 3 for even and odd codes. NaN stays NaN
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
  static constexpr bool kAdjacent = false;  // pairs() gives codes 0, 2 and codes 1, 3
  static constexpr bool kFindsNan = true;

  HOPWELL_DEVICE static CodePairs even_odd(uint32_t codes) {
    constexpr uint32_t kMagnitudes = 0x3f803f80, kSigns = 0x80008000;
    return {(codes << 7 & kMagnitudes) | (codes << 8 & kSigns), (codes >> 1 & kMagnitudes) | (codes & kSigns)};
  }
  HOPWELL_DEVICE static CodePairs pairs(uint32_t codes) { return even_odd(codes); }
  /// Bits 7, 15, 23 and 31 are set where a code is NaN.
  HOPWELL_DEVICE static uint32_t nan_bits(uint32_t codes) { return (codes & 0x7f7f7f7f) + 0x01010101; }
};

#if HOPWELL_HAS_SM90
struct ConvertedCodes {
  static constexpr float kUnit = 1;
  static constexpr bool kAdjacent = true;  // pairs() gives codes 0, 1 and codes 2, 3
  static constexpr bool kFindsNan = false;

  HOPWELL_DEVICE static CodePairs pairs(uint32_t codes) {
    return {arch::unpack_e4m3(uint16_t(codes)), arch::unpack_e4m3(uint16_t(codes >> 16))};
  }
  HOPWELL_DEVICE static CodePairs even_odd(uint32_t codes) { return pairs(arch::permute_bytes<0x3120>(codes, 0)); }
  HOPWELL_DEVICE static uint32_t nan_bits(uint32_t) { return 0; }
};
#endif

/// The value of one code, exactly; NaN for 0x7f and 0xff.
HOPWELL_DEVICE float e4m3_to_float(uint32_t code) {
  const uint32_t magnitude = code & 0x7f;
  const float value = arch::bit_cast<float>((code & 0x80) << 24 | magnitude << 20) * 0x1p120F;
  return magnitude == 0x7f ? arch::bit_cast<float>(0x7fc00000U) : value;
}

}  // namespace hopwell::tile
