// attention_distribution on GPUs: moves sums over heads from the warps that compute them to memory. A ring in shared
// memory holds the sums of each warp's heads for a tile of keys. One warp adds them in a fixed order, writes, and
// normalises.
#pragma once

#include "ops/attention_distribution/row.hpp"
#include "tile/gpu/ring.hpp"

namespace hopwell::ops::attention_distribution::HOPWELL_TARGET {

inline constexpr int kSumStages = 4;
using SumBarriers = tile::RingBarriers<kSumStages>;
using SumSlot = tile::RingSlot<kSumStages>;

// Destinations of each lane's two sums of a tile: the slot of the entry, or if rows are sorted, its original slot.
template <bool kOrdered>
struct Places {
  const uint16_t* sources;
  float* sums;
  int length, low, high;

  HOPWELL_DEVICE Places(const Params& p, const WorkTile& work, const Entries& entries)
      : sources(p.sources + int64_t{work.query} * p.selection.topk + work.first),
        sums(kOrdered ? p.attn + work.query * p.attn_stride : sums_of(p, work, entries)),
        length(entries.length) {}
  HOPWELL_DEVICE int at(int i) const { return !kOrdered ? i : i < length ? sources[i] : 0; }
  HOPWELL_DEVICE void go_to(int i) { low = at(i), high = at(i + 32); }
};

// Executed by one warp. sums[stage][warp]: sums of the first kWarps warps. kOrdered: rows are sorted by key and all of
// their entries are valid; invalid entries have been set to zero before.
template <int kWarps, bool kOrdered = false, int kSumWarps>
HOPWELL_DEVICE void store(const Params& p, const float (&sums_of_stage)[kSumStages][kSumWarps][kTileKeys],
                          SumBarriers& barriers) {
  const int lane = arch::lane_index();
  int key_tile = 0;  // tiles so far
  HOPWELL_NO_UNROLL
  for (int number = arch::block_index(); number < p.plan.work_tiles; number += arch::grid_size()) {
    const WorkTile work = work_tile_of(p.plan, p.selection.topk, number);
    const Entries entries = entries_of(p, work);
    const int tiles = entries.tiles(kTileKeys);
    Places<kOrdered> places(p, work, entries);
    places.go_to(lane);
    float total = 0;
    int low = entries.at(lane), high = entries.at(lane + 32);
    HOPWELL_NO_UNROLL
    for (int step = 0; step < tiles * head_passes(p); ++step, ++key_tile) {
      const SumSlot slot{barriers, key_tile};
      const int i = step % tiles * kTileKeys + lane;
      float &sum_low = places.sums[places.low], &sum_high = places.sums[places.high];
      const bool first = entries.counts(low), second = entries.counts(high);
      const int next = (step + 1) % tiles * kTileKeys + lane;
      // One tile ahead, because the load takes as long as a tile.
      low = entries.at(next), high = entries.at(next + 32), places.go_to(next);
      slot.wait_full();
      float sums[2] = {step < tiles || !first ? 0 : sum_low, step < tiles || !second ? 0 : sum_high};
      HOPWELL_UNROLL
      for (int warp = 0; warp < kWarps; ++warp) {
        sums[0] += first ? sums_of_stage[slot.stage()][warp][lane] : 0;
        sums[1] += second ? sums_of_stage[slot.stage()][warp][lane + 32] : 0;
      }
      slot.release();
      if (i < entries.length) sum_low = sums[0];
      if (i + 32 < entries.length) sum_high = sums[1];
      if (step >= tiles * (head_passes(p) - 1)) total += sums[0] + sums[1];
    }
    if constexpr (kOrdered) {
      normalize_ordered_row(p, work);
      if (lane == 0 && p.throttle.has(number)) p.throttle.count_missing(entries.tiles(kTileKeys * kThrottleTiles));
    } else {
      complete_row(p, work, entries, total);
    }
  }
}

}  // namespace hopwell::ops::attention_distribution::HOPWELL_TARGET
