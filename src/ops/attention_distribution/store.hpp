// attention_distribution on GPUs: sums over heads, from the warps that make them to memory. A ring in shared memory holds
// the sums of each warp's heads for a tile of keys; one warp adds them in a fixed order, writes, and normalises.
#pragma once

#include "ops/attention_distribution/row.hpp"
#include "tile/gpu/ring.hpp"

namespace hopwell::ops::attention_distribution::HOPWELL_TARGET {

inline constexpr int kSumStages = 4;
using SumBarriers = tile::RingBarriers<kSumStages>;
using SumSlot = tile::RingSlot<kSumStages>;

// By one warp. sums[stage][warp]: of the first kWarps warps' heads.
template <int kWarps, int kSumWarps>
HOPWELL_DEVICE void store(const Params& p, const float (&sums_of_stage)[kSumStages][kSumWarps][kTileKeys],
                          SumBarriers& barriers) {
  const int lane = arch::lane_index();
  int key_tile = 0;  // so far
  HOPWELL_NO_UNROLL
  for (int number = arch::block_index(); number < p.plan.work_tiles; number += arch::grid_size()) {
    const WorkTile work = work_tile_of(p.plan, p.selection.topk, number);
    const Entries entries = entries_of(p, work);
    const int tiles = entries.tiles(kTileKeys);
    float* const row = sums_of(p, work, entries);
    float total = 0;
    int low = entries.at(lane), high = entries.at(lane + 32);
    HOPWELL_NO_UNROLL
    for (int step = 0; step < tiles * head_passes(p); ++step, ++key_tile) {
      const SumSlot slot{barriers, key_tile};
      const int i = step % tiles * kTileKeys + lane;
      const bool first = entries.counts(low), second = entries.counts(high);
      const int next = (step + 1) % tiles * kTileKeys + lane;
      low = entries.at(next), high = entries.at(next + 32);  // a tile ahead: the load takes as long as a tile
      slot.wait_full();
      float sums[2] = {step < tiles || !first ? 0 : row[i], step < tiles || !second ? 0 : row[i + 32]};
      HOPWELL_UNROLL
      for (int warp = 0; warp < kWarps; ++warp) {
        sums[0] += first ? sums_of_stage[slot.stage()][warp][lane] : 0;
        sums[1] += second ? sums_of_stage[slot.stage()][warp][lane + 32] : 0;
      }
      slot.release();
      if (i < entries.length) row[i] = sums[0];
      if (i + 32 < entries.length) row[i + 32] = sums[1];
      if (step >= tiles * (head_passes(p) - 1)) total += sums[0] + sums[1];
    }
    finish_row(p, work, entries, total);
  }
}

}  // namespace hopwell::ops::attention_distribution::HOPWELL_TARGET
