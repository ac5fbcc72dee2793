// nvfp4_quantize on GPUs: a block of 16 numbers' scale, and codes for it.
//
// Three ways to codes, all exact. In floats: |x| · 1 / (scale · global) · 2^-126 is a float whose upper bits are a
// code's, for it is subnormal where codes are: a half is added, the rest cut off. Next to the middle between two codes
// that may round to the wrong side: then, and out of usual ranges, exact thresholds decide. 16-bit x is compared with
// thresholds of its own type, two numbers at a time; where ties are not rare, at once, with thresholds from a table for
// all scales. There bf16 of usual size is compared by sums that saturate, at twice the rate of comparisons and logic.
#pragma once

#include <cmath>

#include "arch/sm80/bits.hpp"
#include "arch/sm80/half.hpp"
#include "tile/gpu/fp4.hpp"
#include "tile/gpu/numbers.hpp"

namespace hopwell::ops::nvfp4_quantize::HOPWELL_TARGET {

using arch::bf16, arch::fp16;
using tile::kCodesPerBlock, tile::to_fp32;

// ---- a block of x --------------------------------------------------------------------------------------------------

// The larger of halves of words, each on its own, unsigned.
HOPWELL_DEVICE uint32_t larger_halves(uint32_t a, uint32_t b) {
#if HOPWELL_HAS_SM90
  return arch::max_u16x2(a, b);
#else
  const uint32_t low = (a & 0xffff) > (b & 0xffff) ? a : b, high = a > b ? a : b;
  return (high & 0xffff0000u) | (low & 0xffff);
#endif
}

// The 16 numbers of a block, as they lie in memory.
template <class T>
struct Block {
  static constexpr int kWords = kCodesPerBlock * int(sizeof(T)) / 4;
  uint32_t words[kWords];

  HOPWELL_DEVICE void load(const T* from, bool aligned) {
    if (aligned) {
      HOPWELL_UNROLL
      for (int i = 0; i < kWords / 4; ++i) {
        const auto v = arch::load_vector<arch::Words4>(from + i * (16 / int(sizeof(T))));
        HOPWELL_UNROLL
        for (int j = 0; j < 4; ++j) words[4 * i + j] = v.w[j];
      }
    } else if constexpr (sizeof(T) == 4) {
      HOPWELL_UNROLL
      for (int i = 0; i < kWords; ++i) words[i] = arch::bit_cast<uint32_t>(from[i]);
    } else {
      HOPWELL_UNROLL
      for (int i = 0; i < kWords; ++i) words[i] = from[2 * i].bits | uint32_t{from[2 * i + 1].bits} << 16;
    }
  }
  HOPWELL_DEVICE float get(int i) const {
    if constexpr (sizeof(T) == 4)
      return arch::bit_cast<float>(words[i]);
    else if constexpr (std::is_same_v<T, bf16>)
      return arch::bit_cast<float>(i % 2 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16);
    else
      return to_fp32(T{uint16_t(words[i / 2] >> i % 2 * 16)});
  }
  // Bits of the largest magnitude, as a float's.
  HOPWELL_DEVICE uint32_t amax_bits() const {
    uint32_t amax = 0;
    if constexpr (sizeof(T) == 4) {
      HOPWELL_UNROLL
      for (int i = 0; i < kWords; ++i) amax = (words[i] & 0x7fffffffu) > amax ? words[i] & 0x7fffffffu : amax;
      return amax;
    } else {
      HOPWELL_UNROLL
      for (int i = 0; i < kWords; ++i) amax = larger_halves(amax, words[i] & 0x7fff7fffu);
      return arch::bit_cast<uint32_t>(to_fp32(T{uint16_t(larger_halves(amax, amax >> 16))}));
    }
  }
};

// ---- exact thresholds ----------------------------------------------------------------------------------------------

HOPWELL_DEVICE uint32_t magnitude_bits(float x) { return arch::bit_cast<uint32_t>(x) & 0x7fffffffu; }

// A code's index grows by one above each of these: the largest float that is not above the middle of two neighbours,
// or, where the tie goes to the upper, even one, that is below it. `unit` times a middle is exact.
HOPWELL_DEVICE void thresholds(double unit, float (&t)[7]) {
  constexpr float kMidpoints[7] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5};
  HOPWELL_UNROLL
  for (int i = 0; i < 7; ++i) {
    const double middle = unit * double(kMidpoints[i]);
    t[i] = float(middle);
    const bool above = i % 2 == 0 ? double(t[i]) > middle : double(t[i]) >= middle;
    if (above) t[i] = arch::bit_cast<float>(arch::bit_cast<uint32_t>(t[i]) - 1);
  }
}

