// nvfp4_linear and nvfp4_gemv for problems that the fast kernels do not support: any K that is a multiple of 16, rows
// at any address, fp32 x. Products are fp32.
//
//     y[row, column] = factor · Σ_k code · scale · x[column, k] + bias[row]
//
// Tile      a row of weights × 8 columns of x, for `lanes_per_row` lanes: the smallest power of two that has a lane for
//           every block of K, 32 at most
// Roles     all threads are alike: lane l multiplies blocks l, l + lanes_per_row, …, and shuffles add the lanes' sums
// Budget    no shared memory; a thread holds 16 weights, 16 elements of x and 8 sums
// Bound     issue: about 3 instructions a weight and column
#pragma once

#include "ops/nvfp4/kernels/operands.hpp"

namespace hopwell::ops::nvfp4::HOPWELL_TARGET {

// x as rows of floats.
template <class T>
struct FloatRows {
  const T* x;
  int64_t stride;

  HOPWELL_DEVICE void block(int64_t column, int64_t block, int64_t, float (&values)[kCodesPerBlock]) const {
    const T* from = x + column * stride + block * kCodesPerBlock;
    HOPWELL_UNROLL
    for (int i = 0; i < kCodesPerBlock; ++i) values[i] = to_fp32(from[i]);
  }
};

HOPWELL_DEVICE void decode_block(const Fp4Matrix& matrix, int64_t row, int64_t block, int64_t batch,
                                 float (&values)[kCodesPerBlock]) {
  uint32_t words[2];
  HOPWELL_UNROLL
  for (int i = 0; i < 2; ++i)
    words[i] = tile::load_e2m1x8(matrix.row(row, batch) + block * (kCodesPerBlock / 2) + 4 * i);
  const float scale = matrix.scale(row, block, batch);
  HOPWELL_UNROLL
  for (int i = 0; i < kCodesPerBlock; ++i) values[i] = tile::e2m1_to_float(words[i / 8] >> 4 * (i % 8)) * scale;
}

// x as row 0 of a matrix of codes.
struct CodeRow {
  Fp4Matrix matrix;

  HOPWELL_DEVICE void block(int64_t, int64_t block, int64_t batch, float (&values)[kCodesPerBlock]) const {
    decode_block(matrix, 0, block, batch, values);
  }
};

template <class X, class T>
struct GeneralParams {
  Fp4Matrix weight;
  X x;
  Result<T> result;
  Global factor;
  int64_t rows, blocks;  // blocks of K
  int columns;
  int lanes_per_row;  // a power of two
};

template <class X, class T>
__global__ void __launch_bounds__(GeneralConfig::kThreads)
    nvfp4_linear_general(const __grid_constant__ GeneralParams<X, T> p) {
  tile::launch_dependents();
  tile::wait_for_prior_kernels();
  const arch::BlockIndex cta = arch::block_index_3d();
  const int64_t row =
      int64_t{cta.x} * (GeneralConfig::kThreads / p.lanes_per_row) + arch::thread_index() / p.lanes_per_row;
  const int lane = arch::thread_index() % p.lanes_per_row, first_column = cta.y * GeneralConfig::kColumns;
  const bool exists = row < p.rows;
  float sums[GeneralConfig::kColumns] = {};
  for (int64_t block = lane; exists && block < p.blocks; block += p.lanes_per_row) {
    float weights[kCodesPerBlock], values[kCodesPerBlock];
    decode_block(p.weight, row, block, cta.z, weights);
    HOPWELL_UNROLL
    for (int c = 0; c < GeneralConfig::kColumns; ++c) {
      if (first_column + c >= p.columns) break;
      p.x.block(first_column + c, block, cta.z, values);
      HOPWELL_UNROLL
      for (int i = 0; i < kCodesPerBlock; ++i) sums[c] += weights[i] * values[i];
    }
  }
  HOPWELL_UNROLL
  for (int c = 0; c < GeneralConfig::kColumns; ++c) {
    if (first_column + c >= p.columns) break;
    for (int distance = p.lanes_per_row / 2; distance > 0; distance /= 2)
      sums[c] += arch::shuffle_xor(sums[c], distance);
  }
  if (!exists || lane != 0) return;
  const double factor = p.factor.get();
  HOPWELL_UNROLL
  for (int c = 0; c < GeneralConfig::kColumns; ++c)
    if (first_column + c < p.columns) p.result.store(row, first_column + c, cta.z, factor, sums[c]);
}

}  // namespace hopwell::ops::nvfp4::HOPWELL_TARGET
