// nvfp4_gemv, nvfp4_linear and nvfp4_matmul on the CPU.
//
// nvfp4_matmul is nvfp4_linear: the side with fewer rows is decoded and becomes x. Method for n rows of x:
//
//     nvfp4_gemv; nvfp4_linear, n = 1; nvfp4_matmul, n <= kMostRowDots   row by row, mostly in fixed point
//     other n < kGemmFrom   up to kMaxDotN rows at a time, in fp32: codes are decoded in registers
//     other n               tiles of weights are decoded to memory, then fp32 matrix products
//
// A work item is a tile of weight rows, so results do not depend on the number of threads.
#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <optional>
#include <vector>

#include "ops/nvfp4/op.hpp"
#include "tile/cpu/nvfp4.hpp"
#include "tile/cpu/parallel.hpp"
#include "tile/cpu/product.hpp"
#include "tile/cpu/vector.hpp"
#include "tile/cpu/views.hpp"
#include "tile/float16.hpp"

namespace hopwell::ops::nvfp4 {
namespace {

namespace simd = cpu::nvfp4;
using cpu::Scratch, cpu::unsigned_size, cpu::with_type;
using hopwell::nvfp4::kBlock;
using simd::Matrix;

constexpr std::int64_t kRowTile = 32;      // rows of weights of a work item
constexpr std::int64_t kDotX = 6144;       // floats of x that stay in the L1 cache while rows of weights are read
constexpr std::int64_t kMaxDotN = 8;       // most rows of x that share a decoded weight
constexpr std::int64_t kMostRowDots = 36;  // nvfp4_matmul: most rows of x that are multiplied row by row
constexpr std::int64_t kGemmFrom = 32;     // fewest rows of x for which matrix products are faster
// A tile of decoded weights, 256 KiB; rows of x of a matrix product.
constexpr std::int64_t kGemmTile = 128, kGemmColumns = 512, kGemmRows = 256;

// Most threads for work as long as `products` products of a code with x. Waking a thread takes as long as 2^20
// products.
std::int64_t threads_for(std::int64_t products) { return products >> 20; }
constexpr std::int64_t kArranged = 32;  // products that take as long as arranging one float of x

std::int64_t tiles(std::int64_t size, std::int64_t tile) { return (size + tile - 1) / tile; }

std::int64_t padded(std::int64_t k) { return static_cast<std::int64_t>(simd::padded(unsigned_size(k))); }

constexpr std::size_t kMaxRows = simd::dot_rows(2);

// A thread's scratch for the scales of the rows that are multiplied together.
struct DotScratch {
  explicit DotScratch(std::int64_t k)
      : scales(static_cast<std::int64_t>(kMaxRows * simd::scale_room(unsigned_size(k)))), bytes(k / kBlock + 4) {}
  Scratch<float> scales;
  Scratch<std::uint8_t> bytes;
};

// Sets codes[r] to row first + r of the codes, from column `column` of K on, and decodes the scales of columns [column,
// column + columns), for r < rows.
void decode_rows(const Matrix& matrix, std::int64_t first, std::int64_t rows, std::int64_t column, std::int64_t columns,
                 const float* factors, const DotScratch& scratch, const std::uint8_t** codes) {
  const std::size_t room = simd::scale_room(unsigned_size(columns));
  for (std::int64_t r = 0; r < rows; ++r) {
    codes[r] = matrix.row(first + r) + column / 2;
    matrix.decode_scales(first + r, column, columns, scratch.bytes.get(),
                         scratch.scales.get() + unsigned_size(r) * room, factors);
  }
}

// sums[r] = x . row first + r for r < count <= kRowTile. If losses is not null, losses[r] bounds the error of sums[r].
void dot_tile(const Matrix& matrix, std::int64_t first, std::int64_t count, const simd::Row& x,
              const DotScratch& scratch, float* sums, float* losses = nullptr) {
  constexpr auto kRows = static_cast<std::int64_t>(simd::dot_rows(1));
  for (std::int64_t begin = 0; begin < count; begin += kRows) {
    const std::int64_t rows = std::min(kRows, count - begin);
    const std::uint8_t *codes[kRows], *next[kRows];
    decode_rows(matrix, first + begin, rows, 0, matrix.k, x.factors.get(), scratch, codes);
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::int64_t next_row = std::min(begin + kRows + r, count - 1);
      next[r] = matrix.row(first + next_row);
      matrix.prefetch_scales(first + next_row);
    }
    simd::dot_row(codes, scratch.scales.get(), unsigned_size(rows), x, unsigned_size(matrix.k), next, sums + begin);
    const std::size_t room = simd::scale_room(unsigned_size(matrix.k));
    for (std::int64_t r = 0; losses != nullptr && r < rows; ++r)
      losses[begin + r] = simd::loss_of_row(scratch.scales.get() + unsigned_size(r) * room, x, unsigned_size(matrix.k));
  }
}

// sums[i * kRowTile + r] = x[i] . row first + r, for i < n and r < count <= kRowTile. x is arranged; n is 2, 4 or 8.
void dot_tile(const Matrix& matrix, std::int64_t first, std::int64_t count, const float* x, std::int64_t n,
              const DotScratch& scratch, float* sums) {
  const auto rows_together = static_cast<std::int64_t>(simd::dot_rows(unsigned_size(n)));
  const std::int64_t piece = kDotX / n;
  std::fill_n(sums, n * kRowTile, 0.0F);
  for (std::int64_t column = 0; column < matrix.k; column += piece) {
    const std::int64_t columns = std::min(piece, matrix.k - column);
    const auto k = unsigned_size(columns);
    for (std::int64_t begin = 0; begin < count; begin += rows_together) {
      const std::int64_t rows = std::min(rows_together, count - begin);
      const std::uint8_t* codes[kMaxRows];
      float out[kMaxRows * kMaxDotN];
      decode_rows(matrix, first + begin, rows, column, columns, nullptr, scratch, codes);
      simd::dot(codes, scratch.scales.get(), unsigned_size(rows), x + column * n, unsigned_size(n), k, out);
      for (std::int64_t r = 0; r < rows; ++r)
        for (std::int64_t i = 0; i < n; ++i) sums[i * kRowTile + begin + r] += out[r * n + i];
    }
  }
}

// ---- nvfp4_gemv ---------------------------------------------------------------------------------------------------

void launch_gemv(const GemvProblem& p, Stream) {
  const std::size_t k = unsigned_size(p.k);
  const auto codes = [](const View& view, std::int64_t l) { return view.as<std::uint8_t>() + l * view.stride[2]; };
  std::vector<simd::Row> x;  // b of each batch
  const DotScratch room(p.k);
  const Scratch<float> row(p.k);
  const double factor = p.alpha.get();
  for (std::int64_t l = 0; p.m > 0 && l < p.l; ++l) {
    const Matrix b{codes(p.b, l), 0, l, p.k, p.sfb};
    b.decode_scales(0, 0, p.k, room.bytes.get(), room.scales.get());
    simd::decode(b.row(0), room.scales.get(), 1, k, row.get());
    simd::arrange_row(row.get(), k, true, x.emplace_back(k));
  }
  const std::int64_t row_tiles = tiles(p.m, kRowTile);
  cpu::parallel_for(
      p.l * row_tiles, threads_for(p.l * p.m * p.k), [&] { return DotScratch(p.k); },
      [&](std::int64_t item, const DotScratch& scratch) {
        const std::int64_t l = item / row_tiles, first = item % row_tiles * kRowTile,
                           count = std::min(kRowTile, p.m - first);
        float sums[kRowTile];
        dot_tile({codes(p.a, l), p.a.stride[0], l, p.k, p.sfa}, first, count, x[unsigned_size(l)], scratch, sums);
        with_type(p.c, [&]<class T>(T* c) {
          for (std::int64_t r = 0; r < count; ++r)
            c[(first + r) * p.c.stride[0] + l * p.c.stride[2]] =
                rounded<T>(static_cast<float>(factor * static_cast<double>(sums[r])));
        });
      });
}

// ---- nvfp4_linear -------------------------------------------------------------------------------------------------

// y[i, first + r] = factor * sums[r] + bias for rows [first, first + count) of weights.
struct Epilogue {
  const LinearProblem& p;
  double factor;

