// nvfp4_quantize on GPUs: codes of a block of 16 elements with a given scale.
//
// There are three encoders. All are exact.
//
//     encode_block           in fp32: the upper bits of |x| · 1 / (scale · global) · 2^-126 are the code, because e2m1
//                            has subnormals where fp32 has them. Half a step is added, then the lower bits are cut off.
//                            Next to the middle of two codes, and outside of usual ranges, thresholds decide instead
//     encode_by_thresholds   16-bit x: comparisons with thresholds of x's type, two elements at a time. If the global
//                            scale comes from x, ties are frequent, and a table holds the thresholds of all scales
//     encode_by_steps        bf16 x of usual size: saturating sums, at twice the rate of comparisons and logic
//
// The second and the third also encode a PreparedPair.
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

// Maximum of each 16-bit half, unsigned.
HOPWELL_DEVICE uint32_t larger_halves(uint32_t a, uint32_t b) {
#if HOPWELL_HAS_SM90
  return arch::max_u16x2(a, b);
#else
  const uint32_t low = (a & 0xffff) > (b & 0xffff) ? a : b, high = a > b ? a : b;
  return (high & 0xffff0000u) | (low & 0xffff);
#endif
}

// The 16 elements of a block, unconverted.
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
  // fp32 bits of the largest magnitude.
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

// A magnitude's code is the number of thresholds below it. Threshold i is the largest float not above the middle of two
// codes, or below the middle if the tie goes to the upper, even code. `unit` times a middle is exact.
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

// Thresholds in the bits of 16-bit x.
struct alignas(16) Thresholds16 {
  uint16_t bits[8];
};

// Bits of T's largest number not above middle · (high + low), or below it if the tie goes to the upper code.
template <class T>
HOPWELL_DEVICE uint32_t threshold(float middle, bool tie_goes_up, float high, float low) {
  const float product = middle * high;
  uint32_t bits;  // a number of T next to the product
  float nearest;
  if constexpr (std::is_same_v<T, bf16>) {
    bits = (arch::bit_cast<uint32_t>(product) + 0x8000) >> 16;
    nearest = arch::bit_cast<float>(bits << 16);
  } else {
    bits = arch::pack_fp16(product, 0);
    nearest = to_fp32(fp16{uint16_t(bits)});
  }
  // Close to a tie both fma are exact. Elsewhere the sign is right.
  const float above = std::fma(-middle, low, std::fma(-middle, high, nearest));
  return bits - (tie_goes_up ? above >= 0 : above > 0);
}

// The thresholds of thresholds(), in x's type.
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

// All ones in each half where a > b, as bf16 that are not negative.
HOPWELL_DEVICE uint32_t where_larger(uint32_t a, uint32_t b) {
#if HOPWELL_HAS_SM90
  return arch::greater_bf16(a, b);
#else
  return (a >> 16 > b >> 16 ? 0xffff0000u : 0) | ((a & 0xffff) > (b & 0xffff) ? 0xffffu : 0);
#endif
}

// Joins eight codes, a byte each, to a word. `lower` and `upper` have four codes each: even codes in their lower
// halves, odd codes in their upper halves.
HOPWELL_DEVICE uint32_t join_bytes(uint32_t lower, uint32_t upper) {
  return arch::permute_bytes<0x5410>(lower, upper) + arch::permute_bytes<0x7632>(lower, upper) * 16;
}

// Three comparisons an element, two elements at a time. fp16 magnitudes are compared as bf16, which is correct: bits of
// nonnegative numbers have the same order in both types, and fp16's bits are below bf16's infinity.
struct ThresholdCodes {
  uint32_t t[7];
  HOPWELL_DEVICE explicit ThresholdCodes(const Thresholds16& of_scale) {
    const auto raw = arch::bit_cast<arch::Words4>(of_scale);
    HOPWELL_UNROLL
    for (int i = 0; i < 7; ++i)
      t[i] = i % 2 ? arch::half_twice<true>(raw.w[i / 2]) : arch::half_twice<false>(raw.w[i / 2]);
  }
  // Codes of two magnitudes, in the lowest bits of the halves.
  HOPWELL_DEVICE uint32_t of(uint32_t magnitudes) const {
    const auto select = [](uint32_t mask, uint32_t a, uint32_t b) { return (a & mask) | (b & ~mask); };
    const uint32_t four = where_larger(magnitudes, t[3]);
    const uint32_t two = where_larger(magnitudes, select(four, t[5], t[1]));
    const uint32_t one = where_larger(magnitudes, select(four, select(two, t[6], t[4]), select(two, t[2], t[0])));
    return (four & 0x00040004u) | (two & 0x00020002u) | (one & 0x00010001u);
  }
  // sum + kWeight · codes
  template <uint32_t kWeight>
  HOPWELL_DEVICE uint32_t add(uint32_t magnitudes, uint32_t sum) const {
    return sum + of(magnitudes) * kWeight;
  }
};

