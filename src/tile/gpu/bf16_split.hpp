// bf16 split of e4m3, bf16 or fp32 numbers: a sum of bf16 terms. Each term holds the leading eight bits
// of the remainder of the previous terms. bf16 and e4m3 need one term, because bf16 represents both exactly. fp32 has
// 24 bits: three terms (bf16x3) hold all of them, two hold 16.
#pragma once

#include <cmath>

#include "arch/sm80/bits.hpp"
#include "arch/sm80/convert.hpp"
#include "arch/sm80/memory.hpp"

namespace hopwell::tile {

template <class T>
inline constexpr int kSplitTerms = sizeof(T) <= 2 ? 1 : 3;

/// Eight adjacent columns of a row: 16 bytes per term.
template <int kTheTerms>
struct Chunk {
  arch::Words4 split_term[kTheTerms];
};

/// Two e4m3, in bytes 1 and 3, as bf16. The bits s e e e e m m m are shifted so that the upper exponent bits of the
/// bf16 are 0; a multiplication by 2^120 corrects the bias, for subnormals too. NaN stays NaN.
HOPWELL_DEVICE uint32_t e4m3x2_to_bf16(uint32_t pair) {
  constexpr uint32_t kMagnitudes = 0x7f007f00, kSigns = 0x80008000, k2To120 = 0x7b807b80;
  const uint32_t magnitudes = pair & kMagnitudes, nan = (magnitudes + 0x01000100) & kSigns;
  return arch::multiply_bf16((pair & kSigns) | magnitudes >> 4, k2To120) | (nan - (nan >> 8));
}

HOPWELL_DEVICE Chunk<1> e4m3x8_to_bf16(uint64_t codes) {
  const uint32_t low = uint32_t(codes), high = uint32_t(codes >> 32);
  return {
      {{e4m3x2_to_bf16(arch::permute_bytes<0x1404>(low, 0)), e4m3x2_to_bf16(arch::permute_bytes<0x3424>(low, 0)),
        e4m3x2_to_bf16(arch::permute_bytes<0x1404>(high, 0)), e4m3x2_to_bf16(arch::permute_bytes<0x3424>(high, 0))}}};
}

/// Splits the leading eight bits off a number: bits of a bf16, in the upper half of the result.
HOPWELL_DEVICE uint32_t take_term(float& x) {
  const uint32_t bits = arch::bit_cast<uint32_t>(x) & 0xffff0000U;
  x -= arch::bit_cast<float>(bits);
  return bits;
}

/// Split of finite numbers.
template <int kTheTerms>
HOPWELL_DEVICE Chunk<kTheTerms> split_finite(const float (&x)[8]) {
  Chunk<kTheTerms> chunk;
  HOPWELL_UNROLL
  for (int i = 0; i < 4; ++i) {
    float low = x[2 * i], high = x[2 * i + 1];
    HOPWELL_UNROLL
    for (int split_term = 0; split_term < kTheTerms - 1; ++split_term)
      chunk.split_term[split_term].w[i] = take_term(low) >> 16 | take_term(high);
    chunk.split_term[kTheTerms - 1].w[i] = arch::pack_bf16(low, high);
  }
  return chunk;
}

/// Split of any numbers: infinities and NaN go to the first term.
template <int kTheTerms>
HOPWELL_DEVICE Chunk<kTheTerms> split(const float (&x)[8]) {
  float finite[8];
  uint32_t special[8];
  HOPWELL_UNROLL
  for (int i = 0; i < 8; ++i) {
    const bool is_finite = fabsf(x[i]) < INFINITY;
    finite[i] = is_finite ? x[i] : 0;
    special[i] = is_finite ? 0 : x[i] != x[i] ? 0x7fc0 : arch::bit_cast<uint32_t>(x[i]) >> 16;
  }
  Chunk<kTheTerms> chunk = split_finite<kTheTerms>(finite);
  HOPWELL_UNROLL
  for (int i = 0; i < 8; ++i) chunk.split_term[0].w[i / 2] |= special[i] << 16 * (i % 2);
  return chunk;
}

/// Sums the terms of a split.
template <int kTheTerms>
HOPWELL_DEVICE void sum_split(const Chunk<kTheTerms>& chunk, float (&x)[8]) {
  HOPWELL_UNROLL
  for (int i = 0; i < 8; ++i) {
    x[i] = 0;
    HOPWELL_UNROLL
    for (const arch::Words4& split_term : chunk.split_term)
      x[i] += arch::bit_cast<float>(i % 2 ? split_term.w[i / 2] & 0xffff0000U : split_term.w[i / 2] << 16);
  }
}

}  // namespace hopwell::tile