  void operator()(std::int64_t i, std::int64_t first, std::int64_t count, const float* sums) const {
    with_type(p.y, [&]<class T>(T* y) {
      const auto at = [i](const View& view, std::int64_t row) { return i * view.stride[0] + row * view.stride[1]; };
      const T* bias = p.bias.as<const T>();
      for (std::int64_t r = 0; r < count; ++r) {
        const double offset = p.bias ? static_cast<double>(to_float(bias[at(p.bias, first + r)])) : 0.0;
        y[at(p.y, first + r)] = rounded<T>(static_cast<float>(factor * static_cast<double>(sums[r]) + offset));
      }
    });
  }
};

// Writes row i of x as floats.
using RowsOfX = std::function<void(std::int64_t i, float* row)>;

// Rows [first, first + n) of x, arranged in groups of `group` rows. The last group is padded with rows of zeros.
Scratch<float> arranged(const RowsOfX& x, std::int64_t first, std::int64_t n, std::int64_t group, std::int64_t k) {
  const std::int64_t rows = tiles(n, group) * group;
  Scratch<float> out(rows * padded(k));
  cpu::parallel_for(
      rows, threads_for(rows * k * kArranged), [&] { return Scratch<float>(k); },
      [&](std::int64_t i, const Scratch<float>& row) {
        float* to = out.get() + i / group * group * padded(k);
        if (i >= n) return simd::arrange(nullptr, unsigned_size(k), unsigned_size(i % group), unsigned_size(group), to);
        x(first + i, row.get());
        simd::arrange(row.get(), unsigned_size(k), unsigned_size(i % group), unsigned_size(group), to);
      });
  return out;
}

Matrix weight_of(const LinearProblem& p) {
  return {p.weight.as<std::uint8_t>(), p.weight.stride[0], 0, p.k, p.weight_scale};
}

// A row of x in fixed point. If a sum cancels so far that the lost digits show in a bf16 result, dot() computes it
// again with the exact row.
struct FixedRow {
  explicit FixedRow(std::size_t k) : x(k) {}
  simd::Row x;
  std::optional<simd::Row> exact;  // present if x is not exact

