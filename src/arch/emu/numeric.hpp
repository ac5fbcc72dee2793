// Small floating-point formats as the hardware reads and rounds them.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "../platform.hpp"

namespace hopwell::arch::emu {

/// Result of every hardware conversion and sum for NaN, for any sign and payload of the operands.
inline constexpr uint32_t kCanonicalNan = 0x7fffffff;
inline float canonical(float x) { return x == x ? x : bit_cast<float>(kCanonicalNan); }
/// Replaces a subnormal number by zero of the same sign (.ftz).
inline float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.f, x) : x; }

/// exp2 and log2 of the host. The time model counts the calls.
float exp2(float x);
float log2(float x);

inline float from_bf16(uint16_t x) { return bit_cast<float>(uint32_t{x} << 16); }

inline float from_fp16(uint16_t x) {
  const uint32_t sign = uint32_t{x & 0x8000u} << 16, exponent = x >> 10 & 31, mantissa = x & 1023u;
  if (exponent == 31) return bit_cast<float>(mantissa ? kCanonicalNan : sign | 0x7f800000u);
  if (exponent) return bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
  const float subnormal = float(mantissa) * 0x1p-24f;
  return sign ? -subnormal : subnormal;
}

/// 1 sign, 4 exponent (bias 7), 3 mantissa bits; no infinity, 0x7f and 0xff are NaN.
inline float from_e4m3(uint8_t x) {
  // The bits are a float's exponent and mantissa without a change, because exponent 0 is subnormal in both formats.
  // 2^120 corrects the bias.
  const uint32_t magnitude = x & 0x7fu;
  const float value =
      magnitude == 0x7f ? std::numeric_limits<float>::quiet_NaN() : bit_cast<float>(magnitude << 20) * 0x1p120f;
  return x & 0x80 ? -value : value;
}

/// 1 sign, 2 exponent, 1 mantissa bit: 0, 0.5, 1, 1.5, 2, 3, 4, 6.
inline float from_e2m1(uint8_t nibble) {
  constexpr float magnitude[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  return nibble & 8 ? -magnitude[nibble & 7] : magnitude[nibble & 7];
}

/// Round to nearest even, as cvt.rn.bf16.f32: NaN becomes 0x7fff.
inline uint16_t to_bf16_bits(float f) {
  const uint32_t u = bit_cast<uint32_t>(f);
  if (f != f) return 0x7fff;
  return uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

/// Round to nearest even, as cvt.rn.f16.f32: overflow to infinity, NaN becomes 0x7fff.
inline uint16_t to_fp16_bits(float f) {
  const uint32_t u = bit_cast<uint32_t>(f), magnitude = u & 0x7fffffff;
  const uint16_t sign = uint16_t(u >> 16 & 0x8000);
  if (magnitude > 0x7f800000) return 0x7fff;
  if (magnitude >= 0x477ff000) return uint16_t(sign | 0x7c00);  // 65520 and above
  if (magnitude < 0x38800000)                                   // below the smallest normal number, 2^-14
    return uint16_t(sign | uint16_t(std::nearbyint(bit_cast<float>(magnitude) * 0x1p24f)));
  return uint16_t(sign | ((magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13));
}

/// Round to nearest even and saturate, as cvt.rn.satfinite.e4m3x2.f32: NaN becomes 0x7f.
inline uint8_t to_e4m3_bits(float f) {
  if (f != f) return 0x7f;
  const uint8_t sign = std::signbit(f) ? 0x80 : 0;
  const float magnitude = std::fabs(f);
  if (magnitude >= 448) return sign | 0x7e;
  if (magnitude < 0x1p-6f) return uint8_t(sign | uint8_t(std::nearbyint(magnitude * 0x1p9f)));
  const uint32_t u = bit_cast<uint32_t>(magnitude), rounded = u + 0x7ffff + (u >> 20 & 1);
  const uint32_t code = (rounded >> 20) - ((127 - 7) << 3);
  return uint8_t(sign | (code > 0x7e ? 0x7e : code));
}

/// Round to nearest even and saturate, as cvt.rn.satfinite.e2m1x2.f32: NaN becomes +6.
inline uint8_t to_e2m1_bits(float f) {
  if (f != f) return 7;
  const uint8_t sign = std::signbit(f) ? 8 : 0;
  const float m = std::fabs(f);
  const uint8_t code = m <= 0.25f   ? 0
                       : m < 0.75f  ? 1
                       : m <= 1.25f ? 2
                       : m < 1.75f  ? 3
                       : m <= 2.5f  ? 4
                       : m < 3.5f   ? 5
                       : m <= 5     ? 6
                                    : 7;
  return uint8_t(sign | code);
}

}  // namespace hopwell::arch::emu
