// Shared by the cases of the NVFP4 operators: matrices of codes and scales, and their values in float64.
#pragma once

#include <cstdint>
#include <string>

#include "case.hpp"

namespace hopwell::cases {

enum class ScaleBytes {
  kUsual,      // 0.25 .. 3.75, typical of weights
  kAny,        // every finite byte: both signs, both zeros, subnormals, 448
  kSubnormal,  // 0 .. 7 * 2^-9
  kSomeNan     // kUsual, with some NaN of both signs
};

// Codes [rows, K/2, batch] and scales, plain [rows, K/16, batch] or blocked; K fastest, batch slowest. batch 0: two
// dimensions.
struct Matrix {
  std::int64_t rows = 1, k = 16, batch = 0;
  bool blocked = false;
  ScaleBytes scale_bytes = ScaleBytes::kUsual;
  std::int64_t row_gap = 0;  // bytes between rows of codes, and of plain scales
  Array* codes = nullptr;
  Array* scales = nullptr;

  // Adds the arrays to the instance, with random codes and scales. The padding of blocked scales is NaN.
  Matrix& add(Instance& instance, Random& random, const std::string& codes_name, const std::string& scales_name);

  [[nodiscard]] double value(std::int64_t row, std::int64_t column, std::int64_t l = 0) const;  // code * scale
  [[nodiscard]] unsigned code(std::int64_t row, std::int64_t column, std::int64_t l = 0) const;
  void set_code(std::int64_t row, std::int64_t column, std::int64_t l, unsigned code);
  [[nodiscard]] std::uint8_t& scale(std::int64_t row, std::int64_t block, std::int64_t l = 0) const;
  [[nodiscard]] double bytes() const;  // bytes of codes and scales that are read

 private:
  [[nodiscard]] std::uint8_t& code_byte(std::int64_t row, std::int64_t byte, std::int64_t l) const;
};

// Blocked scales with the shape and strides that CUTLASS users create, [32, 4, rows / 128, 4, K / 64, batch].
Array blocked_array(const std::string& name, DType dtype, std::int64_t rows, std::int64_t columns, std::int64_t batch);
// Byte offset of a scale, by the formula in hopwell.h.
std::int64_t blocked_place(std::int64_t row, std::int64_t column, std::int64_t columns);

// How a global scale is given, and the factor that it stands for.
enum class GlobalAs { kNumber, kArray, kReciprocal, kReciprocalArray };
double factor_of(float global, bool reciprocal);

double e2m1_value(unsigned code);
double e4m3_value(unsigned byte);

// The tolerance for an output type (docs/operators/index.md, "accuracy").
Tolerance nvfp4_tolerance(DType out);

}  // namespace hopwell::cases