template <class T>
HOPWELL_DEVICE void encode_by_thresholds(const Block<T>& x, const Thresholds16& of_scale, uint32_t (&words)[2]) {
  const ThresholdCodes codes_of_scale(of_scale);
  HOPWELL_UNROLL
  for (int half = 0; half < 2; ++half) {
    uint32_t codes[4];  // two codes each, in the lowest bits of the halves
    HOPWELL_UNROLL
    for (int i = 0; i < 4; ++i) {
      const uint32_t pair = x.words[4 * half + i];
      codes[i] = codes_of_scale.of(pair & 0x7fff7fffu) | (pair >> 12 & 0x00080008u);
    }
    words[half] = join_bytes(codes[0] + codes[1] * 256, codes[2] + codes[3] * 256);
  }
}

// ---- bf16 by sums that saturate -------------------------------------------------------------------------------------

// The bits of bf16 between 2^-31 and 2^17, read as fp16, are numbers between 2^-3 and 8 in the same order. Neighbours
// differ by at least 2^-13, so 2^13 · (x - t), saturated to [0, 1], is 1 if x > t and otherwise 0: one fma. The
// thresholds of a block span at most 560 neighbours, so their differences are exact.
//
//     four = x > t3;  two = x > (four ? t5 : t1);  one = x > (four ? (two ? t6 : t4) : (two ? t2 : t0))
//
// The selections are sums as well: t1 + four · (t5 - t1). All thresholds are multiplied by -2^13.
struct alignas(16) Steps {
  uint16_t t3, t1, t5_t1, t0, t2_t0, t4_t0, rest;  // t5 - t1, …; (t6 - t4) - (t2 - t0)
  uint16_t unused;
};

// True if the thresholds of all scales, and the largest |x| = 2,688 · global, lie in that range.
HOPWELL_DEVICE bool is_usual(float global) { return global >= 0x1p-19f && global <= 0x1p5f; }

