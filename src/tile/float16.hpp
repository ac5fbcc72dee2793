// Scalar conversions between float and the 16-bit storage types, exact and correctly rounded (nearest, ties to even).
#pragma once

#include <hopwell/tensor.hpp>

#include <bit>
#include <cstdint>

namespace hopwell {

constexpr float to_float(float x) { return x; }

constexpr float to_float(bfloat16 x) { return std::bit_cast<float>(std::uint32_t{x.bits} << 16); }

constexpr float to_float(float16 x) {
  const std::uint32_t sign = std::uint32_t{x.bits & 0x8000U} << 16, exponent = (x.bits >> 10) & 31U,
                      mantissa = x.bits & 0x3FFU;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7F800000U | (mantissa << 13));
  if (exponent == 0) {  // zero and subnormals: mantissa * 2^-24
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24F;
    return sign != 0 ? -magnitude : magnitude;
  }
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

template <class T>
constexpr T rounded(float x);

template <>
constexpr float rounded<float>(float x) {
  return x;
}

template <>
constexpr bfloat16 rounded<bfloat16>(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U) return {static_cast<std::uint16_t>((bits >> 16) | 0x40U)};  // NaN stays NaN
  return {static_cast<std::uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16)};
}

template <>
constexpr float16 rounded<float16>(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000U);
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  if (magnitude > 0x7F800000U) return {static_cast<std::uint16_t>(sign | 0x7E00U)};
  if (magnitude >= 0x47800000U) return {static_cast<std::uint16_t>(sign | 0x7C00U)};  // 2^16 and above
  if (magnitude < 0x38800000U) {  // below 2^-14: a subnormal, or zero. Adding 0.5 makes the FPU round at bit 2^-24.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5F;
    return {static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3F000000U))};
  }
  const std::uint32_t rebiased = magnitude - (112U << 23);
  return {static_cast<std::uint16_t>(sign | ((rebiased + 0xFFFU + ((rebiased >> 13) & 1U)) >> 13))};
}

}  // namespace hopwell
