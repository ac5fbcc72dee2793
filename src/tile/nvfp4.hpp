// NVFP4 number formats and the 128x4 blocked order of scales: constexpr functions for every backend.
//
// e2m1: OCP Microscaling Formats v1.0, section 5.3.3. e4m3 (no infinities, NaN 0x7F and 0xFF): OCP 8-bit Floating Point
// v1.0. The blocked order: cuBLAS documentation, "1D block scaling factors layout".
#pragma once

#include <bit>
#include <cstdint>

namespace hopwell::nvfp4 {

inline constexpr std::int64_t kBlock = 16;  // codes along K that share a scale
inline constexpr float kCodeMax = 6, kScaleMax = 448;
inline constexpr std::uint8_t kScaleMaxBits = 0x7E, kScaleNan = 0x7F;

// s e e m; the low three bits are the magnitudes 0 0.5 1 1.5 2 3 4 6.
constexpr float decode_e2m1(unsigned code) {
  const unsigned exponent = (code >> 1) & 3U, mantissa = code & 1U;
  const float magnitude = exponent == 0 ? 0.5F * static_cast<float>(mantissa)
                                        : static_cast<float>((2U + mantissa) << (exponent - 1)) * 0.5F;
  return (code & 8U) != 0 ? -magnitude : magnitude;
}

// s eeee mmm with bias 7.
constexpr float decode_e4m3(std::uint8_t bits) {
  const std::uint32_t sign = std::uint32_t{bits & 0x80U} << 24, magnitude = bits & 0x7FU;
  if (magnitude == kScaleNan) return std::bit_cast<float>(sign | 0x7FC00000U);
  if (magnitude < 8) {  // subnormal: a multiple of 2^-9
    const float subnormal = static_cast<float>(magnitude) * 0x1p-9F;
    return sign != 0 ? -subnormal : subnormal;
  }
  return std::bit_cast<float>(sign | ((magnitude << 20) + (120U << 23)));
}

// The e4m3 number nearest to x >= 0, ties to even; 448 for larger x.
constexpr std::uint8_t encode_e4m3(float x) {
  constexpr std::uint32_t kMost = std::bit_cast<std::uint32_t>(kScaleMax), kLeastNormal = 0x3C800000;
  const std::uint32_t of_x = std::bit_cast<std::uint32_t>(x), bits = of_x < kMost ? of_x : kMost;  // a NaN is larger
  const std::uint32_t normal = (bits - (120U << 23) + 0x7FFFFU + ((bits >> 20) & 1U)) >> 20;
  // The FPU rounds at 2^-9.
  const std::uint32_t subnormal = std::bit_cast<std::uint32_t>(std::bit_cast<float>(bits) + 0x1p14F) - 0x46800000U;
  return static_cast<std::uint8_t>(bits < kLeastNormal ? subnormal : normal);
}

// Tiles of 128 rows x 4 scales, 512 bytes each. The tiles of the same 128 rows are consecutive.
constexpr std::int64_t blocked_tiles(std::int64_t scales_a_row) { return (scales_a_row + 3) / 4; }
constexpr std::int64_t blocked_bytes(std::int64_t rows, std::int64_t scales_a_row) {
  return 512 * ((rows + 127) / 128) * blocked_tiles(scales_a_row);
}
constexpr std::int64_t blocked_offset(std::int64_t row, std::int64_t scale, std::int64_t scales_a_row) {
  return 512 * (row / 128 * blocked_tiles(scales_a_row) + scale / 4) + 16 * (row % 32) + 4 * (row % 128 / 32) +
         scale % 4;
}

// A tensor's global scale: a number, or a pointer to one on the operator's device, which takes precedence. Either may
// be the reciprocal of the scale.
struct Global {
  const float* pointer = nullptr;
  float value = 1;
  bool is_reciprocal = false;

  // The factor of the tensor. Computed in double, because the reciprocal of a subnormal overflows a float.
  [[nodiscard]] constexpr double get() const {
    const auto global = static_cast<double>(pointer != nullptr ? *pointer : value);
    return is_reciprocal ? 1 / global : global;
  }
  // Returns a copy with the number in a register. A kernel calls this at its beginning, where the load delays nothing,
  // instead of before storing results.
  [[nodiscard]] constexpr Global loaded() const {
    return {nullptr, pointer != nullptr ? *pointer : value, is_reciprocal};
  }
};

// Location and layout of a matrix's scales.
struct Scales {
  std::uint8_t* data = nullptr;
  bool blocked = false;
  std::int64_t row_stride = 0;    // bytes; plain layout only
  std::int64_t batch_stride = 0;  // bytes
  std::int64_t columns = 0;       // K/16

  // Byte offset of scale `column` of row `row`. In the blocked layout, four scales of a row from a multiple of 4 on are
  // adjacent.
  [[nodiscard]] constexpr std::int64_t offset(std::int64_t row, std::int64_t column, std::int64_t batch = 0) const {
    return batch * batch_stride + (blocked ? blocked_offset(row, column, columns) : row * row_stride + column);
  }
};

}  // namespace hopwell::nvfp4
