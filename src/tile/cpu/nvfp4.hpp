// Vector code for NVFP4 on the CPU, with Highway and run-time dispatch: decoding, dot products with decoded weights,
// encoding.
//
// Dot products take x in the order in which codes come out of the decoder, so that nothing has to be shuffled back:
// `arrange` puts it into that order, and pads it with zeros to a multiple of kStep. The order is the machine's, the
// same in every call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tile/cpu/parallel.hpp"
#include "tile/nvfp4.hpp"

namespace hopwell::cpu::nvfp4 {

inline constexpr std::size_t kStep = 128;  // a multiple of the codes that one step decodes on any machine

constexpr std::size_t padded(std::size_t k) { return (k + kStep - 1) / kStep * kStep; }
// Floats of room for the decoded scales of a row of k codes; all of them are written.
constexpr std::size_t scale_room(std::size_t k) { return padded(k) / 16 + 16; }

// out[j] = e4m3(scales[j]) * factors[j] for j < k / 16, zeros from there to scale_room(k). factors null: 1.
void decode_scales(const std::uint8_t* scales, const float* factors, std::size_t k, float* out);

// Puts x[0, k) as row `row` of n into out[0, n * padded(k)): in the decoder's order, padded with zeros, and the rows'
// vectors next to one another. x null: a row of zeros.
void arrange(const float* x, std::size_t k, std::size_t row, std::size_t n, float* out);

// A single row of x, for dot_row. Most steps go in 16-bit fixed point with a power of two for each block of 16, which
// halves the instructions a weight costs; steps of large range, and inf and NaN, go as floats.
struct Row {
  explicit Row(std::size_t k)
      : floats(static_cast<std::int64_t>(padded(k))),
        digits(static_cast<std::int64_t>(padded(k))),
        factors(static_cast<std::int64_t>(padded(k) / 16)),
        losses(static_cast<std::int64_t>(scale_room(k))) {}
  Scratch<float> floats;
  Scratch<std::int16_t> digits;
  Scratch<float> factors;  // of each block, to go into the scales of the weights
  Scratch<float> losses;   // most that a scale of 1, with its factor, makes of the digits that a block lost
  bool is_exact = true;    // there are no losses
  struct Run {
    std::size_t begin, end;
    bool is_fixed;
  };
  std::vector<Run> runs;  // of steps of one kind, in order; together all of k
};

// `exact`: fixed point only where it loses nothing. Otherwise x changes by at most 2^-15 of the largest of its block,
// and by at most 2^-11 of the median of those that are not zero.
void arrange_row(const float* x, std::size_t k, bool exact, Row& out);

// Rows of codes that `dot` takes together with n rows of x, n being 1 (dot_row), 2, 4 or 8: as many sums as there are
// registers for.
constexpr std::size_t dot_rows(std::size_t n) { return n <= 2 ? 4 : 8 / n; }

// out[r * n + i] = sum_k x[i, k] * code[r, k] * scale[r, k / 16] for r < rows <= dot_rows(n) and i < n, n being 2, 4
// or 8. Row r's codes are codes[r], its decoded scales begin at scales + r * scale_room(k); x is arranged. Sums run in
// an order that depends on the machine, n and k only.
void dot(const std::uint8_t* const* codes, const float* scales, std::size_t rows, const float* x, std::size_t n,
         std::size_t k, float* out);

// The same with n = 1, with scales that were decoded with x's factors. next[r] is where the codes begin that this
// thread will need in row r's place the next time: they are fetched into the cache meanwhile, for rows are too short
// for the machine to foresee them in time.
void dot_row(const std::uint8_t* const* codes, const float* scales, std::size_t rows, const Row& x, std::size_t k,
             const std::uint8_t* const* next, float* out);

// Most that dot_row's result for a row may be off because x lost digits; its scales as dot_row takes them.
float loss_of_row(const float* scales, const Row& x, std::size_t k);

// out[0, padded(k)): code * scale in the order of `arrange` with n = 1, the rest zero. Exact.
void decode_arranged(const std::uint8_t* codes, const float* scales, std::size_t k, float* out);

// out[i] = code * scale * factor in the order of k. code * scale is exact, the product with factor rounds once.
void decode(const std::uint8_t* codes, const float* scales, float factor, std::size_t k, float* out);

// max |x[i]| over the finite ones, 0 without any.
float finite_amax(const float* x, std::size_t count);

// Codes [k / 2] and scale bytes [k / 16] of one row for a global scale, as hopwell.h defines them.
void encode(const float* x, float global, std::size_t k, std::uint8_t* codes, std::uint8_t* scales);

// A matrix of codes and its scales.
struct Matrix {
  const std::uint8_t* codes;  // of the batch
  std::int64_t row_stride, batch, k;
  hopwell::nvfp4::Scales scales;

  [[nodiscard]] const std::uint8_t* row(std::int64_t m) const { return codes + m * row_stride; }

  // The scales of columns [first, first + count) of K in row m, decoded, times factors if there are any, with zeros
  // behind; `first` is a multiple of 64. `bytes` has room for count / 16 + 3.
  void decode_scales(std::int64_t m, std::int64_t first, std::int64_t count, std::uint8_t* bytes, float* out,
                     const float* factors = nullptr) const;

  // Starts to fetch row m's scales into the cache. Blocked ones need no help: rows of a tile share their lines.
  void prefetch_scales(std::int64_t m) const;
};

}  // namespace hopwell::cpu::nvfp4
