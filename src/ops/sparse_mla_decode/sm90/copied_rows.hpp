// The kernels of sparse_mla_decode for Hopper: the dequant warps, where rows are bf16: they copy them to
// panels by cp.async.
//
// A warp copies eight rows. A lane copies one 16-byte chunk of each panel of rows lane / 8 and lane / 8 + 4. Rows past
// the last key of a tile repeat that key. Their scores are masked, so they add 0 times values that the query has
// selected. A tile without keys is zeros.
#pragma once

#include "arch/sm80/async_copy.hpp"
#include "ops/sparse_mla_decode/sm90/key_tiles.hpp"
#include "tile/gpu/gather.hpp"

namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET {

#if HOPWELL_HAS_SM90A

template <class Tile>
HOPWELL_DEVICE void copy_rows(const SplitParams& p, KeyTiles<Tile>& s, KeyPanels<Tile>& panels) {
  constexpr int kRows = 2;  // of a lane
  const int warp = (arch::thread_index() - Tile::kFirstDequantThread) / 32, lane = arch::lane_index(),
            first_row = 8 * warp + lane / 8, chunk = lane % 8;
  for_each_tile(p, s, [&](const auto& slot, int keys) {
    const RowAddresses<Tile>& of_tile = s.rows[slot.stage()];
    const unsigned char *rows[kRows], *second[kRows];
    HOPWELL_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const int row = first_row + 4 * i < keys ? first_row + 4 * i : keys - 1;
      rows[i] = keys > 0 ? of_tile.data[row] + 16 * chunk : p.keys.cache.data;
      second[i] = rows[i] + 2 * kDv;
      if constexpr (Tile::Row::kMayHaveRopeCache)
        if (p.rope_cache.data && keys > 0) second[i] = of_tile.second[row] + 16 * chunk;
    }
    const uint32_t to = arch::shared_address(panels[slot.stage()]) + tile::swizzled(first_row, chunk);
    HOPWELL_UNROLL
    for (int n = 0; n < Tile::kPanels; ++n) {
      const int panel = tile::score_panel<Tile::kDqk>(n);
      HOPWELL_UNROLL
      for (int i = 0; i < kRows; ++i)
        arch::cp_async(tile::four_rows_on(to, uint32_t(i)) + uint32_t(panel) * tile::kPanelBytes,
                       panel == 8 ? second[i] : rows[i] + 128 * panel, keys > 0 ? 16 : 0);
      if (n != Tile::kPanelsOfPart - 1 && n != Tile::kPanels - 1) continue;
      const int part = n < Tile::kPanelsOfPart ? 0 : 1;
      slot.commit(part);
      tile::arrive_after_copies<true>(slot.full(part));
    }
  });
  arch::cp_async_wait_all();
}

#endif

}  // namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET
