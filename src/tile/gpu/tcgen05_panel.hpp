// Panels (panel.hpp) as operands of tcgen05 in shared memory: descriptors, and tiles of 64 selected rows gathered by
// the copy engine, four rows per instruction.
#pragma once

#include "arch/sm100/tcgen05.hpp"
#include "arch/sm100/tma.hpp"
#include "tile/gpu/entries.hpp"
#include "tile/gpu/panel.hpp"
#include "tile/gpu/tensor_map.hpp"

namespace hopwell::tile {

/// As in panel.hpp. MN-major: panels of kRows rows side by side.
inline constexpr uint64_t kTcgen05RowsAlongK = arch::tcgen05_descriptor({arch::Swizzle::bytes128, 16, 1024}),
                          kTcgen05NarrowRowsAlongK = arch::tcgen05_descriptor({arch::Swizzle::bytes64, 16, 512});
template <int kRows>
inline constexpr uint64_t kTcgen05RowsAcrossK = arch::tcgen05_descriptor({arch::Swizzle::bytes128, kRows * 128, 1024});
template <int kRows>
inline constexpr uint64_t kTcgen05NarrowRowsAcrossK =
    arch::tcgen05_descriptor({arch::Swizzle::bytes64, kRows * 64, 512});

/// A gather copies four rows, so this many lanes of a warp gather a tile.
inline constexpr int kGatherLanes = kTileRows / 4;

/// The four rows that a lane gathers for the tile at entry `first`: 4 lane to 4 lane + 3. -1 for invalid entries; the
/// copy engine fills zeros.
HOPWELL_DEVICE void load_gathered_keys(int (&keys)[4], const Entries& entries, int first, int lane) {
  HOPWELL_UNROLL
  for (int i = 0; i < 4; ++i) keys[i] = entries.key(first + 4 * lane + i);
}

#if HOPWELL_HAS_SM100A

/// Starts the copies of kPanels panels of a tile, from `column` on, to a stage of a ring; executed by a warp. One lane
/// waits for the stage on behalf of all copies. If each lane waited itself, one could fall behind by two phases of the
/// barrier and wait for ever.
template <int kPanels, class Slot>
HOPWELL_DEVICE void gather_tile(const Slot& slot, const void* stage, const arch::TensorMap& map, const int (&keys)[4],
                                int column = 0) {
  const int lane = arch::lane_index();
  const uint32_t to = arch::shared_address(stage) + uint32_t(lane) * (kPanelBytes / kGatherLanes);
  if (lane == 0) {
    slot.wait_empty();
    arch::mbarrier_arrive_expect_tx(slot.full(), kPanels * kPanelBytes);
  }
  arch::syncwarp();
  for (int panel = 0; panel < kPanels && lane < kGatherLanes; ++panel)
    arch::tma_gather4<1>(to + uint32_t(panel) * kPanelBytes, map, column + kPanelColumns * panel, keys,
                         arch::shared_address(&slot.full()));
}

#endif

// `static` in each kernel file: see make_tensor_map.
namespace {

/// Tensor map of the rows of a bf16 matrix for gathers of `columns` columns. For a matrix without rows it maps the rows
/// of `other`: then no entry is valid, and only zeros are gathered.
[[maybe_unused]] arch::TensorMap map_of_rows(const View& rows, const View& other, std::uint32_t columns,
                                             arch::Swizzle swizzle) {
  View lent = rows;
  if (rows.shape[0] == 0) lent.data = other.data, lent.shape[0] = 1;
  return map_of(lent, {{1, columns}, {0, 1}}, swizzle);
}

}  // namespace
}  // namespace hopwell::tile
