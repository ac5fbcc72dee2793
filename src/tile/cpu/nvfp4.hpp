// Vector code for NVFP4 on the CPU, with Highway and run-time dispatch: decoding, dot products with decoded weights,
// encoding.
//
// Dot products read x in the order in which the decoder produces codes, so that codes need no shuffle. `arrange` puts x
// into that order and pads it with zeros to a multiple of kStep. The order depends on the machine only; it is the same
// in every call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tile/cpu/parallel.hpp"
#include "tile/nvfp4.hpp"

namespace hopwell::cpu::nvfp4 {

inline constexpr std::size_t kStep = 128;  // a multiple of the codes that one step decodes on any machine

constexpr std::size_t padded(std::size_t k) { return (k + kStep - 1) / kStep * kStep; }
// Number of floats for the decoded scales of a row of k codes. decode_scales writes all of them.
constexpr std::size_t scale_room(std::size_t k) { return padded(k) / 16 + 16; }

// out[j] = e4m3(scales[j]) * factors[j] for j < k / 16, then zeros up to scale_room(k). Null factors mean 1.
void decode_scales(const std::uint8_t* scales, const float* factors, std::size_t k, float* out);

// Writes x[0, k) as row `row` of n rows into out[0, n * padded(k)): in the decoder's order, padded with zeros, the
// vectors of the rows interleaved. Null x: a row of zeros.
void arrange(const float* x, std::size_t k, std::size_t row, std::size_t n, float* out);

// A single row of x, for dot_row. Most steps use 16-bit fixed point with a power of two per block of 16, which halves
// the instructions per weight. Steps with a large range, inf or NaN use floats.
struct Row {
  explicit Row(std::size_t k)
      : floats(static_cast<std::int64_t>(padded(k))),
        digits(static_cast<std::int64_t>(padded(k))),
        factors(static_cast<std::int64_t>(padded(k) / 16)),
        losses(static_cast<std::int64_t>(scale_room(k))) {}
  Scratch<float> floats;
  Scratch<std::int16_t> digits;
  Scratch<float> factors;  // per block; multiplied into the weights' scales
  Scratch<float> losses;   // bound per block of the error from lost digits, for a weight scale of 1
  bool is_exact = true;    // all losses are 0
  struct Run {
    std::size_t begin, end;
    bool is_fixed;
  };
  std::vector<Run> runs;  // consecutive steps of one kind, in order; together they cover k
};

// `exact`: uses fixed point only where it loses nothing. Otherwise x changes by at most 2^-15 of the largest magnitude
// in its block, and by at most 2^-11 of the median of the nonzero magnitudes.
void arrange_row(const float* x, std::size_t k, bool exact, Row& out);

// Number of rows of codes that `dot` processes together with n rows of x, n = 1 (dot_row), 2, 4 or 8: the largest
// number whose accumulators fit the registers.
constexpr std::size_t dot_rows(std::size_t n) { return n <= 2 ? 4 : 8 / n; }

// out[r * n + i] = sum_k x[i, k] * code[r, k] * scale[r, k / 16] for r < rows <= dot_rows(n) and i < n, with n = 2, 4
// or 8. Row r has its codes at codes[r] and its decoded scales at scales + r * scale_room(k); x is arranged. The order
// of the sums depends on the machine, n and k only.
void dot(const std::uint8_t* const* codes, const float* scales, std::size_t rows, const float* x, std::size_t n,
         std::size_t k, float* out);

// The same with n = 1; the scales were decoded with x's factors. next[r] points to the codes that this thread will need
// next in place of row r. They are prefetched, because rows are too short for the hardware prefetcher.
void dot_row(const std::uint8_t* const* codes, const float* scales, std::size_t rows, const Row& x, std::size_t k,
             const std::uint8_t* const* next, float* out);

// Bound of the error of dot_row's result for a row from the digits that x lost. `scales` as for dot_row.
float loss_of_row(const float* scales, const Row& x, std::size_t k);

// out[0, padded(k)) = code * scale in the order of `arrange` with n = 1, padded with zeros. Exact.
void decode_arranged(const std::uint8_t* codes, const float* scales, std::size_t k, float* out);

// out[i] = code * scale * factor in the order of k. code * scale is exact, the product with factor rounds once.
void decode(const std::uint8_t* codes, const float* scales, float factor, std::size_t k, float* out);

// max |x[i]| over the finite x[i]; 0 if no x[i] is finite.
float finite_amax(const float* x, std::size_t count);

// Codes [k / 2] and scale bytes [k / 16] of one row for a given global scale, as hopwell.h defines them.
void encode(const float* x, float global, std::size_t k, std::uint8_t* codes, std::uint8_t* scales);

// A matrix of codes and its scales.
struct Matrix {
  const std::uint8_t* codes;  // codes of this batch
  std::int64_t row_stride, batch, k;
  hopwell::nvfp4::Scales scales;

  [[nodiscard]] const std::uint8_t* row(std::int64_t m) const { return codes + m * row_stride; }

  // Decodes the scales of columns [first, first + count) of K in row m, times `factors` unless null, followed by zeros.
  // `first` is a multiple of 64. `bytes` has room for count / 16 + 3.
  void decode_scales(std::int64_t m, std::int64_t first, std::int64_t count, std::uint8_t* bytes, float* out,
                     const float* factors = nullptr) const;

  // Prefetches row m's scales. Blocked scales need no prefetch, because the rows of a tile share cache lines.
  void prefetch_scales(std::int64_t m) const;
};

}  // namespace hopwell::cpu::nvfp4