HOPWELL_DEVICE void encode_exactly(const Block<float>& x, float scale, float global, uint32_t (&words)[2]) {
  float t[7];
  thresholds(double(scale) * double(global), t);
  words[0] = words[1] = 0;
  HOPWELL_UNROLL
  for (int i = 0; i < kCodesPerBlock; ++i) {
    uint32_t code = x.words[i] >> 28 & 8;
    HOPWELL_UNROLL
    for (int j = 0; j < 7; ++j) code += arch::bit_cast<float>(magnitude_bits(x.get(i))) > t[j];
    words[i / 8] |= code << 4 * (i % 8);
  }
}

// Thresholds of 16-bit x.
struct alignas(16) Thresholds16 {
  uint16_t bits[8];
};

// T's largest number that is not above middle · (high + low), or, where the tie goes to the upper code, that is below
// it.
template <class T>
HOPWELL_DEVICE uint32_t threshold(float middle, bool tie_goes_up, float high, float low) {
  const float product = middle * high;
  uint32_t bits;  // of T's nearest number, or of one of the two nearest
  float nearest;
  if constexpr (std::is_same_v<T, bf16>) {
    bits = (arch::bit_cast<uint32_t>(product) + 0x8000) >> 16;
    nearest = arch::bit_cast<float>(bits << 16);
  } else {
    bits = arch::pack_fp16(product, 0);
    nearest = to_fp32(fp16{uint16_t(bits)});
  }
  // Next to a tie both are exact, elsewhere the sign is right.
  const float above = std::fma(-middle, low, std::fma(-middle, high, nearest));
  return bits - (tie_goes_up ? above >= 0 : above > 0);
}

// thresholds(), in x's type.
template <class T>
HOPWELL_DEVICE Thresholds16 thresholds_for(float scale, float global) {
  constexpr float kMidpoints[7] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5};
  Thresholds16 t{};
  const float high = scale * global, low = std::fma(scale, global, -high);
  if (high >= 0x1p-100f && high <= 0x1p100f) {
    HOPWELL_UNROLL
    for (int i = 0; i < 7; ++i) t.bits[i] = uint16_t(threshold<T>(kMidpoints[i], i % 2 == 1, high, low));
    return t;
  }
  float exact[7];
  thresholds(double(scale) * double(global), exact);
  HOPWELL_UNROLL
  for (int i = 0; i < 7; ++i) t.bits[i] = uint16_t(threshold<T>(1, false, exact[i], 0));
  return t;
}

// Ones in the halves where a's is larger, as bf16 that are not negative.
HOPWELL_DEVICE uint32_t where_larger(uint32_t a, uint32_t b) {
#if HOPWELL_HAS_SM90
  return arch::greater_bf16(a, b);
#else
  return (a >> 16 > b >> 16 ? 0xffff0000u : 0) | ((a & 0xffff) > (b & 0xffff) ? 0xffffu : 0);
#endif
}

// Eight codes, a byte each: in the lower halves the even ones of four, in the upper halves the odd ones.
HOPWELL_DEVICE uint32_t join_bytes(uint32_t lower, uint32_t upper) {
  return arch::permute_bytes<0x5410>(lower, upper) + arch::permute_bytes<0x7632>(lower, upper) * 16;
}

