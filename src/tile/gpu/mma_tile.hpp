// Rows of up to 128 columns of bf16 or fp32 as operands of mma.sync, in limbs. A product is that of the limbs but the
// smallest ones: six products of bf16 for one of fp32.
//
// A column block is 32 columns, 8 of them for each lane of a quad, 16 bytes. mma may sum over columns in any order that both
// operands agree on, so step 2 b takes the first four of each lane's eight, step 2 b + 1 the others, and one 16-byte load
// serves two steps.
#pragma once

#include "arch/sm80/matrix.hpp"
#include "arch/sm80/threads.hpp"
#include "tile/gpu/limbs.hpp"

namespace hopwell::tile {

inline constexpr int kBlockColumns = 32, kColumnBlocks = 128 / kBlockColumns;  // of a row, at most

/// Where a chunk of a row lies in a tile, in bytes: eight neighbouring rows have a column's in different banks, and so
/// have two neighbours those of a quad.
HOPWELL_DEVICE uint32_t chunk_offset(uint32_t row, uint32_t chunk) {
  return row * 256 + ((chunk ^ (row % 2 * 4) ^ (row / 2 % 4)) << 4);
}

/// Rows in shared memory: B of mma.
template <int kTheLimbs, int kRows>
struct MmaTile {
  static constexpr uint32_t kLimbBytes = kRows * 256;
  alignas(128) unsigned char limbs[kTheLimbs][kLimbBytes];

  HOPWELL_DEVICE uint32_t address(int limb) const { return arch::shared_address(limbs[limb]); }
  HOPWELL_DEVICE void store(int row, int number, const Chunk<kTheLimbs>& chunk) {
    HOPWELL_UNROLL
    for (int limb = 0; limb < kTheLimbs; ++limb)
      arch::store_shared_v4(address(limb) + chunk_offset(uint32_t(row), uint32_t(number)), chunk.limb[limb]);
  }
  HOPWELL_DEVICE Chunk<kTheLimbs> load(int row, int number) const {
    Chunk<kTheLimbs> chunk;
    HOPWELL_UNROLL
    for (int limb = 0; limb < kTheLimbs; ++limb)
      chunk.limb[limb] = arch::load_shared_v4(address(limb) + chunk_offset(uint32_t(row), uint32_t(number)));
    return chunk;
  }
};

/// This lane's chunks of the rows g and g + 8 of 16 that a warp has, by column blocks: A of mma.
template <int kTheLimbs>
struct MmaRows {
  Chunk<kTheLimbs> chunk[kColumnBlocks][2];
};

/// d += 16 rows · 8 rows of the tile, for each of kM times 16 rows and kN times 8 from `first` on, a multiple of 8.
/// kWhole: there are kColumnBlocks column blocks.
template <bool kWhole, int kTheLimbs, int kM, int kN, int kRows>
HOPWELL_DEVICE void multiply(float (&d)[kN][kM][4], const MmaRows<kTheLimbs> (&a)[kM],
                             const MmaTile<kTheLimbs, kRows>& tile, int first, int column_blocks) {
  const uint32_t g = uint32_t(arch::lane_index()) / 4, t = uint32_t(arch::lane_index()) % 4;
  HOPWELL_UNROLL
  for (int block = 0; block < kColumnBlocks; ++block) {
    if (!kWhole && block >= column_blocks) break;
    Chunk<kTheLimbs> b[kN];
    HOPWELL_UNROLL
    for (int i = 0; i < kN * kTheLimbs; ++i)
      b[i / kTheLimbs].limb[i % kTheLimbs] =
          arch::load_shared_v4(tile.address(i % kTheLimbs) + uint32_t(first + i / kTheLimbs * 8) * 256 +
                               chunk_offset(g, uint32_t(4 * block) + t));
    HOPWELL_UNROLL
    for (int step = 0; step < 2; ++step) {
      HOPWELL_UNROLL
      for (int of_a = 0; of_a < kTheLimbs; ++of_a) {
        HOPWELL_UNROLL
        for (int of_b = 0; of_b < kTheLimbs - of_a; ++of_b) {
          HOPWELL_UNROLL
          for (int i = 0; i < kN * kM; ++i) {
            const int n = i / kM, m = i % kM;
            const uint32_t *words = b[n].limb[of_b].w + 2 * step, *low = a[m].chunk[block][0].limb[of_a].w + 2 * step,
                           *high = a[m].chunk[block][1].limb[of_a].w + 2 * step;
            const uint32_t left[4] = {low[0], high[0], low[1], high[1]}, right[2] = {words[0], words[1]};
            arch::mma_m16n8k16_bf16(d[n][m], left, right);
          }
        }
      }
    }
  }
}

}  // namespace hopwell::tile
