// Panels: how tiles of bf16 lie in shared memory for wgmma. 64 columns of a tile's rows, 128 bytes each, lie one after the
// other in the 128-byte swizzle; a tile is as many panels as it has times 64 columns. A narrow panel has 32 columns, rows of
// 64 bytes and the 64-byte swizzle.
#pragma once

#include "arch/sm80/convert.hpp"
#include "arch/sm80/matrix.hpp"
#include "arch/sm80/memory.hpp"
#include "arch/sm80/threads.hpp"
#include "arch/sm90/wgmma.hpp"

namespace hopwell::tile {

inline constexpr int kTileRows = 64, kPanelColumns = 64;
inline constexpr uint32_t kPanelBytes = kTileRows * kPanelColumns * 2;

/// Where 16-byte chunk 0 to 7 of a row lies in a panel, in bytes. The panel is 1024-byte aligned.
template <class Integer>
HOPWELL_DEVICE uint32_t swizzled(Integer row, Integer chunk) {
  return uint32_t(row * 128 + ((chunk ^ (row & 7)) << 4));
}
/// Where the same chunk 4 · i rows on lies, of one in the first four rows.
HOPWELL_DEVICE uint32_t four_rows_on(uint32_t place, uint32_t i) { return (place ^ i % 2 * 64) + i * 512; }
/// The same of chunk 0 to 3 in a narrow panel, which is 512-byte aligned.
template <class Integer>
HOPWELL_DEVICE uint32_t swizzled_narrow(Integer row, Integer chunk) {
  return uint32_t(row * 64 + ((chunk ^ (row >> 1 & 3)) << 4));
}

/// Eight neighbours of a row as bf16: a chunk.
HOPWELL_DEVICE arch::Words4 pack_chunk(const float* x) {
  arch::Words4 words;
  HOPWELL_UNROLL
  for (int i = 0; i < 4; ++i) words.w[i] = arch::pack_bf16(x[2 * i], x[2 * i + 1]);
  return words;
}

/// Descriptors of wgmma's operands, to be given an address: rows of panels are rows of the operand and columns its k, or
/// rows are its k and columns its n or m.
inline constexpr uint64_t kRowsAlongK = arch::wgmma_descriptor({arch::Swizzle::bytes128, 16, 1024});
inline constexpr uint64_t kRowsAcrossK = arch::wgmma_descriptor({arch::Swizzle::bytes128, kPanelBytes, 1024});
inline constexpr uint64_t kNarrowRowsAlongK = arch::wgmma_descriptor({arch::Swizzle::bytes64, 16, 512});
inline constexpr uint64_t kNarrowRowsAcrossK = arch::wgmma_descriptor({arch::Swizzle::bytes64, kPanelBytes / 2, 512});

/// What to add to a descriptor of kRowsAlongK, so that the operand begins 16 · step columns on.
HOPWELL_DEVICE uint64_t columns_on(int step) {
  return (uint32_t(step / 4) * kPanelBytes + uint32_t(step % 4) * 32) >> 4;
}

/// Which rows and columns of a tile a lane addresses for ldmatrix, so that it gets A fragments of wgmma or mma: 16 rows for
/// each warp of a warpgroup. Apart from the loads, so that it can be found out while the tile is still on its way.
struct FragmentLane {
  uint32_t lane = uint32_t(arch::lane_index()), row = uint32_t(arch::warp_index() % 4 * 16) + lane % 16;
};
/// A tile's rows as A fragments, 16 columns a step.
template <int kSteps>
HOPWELL_DEVICE void load_fragments(const FragmentLane& at, uint32_t panels, uint32_t (&a)[kSteps][4]) {
  HOPWELL_UNROLL
  for (int step = 0; step < kSteps; ++step)
    arch::ldmatrix(a[step],
                   panels + uint32_t(step / 4) * kPanelBytes + swizzled(at.row, uint32_t(step % 4 * 2) + at.lane / 16));
}

}  // namespace hopwell::tile
