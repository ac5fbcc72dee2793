// paged_attention on GPUs: elements of any type, in memory and in fp32.
#pragma once

#include <cmath>

#include "arch/sm80/convert.hpp"
#include "arch/sm80/memory.hpp"
#include "ops/paged_attention/gpu/scalars.hpp"
#include "tile/gpu/numbers.hpp"

namespace hopwell::ops::paged_attention::HOPWELL_TARGET {

using arch::bf16;
using arch::fp16;
using tile::from_fp32, tile::to_fp32;
using tile::kLog2E;

template <class T>
constexpr int kElements = 16 / int(sizeof(T));  // elements of a 16-byte chunk

template <class T>
constexpr Float kFloat = sizeof(T) == 4            ? Float::fp32
                         : std::is_same_v<T, bf16> ? Float::bf16
                                                   : Float::fp16;

// Loading an element's bits and decoding them are two functions, so that loads need not wait for one another.
HOPWELL_DEVICE uint32_t load_bits(const void* data, Float type, int64_t at) {
  return type == Float::fp32 ? static_cast<const uint32_t*>(data)[at] : static_cast<const uint16_t*>(data)[at];
}
HOPWELL_DEVICE float decode(uint32_t bits, Float type) {
  return type == Float::fp32   ? arch::bit_cast<float>(bits)
         : type == Float::fp16 ? arch::to_float(fp16{uint16_t(bits)})
                               : arch::bit_cast<float>(bits << 16);
}

// Bits of up to eight elements; loaded as whole 16-byte chunks if they are aligned.
struct RawElements {
  arch::Words4 half[2];  // 16-bit types, and four fp32 elements, use only the first one
};
template <int kCount>
HOPWELL_DEVICE RawElements load_elements(const void* data, Float type, int64_t at, bool aligned) {
  RawElements raw{};
  const char* from = static_cast<const char*>(data) + at * (type == Float::fp32 ? 4 : 2);
  if (aligned) {
    raw.half[0] = arch::load_vector<arch::Words4>(from);
    if (kCount > 4 && type == Float::fp32) raw.half[1] = arch::load_vector<arch::Words4>(from + 16);
    return raw;
  }
  HOPWELL_UNROLL
  for (int e = 0; e < kCount; ++e) {
    if (type == Float::fp32)
      raw.half[e / 4].w[e % 4] = load_bits(from, type, e);
    else
      raw.half[0].w[e / 2] |= load_bits(from, type, e) << 16 * (e % 2);
  }
  return raw;
}
template <int kCount>
HOPWELL_DEVICE void add_elements(const RawElements& raw, Float type, float (&to)[kCount]) {
  HOPWELL_UNROLL
  for (int e = 0; e < kCount; ++e)
    to[e] +=
        decode(type == Float::fp32 ? raw.half[e / 4].w[e % 4] : raw.half[0].w[e / 2] >> 16 * (e % 2) & 0xffff, type);
}

template <class T>
HOPWELL_DEVICE void unpack(const arch::Words4& chunk, float (&x)[kElements<T>]) {
  HOPWELL_UNROLL
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      x[i] = arch::bit_cast<float>(chunk.w[i]);
    } else if constexpr (std::is_same_v<T, bf16>) {
      x[2 * i] = arch::bit_cast<float>(chunk.w[i] << 16);
      x[2 * i + 1] = arch::bit_cast<float>(chunk.w[i] & 0xffff0000);
    } else {
      x[2 * i] = arch::to_float(fp16{uint16_t(chunk.w[i])});
      x[2 * i + 1] = arch::to_float(fp16{uint16_t(chunk.w[i] >> 16)});
    }
  }
}

}  // namespace hopwell::ops::paged_attention::HOPWELL_TARGET
