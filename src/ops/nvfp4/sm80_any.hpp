// nvfp4_linear and nvfp4_gemv for what the fast kernel leaves: any K that is a multiple of 16, rows at any address,
// fp32 x. Products in fp32, no shared memory.
//
//     y[row, column] = factor · Σ_k code · scale · x[column, k] + bias[row]
//
// Tile      a row of weights × 8 columns of x, for each power of two lanes that has a lane for every block of K (32 at
//           most); lane l takes blocks l, l + lanes, …
// Bound     issue: about 3 instructions a weight and column
#pragma once

#include "ops/nvfp4/sm80_codes.hpp"

namespace hopwell::ops::nvfp4 {
namespace {

struct AnyConfig {
  static constexpr int kThreads = 128, kColumns = 8;
};

// Rows of floats.
template <class T>
struct FloatRows {
  const T* x;
  int64_t stride;

  HOPWELL_DEVICE void block(int64_t column, int64_t block, int64_t, float (&values)[kCodesOfBlock]) const {
    const T* from = x + column * stride + block * kCodesOfBlock;
    HOPWELL_UNROLL
    for (int i = 0; i < kCodesOfBlock; ++i) values[i] = to_fp32(from[i]);
  }
};

HOPWELL_DEVICE void decode_block(const Matrix& matrix, int64_t row, int64_t block, int64_t batch,
                                 float (&values)[kCodesOfBlock]) {
  uint32_t words[2];
  HOPWELL_UNROLL
  for (int i = 0; i < 2; ++i) words[i] = load_word(matrix.at(row, batch) + block * (kCodesOfBlock / 2) + 4 * i);
  const float scale = matrix.scale(row, block, batch);
  HOPWELL_UNROLL
  for (int i = 0; i < kCodesOfBlock; ++i) values[i] = code_value(words[i / 8] >> 4 * (i % 8)) * scale;
}

// Row 0 of a matrix of codes.
struct CodeRow {
  Matrix matrix;

  HOPWELL_DEVICE void block(int64_t, int64_t block, int64_t batch, float (&values)[kCodesOfBlock]) const {
    decode_block(matrix, 0, block, batch, values);
  }
};

template <class Rows, class T>
struct AnyParams {
  Matrix weight;
  Rows x;
  Result<T> result;
  Factor factor;
  int64_t rows, blocks;  // blocks of K
  int columns;
  int lanes;  // of a row, a power of two
};

template <class Rows, class T>
__global__ void __launch_bounds__(AnyConfig::kThreads) any_kernel(const __grid_constant__ AnyParams<Rows, T> p) {
  tile::launch_dependents();
  tile::wait_for_prior_kernels();
  const arch::BlockIndex at = arch::block_index_3d();
  const int64_t row = int64_t{at.x} * (AnyConfig::kThreads / p.lanes) + arch::thread_index() / p.lanes;
  const int lane = arch::thread_index() % p.lanes, first_column = at.y * AnyConfig::kColumns;
  const bool exists = row < p.rows;
  float sums[AnyConfig::kColumns] = {};
  for (int64_t block = lane; exists && block < p.blocks; block += p.lanes) {
    float weights[kCodesOfBlock], values[kCodesOfBlock];
    decode_block(p.weight, row, block, at.z, weights);
    HOPWELL_UNROLL
    for (int c = 0; c < AnyConfig::kColumns; ++c) {
      if (first_column + c >= p.columns) break;
      p.x.block(first_column + c, block, at.z, values);
      HOPWELL_UNROLL
      for (int i = 0; i < kCodesOfBlock; ++i) sums[c] += weights[i] * values[i];
    }
  }
  HOPWELL_UNROLL
  for (int c = 0; c < AnyConfig::kColumns; ++c) {
    if (first_column + c >= p.columns) break;
    for (int distance = p.lanes / 2; distance > 0; distance /= 2) sums[c] += arch::shuffle_xor(sums[c], distance);
  }
  if (!exists || lane != 0) return;
  const double factor = p.factor.get();
  HOPWELL_UNROLL
  for (int c = 0; c < AnyConfig::kColumns; ++c)
    if (first_column + c < p.columns) p.result.store(row, first_column + c, at.z, factor, sums[c]);
}

}  // namespace
}  // namespace hopwell::ops::nvfp4
