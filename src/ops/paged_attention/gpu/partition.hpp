// paged_attention on GPUs: the warps of a CTA compute their shares of the work from the lengths of the sequences.
#pragma once

#include "arch/sm80/bits.hpp"
#include "arch/sm80/threads.hpp"
#include "ops/paged_attention/gpu/segment.hpp"
#include "tile/gpu/warp.hpp"

namespace hopwell::ops::paged_attention::HOPWELL_TARGET {

struct PartitionStorage {
  int sum_of_warp[kMaxWarps];
  struct {
    int sequence, tiles_before;
  } first[kMaxWarps];  // of the first segment of each share
};

// Partition of all tiles, the range of this warp, and its first segment if the range is not empty.
struct WarpWork {
  Partition partition;
  TileRange tiles;
  Segment segment;
  HOPWELL_DEVICE bool any() const { return tiles.begin < tiles.end; }
};

// Index of this warp's share among the CTA's shares.
HOPWELL_DEVICE int share_of_warp(const Params& p) { return arch::warp_index() % p.schedule.shares; }

// Small batch, up to two sequences per lane: each warp computes its share by itself and reads each length once.
HOPWELL_DEVICE void partition_by_warp(const Params& p, WarpWork& work) {
  const Schedule& schedule = p.schedule;
  const int lane = arch::lane_index(), first = lane * schedule.sequences_per_thread;
  int context[2], tiles[2];
  HOPWELL_UNROLL
  for (int i = 0; i < 2; ++i)
    context[i] = i < schedule.sequences_per_thread && first + i < p.query.b ? p.cache.context_of(first + i) : 0;
  HOPWELL_UNROLL
  for (int i = 0; i < 2; ++i) tiles[i] = tiles_of(p, keys_of_sequence(p, context[i]));
  const int end = tile::sum_up_to_lane(tiles[0] + tiles[1]);  // inclusive sum, in tiles of one row block
  Partition& partition = work.partition;
  partition = partition_of(schedule, int64_t{arch::shuffle(end, 31)} * schedule.row_blocks);
  if (may_take_whole_blocks(schedule, partition)) {
    const int each = arch::shuffle(tiles[0], 0);  // tiles of a row block, if all row blocks have equally many
    const bool differ = (first < p.query.b && tiles[0] != each) ||
                        (first + 1 < p.query.b && schedule.sequences_per_thread > 1 && tiles[1] != each);
    if (arch::ballot(differ) == 0) partition.share = schedule.whole_blocks * each, partition.extra = 0;
  }
  const int cta = arch::block_index();
  work.tiles =
      TileRange{partition.first_tile(cta), partition.first_tile(cta + 1)}.of_share(share_of_warp(p), schedule.shares);
  if (!work.any()) return;
  const int64_t begin = work.tiles.begin;
  const int owner = int(arch::bfind(arch::ballot(begin >= int64_t{end} * schedule.row_blocks)) + 1);
  const bool second = begin >= int64_t{end - tiles[1]} * schedule.row_blocks;
  Segment& segment = work.segment;
  segment.sequence = arch::shuffle(first + (second ? 1 : 0), owner);
  segment.tiles_before = arch::shuffle(end - tiles[1] - (second ? 0 : tiles[0]), owner);
  segment.context = arch::shuffle(second ? context[1] : context[0], owner);
  segment.tiles = arch::shuffle(second ? tiles[1] : tiles[0], owner);
  segment.begin_at(p, begin, work.tiles.end);
}

// Finds the first sequence of each warp. Each thread searches its own sequences, from `first` on. They have
// `tiles` tiles of one row block in total; the sequences before them have `before` tiles.
HOPWELL_DEVICE void find_first_sequences(const Params& p, PartitionStorage& s, const TileRange& of_cta, int first,
                                         int before, int tiles) {
  const Schedule& schedule = p.schedule;
  HOPWELL_NO_UNROLL
  for (int share = 0; share < schedule.shares; ++share) {
    const int64_t tile = of_cta.of_share(share, schedule.shares).begin;
    if (tile < int64_t{before} * schedule.row_blocks || tile >= int64_t{before + tiles} * schedule.row_blocks) continue;
    int n = first, to = before;
    HOPWELL_NO_UNROLL
    for (;; ++n) {
      const int have =
          schedule.sequences_per_thread == 1 ? tiles : tiles_of(p, keys_of_sequence(p, p.cache.context_of(n)));
      if (tile < int64_t{to + have} * schedule.row_blocks) break;
      to += have;
    }
    s.first[share] = {n, to};
  }
}

// Large batch: each thread of the CTA adds the lengths of `sequences_per_thread` sequences.
HOPWELL_DEVICE void partition_by_cta(const Params& p, PartitionStorage& s, WarpWork& work) {
  const Schedule& schedule = p.schedule;
  const int lane = arch::lane_index(), warp = arch::warp_index();
  const int first = arch::thread_index() * schedule.sequences_per_thread,
            end = smaller(p.query.b, first + schedule.sequences_per_thread);
  int tiles = 0;
  for (int n = first; n < end; ++n) tiles += tiles_of(p, keys_of_sequence(p, p.cache.context_of(n)));
  const int sum = tile::sum_up_to_lane(tiles);
  int before = sum - tiles, total = 0;
  if (lane == 31) s.sum_of_warp[warp] = sum;
  arch::syncthreads();  // kept: without it, stale sums give shares outside of the tensors
  HOPWELL_NO_UNROLL
  for (int w = 0; w < schedule.warps; ++w) {
    before += w < warp ? s.sum_of_warp[w] : 0;
    total += s.sum_of_warp[w];
  }
  work.partition = partition_of(schedule, int64_t{total} * schedule.row_blocks);
  const int cta = arch::block_index();
  const TileRange of_cta{work.partition.first_tile(cta), work.partition.first_tile(cta + 1)};
  find_first_sequences(p, s, of_cta, first, before, tiles);
  arch::syncthreads();  // kept: without it, a stale sequence number is outside of the tensors
  const int share = share_of_warp(p);
  work.tiles = of_cta.of_share(share, schedule.shares);
  if (!work.any()) return;
  Segment& segment = work.segment;
  segment.sequence = s.first[share].sequence, segment.tiles_before = s.first[share].tiles_before;
  segment.context = p.cache.context_of(segment.sequence);
  segment.tiles = tiles_of(p, keys_of_sequence(p, segment.context));
  segment.begin_at(p, work.tiles.begin, work.tiles.end);
}

HOPWELL_DEVICE void find_work(const Params& p, PartitionStorage& s, WarpWork& work) {
  if (p.schedule.partition_by_warp) return partition_by_warp(p, work);
  partition_by_cta(p, s, work);
}

}  // namespace hopwell::ops::paged_attention::HOPWELL_TARGET
