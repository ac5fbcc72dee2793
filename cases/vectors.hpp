// Sums over vectors in float64 for the references, each together with the same sum of absolute values, which bounds its
// rounding.
#pragma once

#include <cstdint>
#include <vector>

#include "case.hpp"

namespace hopwell::cases {

struct Sum {
  double value = 0, magnitude = 0;
};

// The sums of x[i] * y[i] and of |x[i] * y[i]|.
Sum dot(const double* x, const double* y, std::int64_t count);

// value[i] += factor * x[i], magnitude[i] += size * |x[i]|.
void add_scaled(double factor, double size, const double* x, double* value, double* magnitude, std::int64_t count);

std::vector<double> values_of(const Array& array);  // in row-major order, by all threads
double rms(const std::vector<double>& x);           // of the finite elements

}  // namespace hopwell::cases
