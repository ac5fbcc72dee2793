// nvfp4_linear_backward on GPUs, by mma.
//
//     d_x[i, k] = factor · Σ_row d_out[i, row] · code[row, k] · scale[row, k / 16]
//
// Tile      16, 32 or 64 rows of d_x × 256 columns of K a CTA; stages of 64 rows of weights
// Roles     eight warps side by side along K, 32 columns each; all warps copy
// Products  A: d_out, from shared memory. B: weights. Eight rows of 16 bytes of codes are an 8 × 8 matrix of 16-bit
//           elements, which ldmatrix transposes: a lane gets one word with the codes of two neighbouring rows for four
//           neighbouring k. Decoded, the word is the pairs of rows that B of four products needs, without a shuffle and
//           without a copy in shared memory. Product j has the columns 4 g + j, g = 0 to 7
// Scales    a lane converts four scales a stage, two rows at a time; the warp exchanges them by shuffles
// Sums      in registers for a chunk of rows of weights; the sums of the chunks are added in order. If there are few
//           tiles, each chunk has a CTA, and `nvfp4_linear_bwd_add_chunks` adds the same numbers in the same order
// Range     as in nvfp4/kernels/few_columns.hpp
// Budget    shared: 4 stages × (8,192 codes + 1,024 scales + 2,048 a block of 16 rows of d_out); at most 69,632 B
//           registers: 32 a block of 16 rows, half of them for the chunk and half for the total
// Bound     64 rows: the tensor cores (16 products for ~50 other instructions); 16 rows: memory
#pragma once

#include "arch/sm80/async_copy.hpp"
#include "ops/nvfp4/kernels/scaled_weights.hpp"
#include "ops/nvfp4_linear_backward/plan.hpp"
#include "tile/gpu/fragment.hpp"