// Three comparisons a number, two numbers at a time. |x| and thresholds are not negative, and the bits of fp16 as a
// bf16's are in the same order and below its infinity.
template <class T>
HOPWELL_DEVICE void encode_by_thresholds(const Block<T>& x, const Thresholds16& of_scale, uint32_t (&words)[2]) {
  const auto raw = arch::bit_cast<arch::Words4>(of_scale);
  uint32_t t[7];
  HOPWELL_UNROLL
  for (int i = 0; i < 7; ++i)
    t[i] = i % 2 ? arch::half_twice<true>(raw.w[i / 2]) : arch::half_twice<false>(raw.w[i / 2]);
  const auto select = [](uint32_t mask, uint32_t a, uint32_t b) { return (a & mask) | (b & ~mask); };
  HOPWELL_UNROLL
  for (int half = 0; half < 2; ++half) {
    uint32_t codes[4];  // of two numbers, in the lowest bits of each half
    HOPWELL_UNROLL
    for (int i = 0; i < 4; ++i) {
      const uint32_t pair = x.words[4 * half + i], magnitude = pair & 0x7fff7fffu;
      const uint32_t four = where_larger(magnitude, t[3]);
      const uint32_t two = where_larger(magnitude, select(four, t[5], t[1]));
      const uint32_t one = where_larger(magnitude, select(four, select(two, t[6], t[4]), select(two, t[2], t[0])));
      codes[i] = (four & 0x00040004u) | (two & 0x00020002u) | (one & 0x00010001u) | (pair >> 12 & 0x00080008u);
    }
    words[half] = join_bytes(codes[0] + codes[1] * 256, codes[2] + codes[3] * 256);
  }
}

// ---- bf16 by sums that saturate --------------------------------------------------------------------------------------

// The bits of bf16 between 2^-31 and 2^17 are those of an fp16 between 2^-3 and 8, in the same order. There neighbours
// are 2^-13 apart or more, so that 2^13 · (x - t), limited to 0 and 1, is 1 exactly if x is larger than t: one fma.
// Thresholds of a block are at most 560 neighbours apart, all their differences exact.
//
//     four = x > t3;  two = x > (four ? t5 : t1);  one = x > (four ? (two ? t6 : t4) : (two ? t2 : t0))
//
// What follows `four` and `two` is a sum, too. All are times -2^13.
struct alignas(16) Steps {
  uint16_t t3, t1, t5_t1, t0, t2_t0, t4_t0, rest;  // t5 - t1, …; (t6 - t4) - (t2 - t0)
  uint16_t unused;
};

// Whether all scales' thresholds lie in that range, and the largest |x|, which is 2,688 times as large as the global.
HOPWELL_DEVICE bool is_usual(float global) { return global >= 0x1p-19f && global <= 0x1p5f; }

HOPWELL_DEVICE Steps steps_of(const Thresholds16& t) {
  float f[7];  // in fp16's bits
  HOPWELL_UNROLL
  for (int i = 0; i < 7; ++i) f[i] = to_fp32(fp16{t.bits[i]}) * -0x1p13f;
  const auto bits = [](float x) { return uint16_t(arch::pack_fp16(x, 0)); };
  return {bits(f[3]),
          bits(f[1]),
          bits(f[5] - f[1]),
          bits(f[0]),
          bits(f[2] - f[0]),
          bits(f[4] - f[0]),
          bits((f[6] - f[4]) - (f[2] - f[0])),
          0};
}

