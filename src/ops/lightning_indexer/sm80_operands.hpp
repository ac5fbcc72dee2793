// lightning_indexer on GPUs: rows of bf16 or fp32 as operands of mma.
//
// An operand is bf16 in `limbs`: bf16 itself is one, fp32 is three, each what the ones before have left, which is all 24
// digits; of its gradients' sums two limbs are enough, 16 digits. A product is that of the limbs but the smallest ones.
//
// A chunk is 32 columns, 8 of them for each lane of a quad, 16 bytes. mma may sum over columns in any order that both
// operands agree on, so step 2 c has the first four of each lane's eight, step 2 c + 1 the others, and one 16-byte load
// serves two steps.
#pragma once

#include <cmath>

#include "arch/sm80/async_copy.hpp"
#include "arch/sm80/convert.hpp"
#include "arch/sm80/matrix.hpp"
#include "arch/sm80/memory.hpp"
#include "arch/sm80/reduce.hpp"
#include "ops/lightning_indexer/op.hpp"
#include "tile/gpu/numbers.hpp"
#include "tile/gpu/warp.hpp"

namespace hopwell::ops::lightning_indexer {
namespace {

using arch::bf16;
using tile::kLn2, tile::kLog2E;
using tile::to_fp32;

constexpr int kColumns = 128, kChunks = kColumns / 32;  // of d_index, at most
constexpr int kHeads = 64;                              // rows of q in shared memory

template <class T>
constexpr int kLimbs = sizeof(T) == 2 ? 1 : 3;

HOPWELL_DEVICE float load_weight(const void* data, bool is_bf16, int64_t at) {
  return is_bf16 ? arch::to_float(static_cast<const bf16*>(data)[at]) : static_cast<const float*>(data)[at];
}

// relu; a NaN stays.
HOPWELL_DEVICE float relu(float x) { return x < 0 ? 0 : x; }

// ---- eight columns of a row ----------------------------------------------------------------------------------------

template <int kTheLimbs>
struct Piece {
  arch::Words4 limb[kTheLimbs];
};

// Takes the leading eight digits from a number: bits of bf16, in the upper half.
HOPWELL_DEVICE uint32_t take_limb(float& x) {
  const uint32_t bits = arch::bit_cast<uint32_t>(x) & 0xffff0000U;
  x -= arch::bit_cast<float>(bits);
  return bits;
}
// Finite numbers in limbs.
template <int kTheLimbs>
HOPWELL_DEVICE Piece<kTheLimbs> split(const float (&x)[8]) {
  Piece<kTheLimbs> piece;
  HOPWELL_UNROLL
  for (int i = 0; i < 4; ++i) {
    float low = x[2 * i], high = x[2 * i + 1];
    HOPWELL_UNROLL
    for (int limb = 0; limb < kTheLimbs - 1; ++limb) piece.limb[limb].w[i] = take_limb(low) >> 16 | take_limb(high);
    piece.limb[kTheLimbs - 1].w[i] = arch::pack_bf16(low, high);
  }
  return piece;
}
// Any numbers: infinities and NaN go to the first limb.
template <int kTheLimbs>
HOPWELL_DEVICE Piece<kTheLimbs> split_any(const float (&x)[8]) {
  float finite[8];
  uint32_t special[8];
  HOPWELL_UNROLL
  for (int i = 0; i < 8; ++i) {
    const bool is_finite = fabsf(x[i]) < INFINITY;
    finite[i] = is_finite ? x[i] : 0;
    special[i] = is_finite ? 0 : x[i] != x[i] ? 0x7fc0 : arch::bit_cast<uint32_t>(x[i]) >> 16;
  }
  Piece<kTheLimbs> piece = split<kTheLimbs>(finite);
  HOPWELL_UNROLL
  for (int i = 0; i < 8; ++i) piece.limb[0].w[i / 2] |= special[i] << 16 * (i % 2);
  return piece;
}

// What a piece means.
template <int kTheLimbs>
HOPWELL_DEVICE void join(const Piece<kTheLimbs>& piece, float (&x)[8]) {
  HOPWELL_UNROLL
  for (int i = 0; i < 8; ++i) {
    x[i] = 0;
    HOPWELL_UNROLL
    for (const arch::Words4& limb : piece.limb)
      x[i] += arch::bit_cast<float>(i % 2 ? limb.w[i / 2] & 0xffff0000U : limb.w[i / 2] << 16);
  }
}

// A matrix in global memory, or rows of one.
template <class T>
struct Rows {
  const T* data;
  int64_t stride;  // elements
  int columns;
  bool in_pieces;  // every row is whole pieces of 16 bytes

  // Columns `column` to `column` + 7 of a row, zeros past the last one.
  HOPWELL_DEVICE Piece<kLimbs<T>> piece(const T* row, int column) const {
    Piece<kLimbs<T>> piece{};
    if (column >= columns) return piece;
    if constexpr (sizeof(T) == 2) {
      if (in_pieces) return {{*reinterpret_cast<const arch::Words4*>(row + column)}};
      HOPWELL_UNROLL
      for (int i = 0; i < 8; ++i)
        if (column + i < columns) piece.limb[0].w[i / 2] |= uint32_t{row[column + i].bits} << 16 * (i % 2);
      return piece;
    } else {
      float x[8];
      HOPWELL_UNROLL
      for (int i = 0; i < 8; ++i) x[i] = column + i < columns ? row[column + i] : 0;
      return split_any<kLimbs<T>>(x);
    }
  }
};

template <class T>
Rows<T> rows_of(const View& view, std::size_t dims) {
  const auto width = static_cast<std::int64_t>(sizeof(T));
  bool aligned = reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0 && view.shape[dims] % 8 == 0;
  for (std::size_t i = 0; i < dims; ++i) aligned &= view.shape[i] <= 1 || view.stride[i] * width % 16 == 0;
  return {view.as<const T>(), view.stride[dims - 1], static_cast<int>(view.shape[dims]), aligned};
}

// ---- in shared memory ----------------------------------------------------------------------------------------------

// Where a piece of a row of 128 columns lies, bytes: eight neighbouring rows have a column's in different banks, and so
// have two neighbours those of a quad.
HOPWELL_DEVICE uint32_t piece_at(uint32_t row, uint32_t piece) {
  return row * 256 + ((piece ^ (row % 2 * 4) ^ (row / 2 % 4)) << 4);
}

template <int kTheLimbs, int kRows>
struct Tile {
  static constexpr uint32_t kLimbBytes = kRows * 256;
  alignas(128) unsigned char limbs[kTheLimbs][kLimbBytes];

  HOPWELL_DEVICE uint32_t address(int limb) const { return arch::shared_address(limbs[limb]); }
  HOPWELL_DEVICE void store(int row, int number, const Piece<kTheLimbs>& piece) {
    HOPWELL_UNROLL
    for (int limb = 0; limb < kTheLimbs; ++limb)
      arch::store_shared_v4(address(limb) + piece_at(uint32_t(row), uint32_t(number)), piece.limb[limb]);
  }
  HOPWELL_DEVICE Piece<kTheLimbs> load(int row, int number) const {
    Piece<kTheLimbs> piece;
    HOPWELL_UNROLL
    for (int limb = 0; limb < kTheLimbs; ++limb)
      piece.limb[limb] = arch::load_shared_v4(address(limb) + piece_at(uint32_t(row), uint32_t(number)));
    return piece;
  }
};

// ---- products ------------------------------------------------------------------------------------------------------

// This lane's pieces of the rows g and g + 8 of 16 that a warp has: mma's A.
template <int kTheLimbs>
struct Operand {
  Piece<kTheLimbs> piece[kChunks][2];
};

// d += 16 rows · 8 rows of the tile, for each of kTiles times 16 rows and kBlocks times 8 from `first` on, a multiple of 8.
// kWhole: there are kChunks chunks.
template <bool kWhole, int kTheLimbs, int kTiles, int kBlocks, int kRows>
HOPWELL_DEVICE void multiply(float (&d)[kBlocks][kTiles][4], const Operand<kTheLimbs> (&a)[kTiles],
                             const Tile<kTheLimbs, kRows>& tile, int first, int chunks) {
  const uint32_t g = uint32_t(arch::lane_index()) / 4, t = uint32_t(arch::lane_index()) % 4;
  HOPWELL_UNROLL
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    if (!kWhole && chunk >= chunks) break;
    Piece<kTheLimbs> b[kBlocks];
    HOPWELL_UNROLL
    for (int i = 0; i < kBlocks * kTheLimbs; ++i)
      b[i / kTheLimbs].limb[i % kTheLimbs] =
          arch::load_shared_v4(tile.address(i % kTheLimbs) + uint32_t(first + i / kTheLimbs * 8) * 256 +
                               piece_at(g, uint32_t(4 * chunk) + t));
    HOPWELL_UNROLL
    for (int step = 0; step < 2; ++step) {
      HOPWELL_UNROLL
      for (int of_a = 0; of_a < kTheLimbs; ++of_a) {
        HOPWELL_UNROLL
        for (int of_b = 0; of_b < kTheLimbs - of_a; ++of_b) {
          HOPWELL_UNROLL
          for (int i = 0; i < kBlocks * kTiles; ++i) {
            const int block = i / kTiles, of_tile = i % kTiles;
            const uint32_t *words = b[block].limb[of_b].w + 2 * step,
                           *low = a[of_tile].piece[chunk][0].limb[of_a].w + 2 * step,
                           *high = a[of_tile].piece[chunk][1].limb[of_a].w + 2 * step;
            const uint32_t left[4] = {low[0], high[0], low[1], high[1]}, right[2] = {words[0], words[1]};
            arch::mma_m16n8k16_bf16(d[block][of_tile], left, right);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace hopwell::ops::lightning_indexer
