// Weights of nvfp4_linear for several columns: decoded and multiplied by their scales, in the type of x.
//
// One instruction multiplies two weights by their scale. The product is exact: in fp16, code · 2^-14 · scale is a
// multiple of 2^-24; in bf16, code · 2^-126 · scale · 2^118 has six significant bits.
// Budget    a word of 8 codes: 7 logic instructions, 4 left shifts (integer multiplications), 4 packed multiplications
#pragma once

#include "arch/sm80/matrix.hpp"
#include "ops/nvfp4/kernels/weight_ring.hpp"

namespace hopwell::ops::nvfp4::HOPWELL_TARGET {

// Decoded weights times their scales, divided by kUnit, in type T.
template <class T>
struct ScaledWeights;

template <>
struct ScaledWeights<fp16> {
  static constexpr double kUnit = tile::kDecodedUnit;
  uint32_t scales;  // of two blocks

  HOPWELL_DEVICE explicit ScaledWeights(uint16_t bytes) { scales = tile::e4m3x2_to_fp16(bytes); }
  template <bool kSecond>
  HOPWELL_DEVICE void decode(uint32_t word, uint32_t (&pairs)[4]) const {
    decode_by(arch::half_twice<kSecond>(scales), word, pairs);
  }
  // Pairs (k, k + 4), each times its half of `factors`.
  HOPWELL_DEVICE static void decode_by(uint32_t factors, uint32_t word, uint32_t (&pairs)[4]) {
    tile::e2m1x8_to_fp16(word, pairs);
    HOPWELL_UNROLL
    for (uint32_t& pair : pairs) pair = arch::multiply_fp16(pair, factors);
  }
  HOPWELL_DEVICE static void multiply(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    arch::mma_m16n8k16_fp16(d, a, b);
  }
};

template <>
struct ScaledWeights<bf16> {
  static constexpr double kUnit = 0x1p8;
  uint32_t scales;

  HOPWELL_DEVICE explicit ScaledWeights(uint16_t bytes) {
    const tile::FloatPair pair = tile::e4m3x2_to_float(bytes);
    constexpr uint32_t k2To118 = 0x7a807a80u;  // twice
    scales = arch::multiply_bf16(arch::pack_bf16(pair.low, pair.high), k2To118);
  }
  template <bool kSecond>
  HOPWELL_DEVICE void decode(uint32_t word, uint32_t (&pairs)[4]) const {
    decode_by(arch::half_twice<kSecond>(scales), word, pairs);
  }
  // Pairs (k, k + 4) as in tile::e2m1x8_to_fp16: a code's sign moves to bit 15, its other bits to bits 8 to 6. Each
  // half of `low` and `high` holds two codes, the second four bits below its place. A mask then isolates each code.
  HOPWELL_DEVICE static void decode_by(uint32_t factors, uint32_t word, uint32_t (&pairs)[4]) {
    constexpr uint32_t kSigns = 0x88008800u, kCodes = 0x81c081c0u;
    const uint32_t low = arch::select_bits(word << 8, word << 2, kSigns);
    const uint32_t high = arch::select_bits(word, word >> 6, kSigns);
    pairs[0] = low << 4 & kCodes;
    pairs[1] = low & kCodes;
    pairs[2] = high << 4 & kCodes;
    pairs[3] = high & kCodes;
    HOPWELL_UNROLL
    for (uint32_t& pair : pairs) pair = arch::multiply_bf16(pair, factors);
  }
  HOPWELL_DEVICE static void multiply(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    arch::mma_m16n8k16_bf16(d, a, b);
  }
};

// A lane's weights of half a stage, in rows g and g + 8. decode() decodes word 0 to 3 of each row. Words 0 and 1 belong
// to the first block.
template <class T>
struct RowPair {
  ScaledWeights<T> upper, lower;

  HOPWELL_DEVICE void decode(int word, uint32_t upper_codes, uint32_t lower_codes, uint32_t (&a)[4],
                             uint32_t (&b)[4]) const {
    if (word < 2)
      upper.template decode<false>(upper_codes, a), lower.template decode<false>(lower_codes, b);
    else
      upper.template decode<true>(upper_codes, a), lower.template decode<true>(lower_codes, b);
  }
};

}  // namespace hopwell::ops::nvfp4::HOPWELL_TARGET