HOPWELL_DEVICE Steps steps_of(const Thresholds16& t) {
  float f[7];  // values of the bits as fp16, times -2^13
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

// Adds codes as multiples of the smallest fp16 number. Below 2,048 times this number, the bits of an fp16 are an
// integer.
struct StepCodes {
  uint32_t t3, t1, t5_t1, t0, t2_t0, t4_t0, rest;
  HOPWELL_DEVICE explicit StepCodes(const Steps& of_scale) {
    const auto raw = arch::bit_cast<arch::Words4>(of_scale);
    t3 = arch::half_twice<false>(raw.w[0]), t1 = arch::half_twice<true>(raw.w[0]);
    t5_t1 = arch::half_twice<false>(raw.w[1]), t0 = arch::half_twice<true>(raw.w[1]);
    t2_t0 = arch::half_twice<false>(raw.w[2]), t4_t0 = arch::half_twice<true>(raw.w[2]);
    rest = arch::half_twice<false>(raw.w[3]);
  }
  // sum + kWeight · codes of two magnitudes
  template <uint32_t kWeight>
  HOPWELL_DEVICE uint32_t add(uint32_t magnitudes, uint32_t sum) const {
    constexpr uint32_t kScale = 0x70007000u, kOne = kWeight * 0x00010001u;
    const uint32_t four = arch::fma_saturated_fp16(magnitudes, kScale, t3);
    const uint32_t two = arch::fma_saturated_fp16(magnitudes, kScale, arch::fma_fp16(four, t5_t1, t1));
    const uint32_t lower = arch::fma_fp16(two, t2_t0, t0), to_upper = arch::fma_fp16(two, rest, t4_t0);
    const uint32_t one = arch::fma_saturated_fp16(magnitudes, kScale, arch::fma_fp16(four, to_upper, lower));
    sum = arch::fma_fp16(four, 4 * kOne, sum);
    sum = arch::fma_fp16(two, 2 * kOne, sum);
    return arch::fma_fp16(one, kOne, sum);
  }
};

// A word has four codes of two words of x: a byte each, lower halves first.
HOPWELL_DEVICE void encode_by_steps(const Block<bf16>& x, const Steps& of_scale, uint32_t (&words)[2]) {
  constexpr uint32_t kMagnitude = 0x7fff7fffu;
  const StepCodes codes_of_scale(of_scale);
  HOPWELL_UNROLL
  for (int half = 0; half < 2; ++half) {
    uint32_t codes[2];
    HOPWELL_UNROLL
    for (int i = 0; i < 2; ++i) {
      const uint32_t first = x.words[4 * half + 2 * i], second = x.words[4 * half + 2 * i + 1];
      const uint32_t sum = codes_of_scale.add<1>(first & kMagnitude, codes_of_scale.add<256>(second & kMagnitude, 0));
      codes[i] = (arch::permute_bytes<0x7351>(first, second) >> 4 & 0x08080808u) | sum;
    }
    words[half] = join_bytes(codes[0], codes[1]);
  }
}

// ---- two blocks prepared before their scales are known ---------------------------------------------------------------

// Elements k and k + 4 of eight are the halves of a word, so that a sum of their codes times 16^k is a word of codes.
// `signs` has their signs.
struct PreparedPair {
  uint32_t magnitudes[2][8];
  uint32_t signs;  // of word i of the pair's codes: bits 3 - i, 7 - i, 11 - i, …

  template <class T>
  HOPWELL_DEVICE static PreparedPair of(const Block<T> (&x)[2]) {
    PreparedPair pair;
    uint32_t of_word[4];
    HOPWELL_UNROLL
    for (int i = 0; i < 4; ++i) {
      uint32_t signs = 0;
      HOPWELL_UNROLL
      for (int k = 0; k < 4; ++k) {
        const uint32_t low = x[i / 2].words[i % 2 * 4 + k / 2], high = x[i / 2].words[i % 2 * 4 + 2 + k / 2];
        const uint32_t both = k % 2 ? arch::permute_bytes<0x7632>(low, high) : arch::permute_bytes<0x5410>(low, high);
        pair.magnitudes[i / 2][i % 2 * 4 + k] = both & 0x7fff7fffu;
        signs = signs >> 4 | (both & 0x80008000u);
      }
      of_word[i] = signs;
    }
    pair.signs = ((of_word[3] >> 1 | of_word[2]) >> 1 | of_word[1]) >> 1 | of_word[0];
    return pair;
  }
  // Codes: ThresholdCodes or StepCodes of the scale of block j.
  template <class Codes>
  HOPWELL_DEVICE void encode(int j, const Codes& codes, uint32_t (&words)[2]) const {
    HOPWELL_UNROLL
    for (int half = 0; half < 2; ++half) {
      const uint32_t* of_word = &magnitudes[j][4 * half];
      uint32_t sum = codes.template add<256>(of_word[2], 0);
      sum = codes.template add<16>(of_word[1], sum);
      sum = codes.template add<1>(of_word[0], sum);  // up to 1,911; the fourth code is added as an integer
      sum += codes.template add<1>(of_word[3], 0) * 4096;
      words[half] = sum | (signs << (2 * j + half) & 0x88888888u);
    }
  }
};

// ---- in floats -----------------------------------------------------------------------------------------------------

// The highest bytes of four words.
HOPWELL_DEVICE uint32_t highest_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return arch::permute_bytes<0x5410>(arch::permute_bytes<0x0073>(a, b), arch::permute_bytes<0x0073>(c, d));
}

// `amax`: the largest |x|.
template <class T>
HOPWELL_DEVICE void encode_block(const Block<T>& x, float amax, float scale, float global, uint32_t (&words)[2]) {
  // |x| / unit has three roundings, and another where it becomes subnormal: the error is at most 4 units in the last
  // place.
  constexpr uint32_t kMargin = 16, kHalf = 1u << 21;
  const float unit = scale * global, factor = 1 / unit;
  uint32_t nearest = 0xffffffffu;  // smallest distance of an element from the middle of two codes
  HOPWELL_UNROLL
  for (int half = 0; half < 2; ++half) {
    uint32_t signs[8], codes[8];  // in the highest byte: bit 7 is the sign; bits 0 to 2 are the code's magnitude
    HOPWELL_UNROLL
    for (int i = 0; i < 8; ++i) {
      signs[i] = arch::bit_cast<uint32_t>(x.get(8 * half + i) * factor * 0x1p-126f) + kHalf + kMargin;
      codes[i] = signs[i] << 2;
      nearest = signs[i] << 10 < nearest ? signs[i] << 10 : nearest;
    }
    uint32_t nibbles[2];  // codes of even and of odd elements, a byte each
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