  void arrange(const float* row, std::size_t k, bool loses_nothing) {
    simd::arrange_row(row, k, loses_nothing, x);
    if (!x.is_exact) simd::arrange_row(row, k, true, exact.emplace(k));
  }
  void dot(const Matrix& weight, std::int64_t first, std::int64_t count, const DotScratch& scratch, float* sums) const {
    constexpr float kShows = 0x1p-8F;
    float losses[kRowTile];
    dot_tile(weight, first, count, x, scratch, sums, exact ? losses : nullptr);
    for (std::int64_t r = 0; exact && r < count; ++r)
      if (losses[r] > kShows * std::abs(sums[r])) dot_tile(weight, first + r, 1, *exact, scratch, sums + r);
  }
};

void linear_by_row_dots(const LinearProblem& p, const RowsOfX& rows_of_x, const Epilogue& epilogue) {
  const Matrix weight = weight_of(p);
  const std::size_t k = unsigned_size(p.k);
  std::vector<FixedRow> x;
  for (std::int64_t i = 0; i < p.n; ++i) x.emplace_back(k);
  cpu::parallel_for(
      p.n, threads_for(p.n * p.k * kArranged), [&] { return Scratch<float>(p.k); },
      [&](std::int64_t i, const Scratch<float>& row) {
        rows_of_x(i, row.get());
        x[unsigned_size(i)].arrange(row.get(), k, p.x.dtype != DType::kBFloat16);
      });
  cpu::parallel_for(
      tiles(p.rows, kRowTile), threads_for(p.n * p.rows * p.k), [&] { return DotScratch(p.k); },
      [&](std::int64_t item, const DotScratch& scratch) {
        const std::int64_t first = item * kRowTile, count = std::min(kRowTile, p.rows - first);
        float sums[kRowTile];
        for (std::int64_t i = 0; i < p.n; ++i) {
          x[unsigned_size(i)].dot(weight, first, count, scratch, sums);
          epilogue(i, first, count, sums);
        }
      });
}

void linear_by_dots(const LinearProblem& p, const RowsOfX& rows_of_x, const Epilogue& epilogue) {
  const Matrix weight = weight_of(p);
  const std::int64_t group = std::min(kMaxDotN, static_cast<std::int64_t>(std::bit_ceil(unsigned_size(p.n))));
  const Scratch<float> x = arranged(rows_of_x, 0, p.n, group, p.k);
  cpu::parallel_for(
      tiles(p.rows, kRowTile), threads_for(p.n * p.rows * p.k), [&] { return DotScratch(p.k); },
      [&](std::int64_t item, const DotScratch& scratch) {
        const std::int64_t first = item * kRowTile, count = std::min(kRowTile, p.rows - first);
        float sums[kMaxDotN * kRowTile];
        for (std::int64_t begin = 0; begin < p.n; begin += group) {
          dot_tile(weight, first, count, x.get() + begin * padded(p.k), group, scratch, sums);
          for (std::int64_t i = 0; i < std::min(group, p.n - begin); ++i)
            epilogue(begin + i, first, count, sums + i * kRowTile);
        }
      });
}

void linear_by_gemm(const LinearProblem& p, const RowsOfX& rows_of_x, const Epilogue& epilogue) {
  struct State {
    Scratch<float> tile{kGemmTile * kGemmColumns}, sums{kGemmRows * kGemmTile}, scales{kGemmColumns / kBlock + 16};
    Scratch<std::uint8_t> bytes{kGemmColumns / kBlock + 4};
    cpu::Products products;
  };
  const Matrix weight = weight_of(p);
  for (std::int64_t x_first = 0; x_first < p.n; x_first += kGemmRows) {
    const std::int64_t n = std::min(kGemmRows, p.n - x_first);
    const Scratch<float> x = arranged(rows_of_x, x_first, n, 1, p.k);
    cpu::parallel_for(
        tiles(p.rows, kGemmTile), [] { return State(); },
        [&](std::int64_t item, const State& state) {
          const std::int64_t first = item * kGemmTile, count = std::min(kGemmTile, p.rows - first);
          for (std::int64_t begin = 0; begin == 0 || begin < p.k; begin += kGemmColumns) {
            const std::int64_t columns = std::min(kGemmColumns, p.k - begin);
            const auto stride = static_cast<std::int64_t>(simd::padded(unsigned_size(columns)));
            for (std::int64_t r = 0; r < count; ++r) {
              weight.decode_scales(first + r, begin, columns, state.bytes.get(), state.scales.get());
              simd::decode_arranged(weight.row(first + r) + begin / 2, state.scales.get(), unsigned_size(columns),
                                    state.tile.get() + r * stride);
            }
            state.products.nt(n, count, stride, x.get() + begin, padded(p.k), state.tile.get(), stride, begin > 0,
                              state.sums.get(), kGemmTile);
          }
          for (std::int64_t i = 0; i < n; ++i) epilogue(x_first + i, first, count, state.sums.get() + i * kGemmTile);
        });
  }
}

// Up to `most_row_dots` rows of x are multiplied row by row.
void multiply(const LinearProblem& p, const RowsOfX& rows_of_x, std::int64_t most_row_dots) {
  if (p.n == 0 || p.rows == 0) return;
  const Epilogue epilogue{p, p.global.get()};
  if (p.n <= most_row_dots)
    linear_by_row_dots(p, rows_of_x, epilogue);
  else if (p.n < kGemmFrom)
    linear_by_dots(p, rows_of_x, epilogue);
  else
    linear_by_gemm(p, rows_of_x, epilogue);
}

void launch_linear(const LinearProblem& p, Stream) {
  const RowsOfX rows_of_x = [&](std::int64_t i, float* row) {
    with_type(p.x, [&]<class T>(const T* x) { cpu::to_float(x + i * p.x.stride[0], row, unsigned_size(p.k)); });
  };
  multiply(p, rows_of_x, 1);
}

// ---- nvfp4_matmul -------------------------------------------------------------------------------------------------

void launch_matmul(const MatmulProblem& p, Stream) {
  const auto [codes, scales, linear] = as_linear(p, p.n < p.m);
  const Matrix x{codes.as<std::uint8_t>(), codes.stride[0], 0, p.k, scales};
  const RowsOfX rows_of_x = [&](std::int64_t i, float* row) {
    const DotScratch scratch(p.k);
    x.decode_scales(i, 0, p.k, scratch.bytes.get(), scratch.scales.get());
    simd::decode(x.row(i), scratch.scales.get(), 1, unsigned_size(p.k), row);
  };
  multiply(linear, rows_of_x, kMostRowDots);
}

const runtime::Registration gemv{"cpu", launch_gemv};
const runtime::Registration linear{"cpu", launch_linear};
const runtime::Registration matmul{"cpu", launch_matmul};

}  // namespace
}  // namespace hopwell::ops::nvfp4
