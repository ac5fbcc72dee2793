#include "vectors.hpp"

#include <algorithm>
#include <cmath>

#include "arch/emu/vector_clones.hpp"
#include "tile/cpu/parallel.hpp"

namespace hopwell::cases {

HOPWELL_VECTOR_CLONES
Sum dot(const double* x, const double* y, std::int64_t count) {
  double value = 0, magnitude = 0;
#pragma omp simd reduction(+ : value, magnitude)
  for (std::int64_t i = 0; i < count; ++i) {
    const double product = x[i] * y[i];
    value += product;
    magnitude += std::abs(product);
  }
  return {value, magnitude};
}

HOPWELL_VECTOR_CLONES
void add_scaled(double factor, double size, const double* x, double* value, double* magnitude, std::int64_t count) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) {
    value[i] += factor * x[i];
    magnitude[i] += size * std::abs(x[i]);
  }
}

std::vector<double> values_of(const Array& array) {
  constexpr std::int64_t kPart = 1 << 14;
  std::vector<double> values(static_cast<std::size_t>(array.size()));
  cpu::parallel_for((array.size() + kPart - 1) / kPart, [&](std::int64_t part) {
    for (std::int64_t i = part * kPart; i < std::min((part + 1) * kPart, array.size()); ++i)
      values[static_cast<std::size_t>(i)] = array.get(i);
  });
  return values;
}

double rms(const std::vector<double>& x) {
  double sum = 0, count = 0;
  for (const double value : x)
    if (std::isfinite(value)) sum += value * value, ++count;
  return count > 0 ? std::sqrt(sum / count) : 0;
}

}  // namespace hopwell::cases
