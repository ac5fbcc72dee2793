// Panels: the layout of bf16 tiles in shared memory for wgmma. A panel holds 64 columns of all rows of a tile:
// consecutive rows of 128 bytes in the 128-byte swizzle. A tile of 64 n columns has n panels. A narrow panel has 32
// columns, rows of 64 bytes and the 64-byte swizzle.
#pragma once

#include "arch/sm80/convert.hpp"
#include "arch/sm80/matrix.hpp"
#include "arch/sm80/memory.hpp"
#include "arch/sm80/threads.hpp"
#include "arch/sm90/wgmma.hpp"

namespace hopwell::tile {

inline constexpr int kTileRows = 64, kPanelColumns = 64;
inline constexpr uint32_t kPanelBytes = kTileRows * kPanelColumns * 2;

/// Byte offset of 16-byte chunk 0 to 7 of a row in a panel. The panel is 1024-byte aligned.
template <class Integer>
HOPWELL_DEVICE uint32_t swizzled(Integer row, Integer chunk) {
  return uint32_t(row * 128 + ((chunk ^ (row & 7)) << 4));
}
/// Offset of the same chunk 4 · i rows further on, for a chunk in the first four rows.
HOPWELL_DEVICE uint32_t four_rows_on(uint32_t place, uint32_t i) { return (place ^ i % 2 * 64) + i * 512; }
/// Byte offset of chunk 0 to 3 of a row in a narrow panel, which is 512-byte aligned.
template <class Integer>
HOPWELL_DEVICE uint32_t swizzled_narrow(Integer row, Integer chunk) {
  return uint32_t(row * 64 + ((chunk ^ (row >> 1 & 3)) << 4));
}

/// Packs eight adjacent numbers of a row as bf16: a chunk.
HOPWELL_DEVICE arch::Words4 pack_chunk(const float* x) {
  arch::Words4 words;
  HOPWELL_UNROLL
  for (int i = 0; i < 4; ++i) words.w[i] = arch::pack_bf16(x[2 * i], x[2 * i + 1]);
  return words;
}

/// Descriptors of wgmma operands without an address. K-major (here `kRowsAlongK`): rows of panels are rows of the
/// operand and columns are k. MN-major (here `kRowsAcrossK`): rows are k and columns are n or m.
inline constexpr uint64_t kRowsAlongK = arch::wgmma_descriptor({arch::Swizzle::bytes128, 16, 1024});
inline constexpr uint64_t kRowsAcrossK = arch::wgmma_descriptor({arch::Swizzle::bytes128, kPanelBytes, 1024});
inline constexpr uint64_t kNarrowRowsAlongK = arch::wgmma_descriptor({arch::Swizzle::bytes64, 16, 512});
inline constexpr uint64_t kNarrowRowsAcrossK = arch::wgmma_descriptor({arch::Swizzle::bytes64, kPanelBytes / 2, 512});

/// Offset to add to a K-major descriptor so that the operand begins 16 · step columns further on.
HOPWELL_DEVICE uint64_t columns_on(int step) {
  return (uint32_t(step / 4) * kPanelBytes + uint32_t(step % 4) * 32) >> 4;
}

/// Row and column of a tile that a lane addresses for ldmatrix to get A fragments of wgmma or mma: 16 rows for each
/// warp of a warpgroup. Separate from the loads, so that it can be computed while the tile is still in flight.
struct FragmentLane {
  uint32_t lane = uint32_t(arch::lane_index()), row = uint32_t(arch::warp_index() % 4 * 16) + lane % 16;
};
/// Loads a tile's rows as A fragments, 16 columns per step.
template <int kSteps>
HOPWELL_DEVICE void load_fragments(const FragmentLane& at, uint32_t panels, uint32_t (&a)[kSteps][4]) {
  HOPWELL_UNROLL
  for (int step = 0; step < kSteps; ++step)
    arch::ldmatrix(a[step],
                   panels + uint32_t(step / 4) * kPanelBytes + swizzled(at.row, uint32_t(step % 4 * 2) + at.lane / 16));
}

}  // namespace hopwell::tile