// Indices of two words are summed as multiples of the smallest fp16 and of 256 times that. The bits of an fp16 are how
// many of the smallest it is, below 2,048 of them, so that each word's indices are bytes of the sum.
HOPWELL_DEVICE void encode_by_steps(const Block<bf16>& x, const Steps& of_scale, uint32_t (&words)[2]) {
  constexpr uint32_t kScale = 0x70007000u, kZero = 0;
  const auto raw = arch::bit_cast<arch::Words4>(of_scale);
  const uint32_t t3 = arch::half_twice<false>(raw.w[0]), t1 = arch::half_twice<true>(raw.w[0]),
                 t5_t1 = arch::half_twice<false>(raw.w[1]), t0 = arch::half_twice<true>(raw.w[1]),
                 t2_t0 = arch::half_twice<false>(raw.w[2]), t4_t0 = arch::half_twice<true>(raw.w[2]),
                 rest = arch::half_twice<false>(raw.w[3]);
  // sum + index · one, of two numbers
  const auto add_index = [&](uint32_t pair, uint32_t one_index, uint32_t sum) {
    const uint32_t magnitude = pair & 0x7fff7fffu;
    const uint32_t four = arch::fma_saturated_fp16(magnitude, kScale, t3);
    const uint32_t two = arch::fma_saturated_fp16(magnitude, kScale, arch::fma_fp16(four, t5_t1, t1));
    const uint32_t lower = arch::fma_fp16(two, t2_t0, t0), to_upper = arch::fma_fp16(two, rest, t4_t0);
    const uint32_t one = arch::fma_saturated_fp16(magnitude, kScale, arch::fma_fp16(four, to_upper, lower));
    sum = arch::fma_fp16(four, 4 * one_index, sum);
    sum = arch::fma_fp16(two, 2 * one_index, sum);
    return arch::fma_fp16(one, one_index, sum);
  };
  HOPWELL_UNROLL
  for (int half = 0; half < 2; ++half) {
    uint32_t codes[2];  // of four numbers, a byte each: of the even ones of two words, then of the odd ones
    HOPWELL_UNROLL
    for (int i = 0; i < 2; ++i) {
      const uint32_t first = x.words[4 * half + 2 * i], second = x.words[4 * half + 2 * i + 1];
      const uint32_t indices = add_index(first, 0x00010001u, add_index(second, 0x01000100u, kZero));
      codes[i] = (arch::permute_bytes<0x7351>(first, second) >> 4 & 0x08080808u) | indices;
    }
    words[half] = join_bytes(codes[0], codes[1]);
  }
}

// ---- in floats -----------------------------------------------------------------------------------------------------

// The highest bytes of four words.
HOPWELL_DEVICE uint32_t highest_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return arch::permute_bytes<0x5410>(arch::permute_bytes<0x0073>(a, b), arch::permute_bytes<0x0073>(c, d));
}

// `amax`: the largest |x|.
template <class T>
HOPWELL_DEVICE void encode_block(const Block<T>& x, float amax, float scale, float global, uint32_t (&words)[2]) {
  // |x| / unit has three roundings and one where it becomes subnormal: at most 4 of the last place.
  constexpr uint32_t kMargin = 16, kHalf = 1u << 21;
  const float unit = scale * global, factor = 1 / unit;
  uint32_t nearest = 0xffffffffu;  // distance from a middle, of the number that is nearest to one
  HOPWELL_UNROLL
  for (int half = 0; half < 2; ++half) {
    uint32_t signs[8], codes[8];  // in the highest bytes: at bit 7; at bits 0 to 2
    HOPWELL_UNROLL
    for (int i = 0; i < 8; ++i) {
      signs[i] = arch::bit_cast<uint32_t>(x.get(8 * half + i) * factor * 0x1p-126f) + kHalf + kMargin;
      codes[i] = signs[i] << 2;
      nearest = signs[i] << 10 < nearest ? signs[i] << 10 : nearest;
    }
    uint32_t nibbles[2];  // of even and odd numbers, each in a byte
    HOPWELL_UNROLL
    for (int i = 0; i < 2; ++i)
      nibbles[i] = (highest_bytes(signs[i], signs[i + 2], signs[i + 4], signs[i + 6]) >> 4 & 0x08080808u) |
                   highest_bytes(codes[i], codes[i + 2], codes[i + 4], codes[i + 6]);
    words[half] = nibbles[0] + nibbles[1] * 16;
  }
  const bool usual = unit >= 0x1p-100f && unit <= 0x1p100f && amax * factor < 6.99f;
  if (usual && nearest >= (2 * kMargin) << 10) return;
  if constexpr (sizeof(T) == 2)
    encode_by_thresholds(x, thresholds_for<T>(scale, global), words);
  else
    encode_exactly(x, scale, global, words);
}

}  // namespace hopwell::ops::nvfp4_quantize::HOPWELL_TARGET