namespace hopwell::ops::nvfp4_linear_backward::HOPWELL_TARGET {

using arch::bf16, arch::fp16;
using nvfp4::HOPWELL_TARGET::clamp_bytes, nvfp4::HOPWELL_TARGET::ScaledWeights;

// Swizzle: the 16-byte pieces of a 128-byte row are permuted, so that the same piece of eight rows lies in different
// banks.
HOPWELL_DEVICE uint32_t piece_offset(int row, int piece) { return uint32_t(row * 128 + ((piece ^ row % 8) << 4)); }

template <int kBlocks>
struct Stage {
  alignas(128) unsigned char d_out[kBlocks * 16 * 128];        // [row][64 rows of weights], swizzled
  alignas(128) unsigned char codes[Config::kStageRows * 128];  // [row][256 k], swizzled
  alignas(16) unsigned char scales[Config::kStageRows * 16];   // [row][16]
};

template <class T>
struct Params {
  const T* d_out;
  T* d_x;
  float* sums;  // of chunks [chunks][n][K]; null: a CTA has all chunks of its tile
  int64_t d_out_stride, d_x_stride;
  tile::Fp4Matrix weight;
  Global global;
  int n, rows, k;
  int row_tiles, column_tiles, chunk, chunks;
  bool d_out_aligned, codes_aligned, scales_aligned, d_x_aligned;
};

// Copies `bytes` bytes and fills up to kBytes with zeros. The thread copies byte by byte if the rows are not aligned.
template <int kBytes>
HOPWELL_DEVICE void copy(unsigned char* to, const void* from, int bytes, bool aligned) {
  if (aligned) return arch::cp_async<kBytes>(arch::shared_address(to), from, bytes);
  for (int i = 0; i < kBytes; ++i) to[i] = i < bytes ? static_cast<const unsigned char*>(from)[i] : 0;
}

// The work of a CTA: its first row of d_x, its first column of K, and its chunks.
struct Tile {
  int first_row, first_k, first_chunk, chunks;
};

template <int kBlocks, class T>
HOPWELL_DEVICE Tile tile_of(const Params<T>& p) {
  const int index = arch::block_index(), tile = index / p.row_tiles;
  const int chunk = tile / p.column_tiles;
  return {index % p.row_tiles * kBlocks * 16, tile % p.column_tiles * Config::kColumns, chunk, p.sums ? 1 : p.chunks};
}

// Starts the copies of a stage: rows of weights from `row` on, their scales, and the same columns of d_out.
template <int kBlocks, class T>
HOPWELL_DEVICE void copy_stage(const Params<T>& p, const Tile& tile, int row, Stage<kBlocks>& stage) {
  constexpr int kPieces = 8;  // of a row
  const int thread = arch::thread_index();
  HOPWELL_UNROLL
  for (int i = thread; i < Config::kStageRows * kPieces; i += Config::kThreads) {
    const int of_stage = i / kPieces, piece = i % kPieces, k = tile.first_k / 2 + 16 * piece;
    const int bytes = row + of_stage < p.rows ? clamp_bytes(p.k / 2 - k, 16) : 0;
    copy<16>(stage.codes + piece_offset(of_stage, piece), p.weight.row(row + of_stage, 0) + k, bytes, p.codes_aligned);
  }
  const int of_stage = thread / 4, block = tile.first_k / tile::kCodesPerBlock + thread % 4 * 4;
  const int scales = row + of_stage < p.rows ? clamp_bytes(p.k / tile::kCodesPerBlock - block, 4) : 0;
  copy<4>(stage.scales + of_stage * 16 + thread % 4 * 4,
          p.weight.scales.data + p.weight.scales.offset(row + of_stage, block), scales, p.scales_aligned);
  HOPWELL_UNROLL
  for (int i = thread; i < kBlocks * 16 * kPieces; i += Config::kThreads) {
    const int of_tile = i / kPieces, piece = i % kPieces, column = row + 8 * piece;
    const int bytes = tile.first_row + of_tile < p.n ? clamp_bytes(2 * (p.rows - column), 16) : 0;
    copy<16>(stage.d_out + piece_offset(of_tile, piece), p.d_out + (tile.first_row + of_tile) * p.d_out_stride + column,
             bytes, p.d_out_aligned);
  }
}

// Adds a stage's products to the sums of the warp's columns. sums[block][j]: mma's accumulators of 16 rows, from 16 ·
// block on, and columns 4 g + j.
template <class T, int kBlocks>
HOPWELL_DEVICE void multiply_stage(const Stage<kBlocks>& stage, int warp, float (&sums)[kBlocks][4][4]) {
  const int lane = arch::lane_index(), g = tile::fragment_row(), t = tile::quad_lane();
  HOPWELL_UNROLL
  for (int half = 0; half < 2; ++half) {  // 32 rows of weights
    const unsigned char* const scale = stage.scales + (32 * half + lane / 2 * 2) * 16 + 2 * warp + lane % 2;
    const ScaledWeights<T> pair(uint16_t(scale[0] | scale[16] << 8));  // of rows 2 i and 2 i + 1, lane 2 i + block
    uint32_t words[4];
    const int row = 32 * half + lane;
    arch::ldmatrix<arch::Transpose::yes>(words, arch::shared_address(stage.codes) + piece_offset(row, warp));
    HOPWELL_UNROLL
    for (int step = 0; step < 2; ++step) {  // 16 rows
      uint32_t b[2][4];
      HOPWELL_UNROLL
      for (int i = 0; i < 2; ++i) {
        const uint32_t factors = arch::shuffle(pair.scales, 8 * (2 * step + i) + 2 * t + g / 4);
        ScaledWeights<T>::decode_by(factors, words[2 * step + i], b[i]);
      }
      HOPWELL_UNROLL
      for (int block = 0; block < kBlocks; ++block) {
        uint32_t a[4];
        const int piece = 4 * half + 2 * step + lane / 16;
        arch::ldmatrix(a, arch::shared_address(stage.d_out) + piece_offset(16 * block + lane % 16, piece));
        HOPWELL_UNROLL
        for (int j = 0; j < 4; ++j) ScaledWeights<T>::multiply(sums[block][j], a, {b[0][j], b[1][j]});
      }
    }
  }
}

struct alignas(16) FourFloats {
  float f[4];
};
template <class T>
struct alignas(16) EightResults {
  T x[8];
};

template <class T>
HOPWELL_DEVICE T result(double factor, float sum) {
  T value;
  tile::from_fp32(float(factor * double(sum)), &value);
  return value;
}

// Stores 8 consecutive elements of d_x, or their sums of a chunk.
template <class T>
HOPWELL_DEVICE void store(const Params<T>& p, int chunk, int row, int k, double factor, const float (&sums)[8]) {
  if (p.sums) {
    auto* const to = reinterpret_cast<FourFloats*>(p.sums + (int64_t{chunk} * p.n + row) * p.k + k);
    to[0] = {{sums[0], sums[1], sums[2], sums[3]}};
    to[1] = {{sums[4], sums[5], sums[6], sums[7]}};
    return;
  }
  T* const to = p.d_x + row * p.d_x_stride + k;
  EightResults<T> results;
  HOPWELL_UNROLL
  for (int i = 0; i < 8; ++i) results.x[i] = result<T>(factor, sums[i]);
  if (p.d_x_aligned) {
    *reinterpret_cast<EightResults<T>*>(to) = results;
    return;
  }
  HOPWELL_UNROLL
  for (int i = 0; i < 8; ++i) to[i] = results.x[i];
}

template <int kBlocks, class T>
__global__ void __launch_bounds__(Config::kThreads, kBlocks == 4 ? 1 : 2)
    nvfp4_linear_bwd_kernel(const __grid_constant__ Params<T> p) {
  constexpr int kStages = Config::kStages, kStageRows = Config::kStageRows;
  auto& stages = arch::dynamic_smem<Stage<kBlocks>[kStages]>();
  const Tile tile = tile_of<kBlocks>(p);
  const int warp = arch::warp_index(), g = tile::fragment_row(), t = tile::quad_lane();
  const int begin = tile.first_chunk * p.chunk, left = p.rows - begin;
  const int rows = left < tile.chunks * p.chunk ? left : tile.chunks * p.chunk;
  const int count = (rows + kStageRows - 1) / kStageRows, of_chunk = p.chunk / kStageRows;
  tile::launch_dependents();
  tile::wait_for_prior_kernels();
  const Global global = p.global.loaded();
  const auto copy_next = [&](int i) {
    if (i < count) copy_stage(p, tile, begin + i * kStageRows, stages[i % kStages]);
    arch::cp_async_commit();
  };
  for (int i = 0; i < kStages - 1; ++i) copy_next(i);
  float sums[kBlocks][4][4] = {}, totals[kBlocks][4][4] = {};
  HOPWELL_NO_UNROLL
  for (int i = 0; i < count; ++i) {
    arch::cp_async_wait<kStages - 2>();
    arch::syncthreads();
    copy_next(i + kStages - 1);
    multiply_stage<T>(stages[i % kStages], warp, sums);
    if ((i + 1) % of_chunk != 0 && i + 1 < count) continue;
    HOPWELL_UNROLL
    for (int s = 0; s < kBlocks * 16; ++s) {
      totals[s / 16][s / 4 % 4][s % 4] += sums[s / 16][s / 4 % 4][s % 4];
      sums[s / 16][s / 4 % 4][s % 4] = 0;
    }
  }
  const int k = tile.first_k + 32 * warp + 8 * t;
  if (k >= p.k) return;
  const double factor = global.get() * ScaledWeights<T>::kUnit;
  HOPWELL_UNROLL
  for (int i = 0; i < 2 * kBlocks; ++i) {
    const int row = tile.first_row + 8 * i + g;
    if (row >= p.n) continue;
    float eight[8];
    HOPWELL_UNROLL
    for (int j = 0; j < 8; ++j) eight[j] = totals[i / 2][j % 4][i % 2 * 2 + j / 4];
    store(p, tile.first_chunk, row, k, factor, eight);
  }
}

// Computes d_x from the sums of the chunks. A thread has 8 consecutive elements.
template <class T>
__global__ void __launch_bounds__(Config::kSumThreads)
    nvfp4_linear_bwd_add_chunks(const __grid_constant__ Params<T> p) {
  tile::launch_dependents();
  tile::wait_for_prior_kernels();
  const int64_t at = 8 * (int64_t{arch::block_index()} * Config::kSumThreads + arch::thread_index());
  const int64_t size = int64_t{p.n} * p.k;
  if (at >= size) return;
  float totals[8] = {};
  for (int chunk = 0; chunk < p.chunks; ++chunk) {
    const auto* const from = reinterpret_cast<const FourFloats*>(p.sums + chunk * size + at);
    HOPWELL_UNROLL
    for (int i = 0; i < 8; ++i) totals[i] += from[i / 4].f[i % 4];
  }
  Params<T> to = p;
  to.sums = nullptr;
  store(to, 0, int(at / p.k), int(at % p.k), p.global.get() * ScaledWeights<T>::kUnit, totals);
}

}  // namespace hopwell::ops::nvfp4_linear_backward::HOPWELL_TARGET
