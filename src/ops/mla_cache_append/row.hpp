// Quantises one row of a cache: arithmetic that the CPU and the GPU share.
#pragma once

#include <cmath>

#include "tile/mla_cache.hpp"
#include "tile/nvfp4.hpp"

namespace hopwell::ops::mla_cache_append {

// The scale of a group of codes with the largest finite magnitude `amax`.
HOPWELL_HOST_DEVICE constexpr float scale_of(float amax, bool pow2, int least_exponent) {
  if (pow2) return mla_cache::power_of_two(mla_cache::scale_exponent(amax, least_exponent));
  return (amax > 1e-4F ? amax : 1e-4F) / 448.0F;
}

HOPWELL_HOST_DEVICE constexpr bool is_finite(float x) {
  return (std::bit_cast<std::uint32_t>(x) & 0x7F800000U) != 0x7F800000U;
}

// The magnitude of x in amax: 0 if x is not finite.
HOPWELL_HOST_DEVICE constexpr float finite_magnitude(float x) {
  return is_finite(x) ? std::bit_cast<float>(std::bit_cast<std::uint32_t>(x) & 0x7FFFFFFFU) : 0.0F;
}

// The e4m3 code of `quotient`, which is x / scale, saturated. An x that is NaN or infinity gives 0x7F.
HOPWELL_HOST_DEVICE constexpr std::uint8_t code_of_quotient(float x, float quotient) {
  if (!is_finite(x)) return 0x7F;
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(quotient);
  return static_cast<std::uint8_t>(nvfp4::encode_e4m3(std::bit_cast<float>(bits & 0x7FFFFFFFU)) | (bits >> 24 & 0x80U));
}

}  // namespace hopwell::ops::mla_cache_append
