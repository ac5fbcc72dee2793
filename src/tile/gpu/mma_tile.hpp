// Rows of up to 128 columns of bf16 or fp32 as operands of mma.sync, as a bf16 split (bf16_split.hpp). A product
// multiplies all pairs of terms but the smallest: six bf16 products for one fp32 product.
//
// A column block is 32 columns: each lane of a quad holds 8 of them, 16 bytes. mma may sum over columns in any order
// that both operands agree on. So step 2 b uses the first four of each lane's eight columns, step 2 b + 1 the others,
// and one 16-byte load serves two steps.
#pragma once

#include "arch/sm80/matrix.hpp"
#include "tile/gpu/bf16_split.hpp"
#include "tile/gpu/fragment.hpp"

namespace hopwell::tile {

inline constexpr int kBlockColumns = 32, kColumnBlocks = 128 / kBlockColumns;  // maximum per row

/// Byte offset of a chunk of a row in a tile. Eight adjacent rows have the same column in different banks, and two
/// adjacent rows have a quad's columns in different banks.
HOPWELL_DEVICE uint32_t chunk_offset(uint32_t row, uint32_t chunk) {
  return row * 256 + ((chunk ^ (row % 2 * 4) ^ (row / 2 % 4)) << 4);
}

/// Rows in shared memory: operand B of mma.
template <int kTheTerms, int kRows>
struct MmaTile {
  static constexpr uint32_t kTermBytes = kRows * 256;
  alignas(128) unsigned char split_terms[kTheTerms][kTermBytes];

  HOPWELL_DEVICE uint32_t address(int split_term) const { return arch::shared_address(split_terms[split_term]); }
  HOPWELL_DEVICE void store(int row, int number, const Chunk<kTheTerms>& chunk) {
    HOPWELL_UNROLL
    for (int split_term = 0; split_term < kTheTerms; ++split_term)
      arch::store_shared_v4(address(split_term) + chunk_offset(uint32_t(row), uint32_t(number)),
                            chunk.split_term[split_term]);
  }
  HOPWELL_DEVICE Chunk<kTheTerms> load(int row, int number) const {
    Chunk<kTheTerms> chunk;
    HOPWELL_UNROLL
    for (int split_term = 0; split_term < kTheTerms; ++split_term)
      chunk.split_term[split_term] =
          arch::load_shared_v4(address(split_term) + chunk_offset(uint32_t(row), uint32_t(number)));
    return chunk;
  }
};

/// This lane's chunks of rows g and g + 8 of a warp's 16 rows, by column blocks: operand A of mma.
template <int kTheTerms>
struct MmaRows {
  Chunk<kTheTerms> chunk[kColumnBlocks][2];
};

/// d += (16 kM rows) · (8 kN rows of the tile, from row `first` on, a multiple of 8). kWhole: there are kColumnBlocks
/// column blocks.
template <bool kWhole, int kTheTerms, int kM, int kN, int kRows>
HOPWELL_DEVICE void multiply(float (&d)[kN][kM][4], const MmaRows<kTheTerms> (&a)[kM],
                             const MmaTile<kTheTerms, kRows>& tile, int first, int column_blocks) {
  const auto lane = uint32_t(arch::lane_index()), g = fragment_row(lane), t = quad_lane(lane);
  HOPWELL_UNROLL
  for (int block = 0; block < kColumnBlocks; ++block) {
    if (!kWhole && block >= column_blocks) break;
    Chunk<kTheTerms> b[kN];
    HOPWELL_UNROLL
    for (int i = 0; i < kN * kTheTerms; ++i)
      b[i / kTheTerms].split_term[i % kTheTerms] =
          arch::load_shared_v4(tile.address(i % kTheTerms) + uint32_t(first + i / kTheTerms * 8) * 256 +
                               chunk_offset(g, uint32_t(4 * block) + t));
    HOPWELL_UNROLL
    for (int step = 0; step < 2; ++step) {
      HOPWELL_UNROLL
      for (int of_a = 0; of_a < kTheTerms; ++of_a) {
        HOPWELL_UNROLL
        for (int of_b = 0; of_b < kTheTerms - of_a; ++of_b) {
          HOPWELL_UNROLL
          for (int i = 0; i < kN * kM; ++i) {
            const int n = i / kM, m = i % kM;
            const uint32_t *words = b[n].split_term[of_b].w + 2 * step,
                           *low = a[m].chunk[block][0].split_term[of_a].w + 2 * step,
                           *high = a[m].chunk[block][1].split_term[of_a].w + 2 * step;
            const uint32_t left[4] = {low[0], high[0], low[1], high[1]}, right[2] = {words[0], words[1]};
            arch::mma_m16n8k16_bf16(d[n][m], left, right);
          }
        }
      }
    }
  }
}

}  // namespace hopwell::tile
