// Vector code shared by several CPU kernels: conversions between storage types and float, exp, and reductions over
// rows. Written with Highway and dispatched at run time to the best instruction set of the machine.
#pragma once

#include <hopwell/tensor.hpp>

#include <cstddef>
#include <cstdint>

namespace hopwell::cpu {

// out[i] = float(in[i])
void to_float(const float* in, float* out, std::size_t count);
void to_float(const bfloat16* in, float* out, std::size_t count);
void to_float(const float16* in, float* out, std::size_t count);

// out[i] = in[i] rounded to nearest, ties to even; NaN stays NaN.
void from_float(const float* in, float* out, std::size_t count);
void from_float(const float* in, bfloat16* out, std::size_t count);
void from_float(const float* in, float16* out, std::size_t count);

// max_i x[i], ignoring NaN; -inf for count 0.
float max(const float* x, std::size_t count);

// x[i] = exp(factor * x[i] - shift), within about an ulp; returns the sum of the results. factor * x[i] = -inf gives 0.
// Neither product nor shift is rounded before the subtraction. shift is finite.
float exp_sum(float* x, float factor, double shift, std::size_t count);

// x[i] *= factor
void scale(float* x, float factor, std::size_t count);

// y[i] += x[i]
void add(const float* x, float* y, std::size_t count);

float dot(const float* x, const float* y, std::size_t count);

// max_i factor * x[i], not rounded; NaN if any product is NaN; -inf for count 0.
double max_or_nan(const float* x, float factor, std::size_t count);

// Gradient of the softmax for one row: p[i] *= factor, then dp[i] = p[i] * (dp[i] - delta) * scale.
void softmax_gradient(float* p, float* dp, float factor, float delta, float scale, std::size_t count);

// out[i, :] = float(rows[keys[i], 0:width]) for i in [0, count). `rows` has a row pitch of `stride` elements, `out` is
// dense.
void gather_rows(const float* rows, std::int64_t stride, const std::int32_t* keys, std::size_t count, std::size_t width,
                 float* out);
void gather_rows(const bfloat16* rows, std::int64_t stride, const std::int32_t* keys, std::size_t count,
                 std::size_t width, float* out);

// rows[keys[i], 0:width] += in[i, 0:width], for i in ascending order; a key may occur any number of times.
void scatter_add_rows(const float* in, std::size_t in_stride, const std::int32_t* keys, std::size_t count,
                      std::size_t width, float* rows, std::int64_t stride);

}  // namespace hopwell::cpu
