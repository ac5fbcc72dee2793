// nvfp4_linear_backward on the CPU: tiles of weights are decoded to fp32, then multiplied. Each element of d_x has a
// sum of its own, so a row of d_x does not depend on the other rows or on the number of threads.
#include <algorithm>

#include "ops/nvfp4_linear_backward/op.hpp"
#include "tile/cpu/nvfp4.hpp"
#include "tile/cpu/parallel.hpp"
#include "tile/cpu/product.hpp"
#include "tile/cpu/vector.hpp"
#include "tile/cpu/views.hpp"
#include "tile/float16.hpp"

namespace hopwell::ops::nvfp4_linear_backward {
namespace {

namespace simd = cpu::nvfp4;
using cpu::Scratch, cpu::unsigned_size, cpu::with_type;

// A tile of decoded weights: 128 columns of K × 640 rows, 320 KiB; rows of d_out that share it.
constexpr std::int64_t kTileColumns = 128, kTileRows = 640, kRowsOfDOut = 256;

std::int64_t tiles(std::int64_t size, std::int64_t tile) { return (size + tile - 1) / tile; }

// Rows [first, first + n) of d_out as floats [n, rows].
Scratch<float> floats_of(const Problem& p, std::int64_t first, std::int64_t n) {
  Scratch<float> floats(n * p.rows);
  with_type(p.d_out, [&]<class T>(const T* d_out) {
    cpu::parallel_for(
        n, (n * p.rows) >> 16, [] { return 0; },
        [&](std::int64_t i, int) {
          cpu::to_float(d_out + (first + i) * p.d_out.stride[0], floats.get() + i * p.rows, unsigned_size(p.rows));
        });
  });
  return floats;
}

struct State {
  Scratch<float> weights{kTileRows * kTileColumns}, sums{kRowsOfDOut * kTileColumns};
  Scratch<float> scales{static_cast<std::int64_t>(simd::scale_room(kTileColumns))};
  Scratch<std::uint8_t> bytes{kTileColumns / hopwell::nvfp4::kBlock + 4};
  cpu::Products products;
};

// sums[i, c] = sum over rows of d_out[i, row] * weight[row, first + c], for i < n and c < columns.
void multiply(const simd::Matrix& weight, std::int64_t rows, const float* d_out, std::int64_t n, std::int64_t first,
              std::int64_t columns, const State& state) {
  std::fill_n(state.sums.get(), n * kTileColumns, 0.0F);
  for (std::int64_t row = 0; row < rows; row += kTileRows) {
    const std::int64_t count = std::min(kTileRows, rows - row);
    for (std::int64_t r = 0; r < count; ++r) {
      weight.decode_scales(row + r, first, columns, state.bytes.get(), state.scales.get());
      simd::decode(weight.row(row + r) + first / 2, state.scales.get(), 1, unsigned_size(columns),
                   state.weights.get() + r * kTileColumns);
    }
    state.products.nn(n, columns, count, d_out + row, rows, state.weights.get(), kTileColumns, true, state.sums.get(),
                      kTileColumns);
  }
}

void launch(const Problem& p, Stream) {
  const simd::Matrix weight{p.weight.as<std::uint8_t>(), p.weight.stride[0], 0, p.k, p.weight_scale};
  const double factor = p.global.get();
  for (std::int64_t i_first = 0; i_first < p.n; i_first += kRowsOfDOut) {
    const std::int64_t n = std::min(kRowsOfDOut, p.n - i_first);
    const Scratch<float> d_out = floats_of(p, i_first, n);
    cpu::parallel_for(
        tiles(p.k, kTileColumns), ((n + 8) * p.rows * p.k) >> 20, [] { return State(); },
        [&](std::int64_t item, const State& state) {
          const std::int64_t first = item * kTileColumns, columns = std::min(kTileColumns, p.k - first);
          multiply(weight, p.rows, d_out.get(), n, first, columns, state);
          with_type(p.d_x, [&]<class T>(T* d_x) {
            for (std::int64_t i = 0; i < n; ++i)
              for (std::int64_t c = 0; c < columns; ++c)
                d_x[(i_first + i) * p.d_x.stride[0] + first + c] = rounded<T>(
                    static_cast<float>(factor * static_cast<double>(state.sums.get()[i * kTileColumns + c])));
          });
        });
  }
}

const runtime::Registration backend{"cpu", launch};

}  // namespace
}  // namespace hopwell::ops::nvfp4_linear_backward
