#include "nvfp4.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace hopwell::cases {
namespace {

constexpr std::int64_t round_up(std::int64_t n, std::int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// Fills with random bits, one 64-bit word at a time.
void fill_random(Random& random, std::uint8_t* to, std::int64_t bytes) {
  for (std::int64_t i = 0; i < bytes; i += 8) {
    const std::uint64_t bits = random.bits();
    std::memcpy(to + i, &bits, static_cast<std::size_t>(std::min<std::int64_t>(bytes - i, 8)));
  }
}

std::uint8_t usual_scale(std::uint8_t bits) { return static_cast<std::uint8_t>(0x28 + bits % 0x20); }

std::uint8_t random_scale(Random& random, ScaleBytes kind) {
  const auto sign = static_cast<std::uint8_t>(random.below(2) * 0x80);
  switch (kind) {
    case ScaleBytes::kAny:
      return static_cast<std::uint8_t>(sign | random.below(0x7F));
    case ScaleBytes::kSubnormal:
      return static_cast<std::uint8_t>(random.below(8));
    case ScaleBytes::kSomeNan:
      if (random.below(24) == 0) return static_cast<std::uint8_t>(sign | 0x7F);
      [[fallthrough]];
    case ScaleBytes::kUsual:
      return usual_scale(static_cast<std::uint8_t>(random.bits() >> 56));
  }
  return 0;
}

}  // namespace

double e2m1_value(unsigned code) {
  constexpr double kMagnitudes[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return std::copysign(kMagnitudes[code & 7U], (code & 8U) != 0 ? -1.0 : 1.0);
}

double e4m3_value(unsigned byte) {
  const int exponent = static_cast<int>(byte >> 3 & 15U), mantissa = static_cast<int>(byte & 7U);
  if (exponent == 15 && mantissa == 7) return std::numeric_limits<double>::quiet_NaN();
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return (byte & 0x80U) != 0 ? -magnitude : magnitude;
}

std::int64_t blocked_place(std::int64_t row, std::int64_t column, std::int64_t columns) {
  return 512 * (row / 128 * ((columns + 3) / 4) + column / 4) + 16 * (row % 32) + 4 * (row % 128 / 32) + column % 4;
}

Array blocked_array(const std::string& name, DType dtype, std::int64_t rows, std::int64_t columns, std::int64_t batch) {
  const std::int64_t row_tiles = round_up(rows, 128) / 128, column_tiles = round_up(columns, 4) / 4;
  return {name,
          dtype,
          {32, 4, row_tiles, 4, column_tiles, batch},
          {16, 4, 512 * column_tiles, 1, 512, 512 * row_tiles * column_tiles}};
}

Matrix& Matrix::add(Instance& instance, Random& random, const std::string& codes_name, const std::string& scales_name) {
  const std::int64_t layers = std::max<std::int64_t>(batch, 1), row_bytes = k / 2 + row_gap,
                     row_scales = k / 16 + row_gap;
  std::vector<std::int64_t> code_shape = {rows, k / 2}, code_strides = {row_bytes, 1};
  std::vector<std::int64_t> scale_shape = {rows, k / 16}, scale_strides = {row_scales, 1};
  if (batch > 0) {
    code_shape.push_back(batch), code_strides.push_back(rows * row_bytes);
    scale_shape.push_back(batch), scale_strides.push_back(rows * row_scales);
  }
  codes = &instance.add({codes_name, DType::kUInt8, code_shape, code_strides});
  scales = &instance.add(blocked ? blocked_array(scales_name, DType::kUInt8, rows, k / 16, layers)
                                 : Array(scales_name, DType::kFloat8E4m3, scale_shape, scale_strides));
  if (blocked) scales->fill(0x7F);
  for (std::int64_t l = 0; l < layers; ++l) {
    for (std::int64_t row = 0; row < rows; ++row) {
      if (k > 0) fill_random(random, &code_byte(row, 0, l), k / 2);
      if (scale_bytes == ScaleBytes::kUsual && !blocked && k > 0) {  // benchmarks have 1e8 of these
        fill_random(random, &scale(row, 0, l), k / 16);
        for (std::int64_t block = 0; block < k / 16; ++block) scale(row, block, l) = usual_scale(scale(row, block, l));
        continue;
      }
      for (std::int64_t block = 0; block < k / 16; ++block) scale(row, block, l) = random_scale(random, scale_bytes);
    }
  }
  return *this;
}

std::uint8_t& Matrix::code_byte(std::int64_t row, std::int64_t byte, std::int64_t l) const {
  const std::int64_t row_bytes = k / 2 + row_gap;
  return *reinterpret_cast<std::uint8_t*>(codes->data() + (l * rows + row) * row_bytes + byte);
}

std::uint8_t& Matrix::scale(std::int64_t row, std::int64_t block, std::int64_t l) const {
  const std::int64_t columns = k / 16, matrix = round_up(rows, 128) * round_up(columns, 4);
  const std::int64_t offset =
      blocked ? l * matrix + blocked_place(row, block, columns) : (l * rows + row) * (columns + row_gap) + block;
  return *reinterpret_cast<std::uint8_t*>(scales->data() + offset);
}

unsigned Matrix::code(std::int64_t row, std::int64_t column, std::int64_t l) const {
  return unsigned{code_byte(row, column / 2, l)} >> (4 * (column % 2)) & 15U;
}

void Matrix::set_code(std::int64_t row, std::int64_t column, std::int64_t l, unsigned code) {
  std::uint8_t& byte = code_byte(row, column / 2, l);
  const unsigned other = column % 2 == 0 ? byte & 0xF0U : byte & 0x0FU;
  byte = static_cast<std::uint8_t>(other | code << (4 * (column % 2)));
}

double Matrix::value(std::int64_t row, std::int64_t column, std::int64_t l) const {
  return e2m1_value(code(row, column, l)) * e4m3_value(scale(row, column / 16, l));
}

double Matrix::bytes() const {
  return static_cast<double>(std::max<std::int64_t>(batch, 1) * rows * k) * (1.0 / 2 + 1.0 / 16);
}

double factor_of(float global, bool reciprocal) {
  return reciprocal ? 1 / static_cast<double>(global) : static_cast<double>(global);
}

Tolerance nvfp4_tolerance(DType out) {
  // Within one unit in the last place of the exactly rounded result means within one and a half of the exact result.
  if (out == DType::kFloat16) return {.norm = 1e-3, .absolute = 1.5 * 0x1p-24, .relative = 1.5 * 0x1p-10};
  if (out == DType::kBFloat16) return {.norm = 4e-3, .absolute = 0x1p-133, .relative = 1.5 * 0x1p-7};
  return {.norm = 1e-5, .absolute = 0x1p-149, .relative = 0x1p-16};
}

}  // namespace hopwell::cases
