// lightning_indexer_backward for Hopper without indices: the scores, then g and the loss, of a query group
// (groups.hpp).
//
// Tile      128 rows of q in shared memory; 64 keys per step, with the scores of all queries
// Roles     warpgroups 0, 1   score    alternate tiles; then, with the other warps, g and the loss of one query after
//                                      another
//           warpgroup 2       gather   producer: keys, in four stages
// Budget    shared: q 32,768 + 4 × 16,384 rows + 64 of barriers + 768 at most: two CTAs per SM
// Bound     tensor cores: 2 × 64 × 64 × 128, 512 clocks per tile
#pragma once

#include "ops/lightning_indexer_backward/sm90/groups.hpp"
#include "ops/lightning_indexer_backward/sm90/score.hpp"

namespace hopwell::ops::lightning_indexer_backward::HOPWELL_TARGET {

template <int kRows>
struct GroupScoreStorage {
  alignas(1024) unsigned char q[kBlocks][kTileBytes];
  GroupRing<4, NoNumbers> ring;
  GroupKeys<kGroupQueries<kRows>> keys;
  alignas(8) float weights[kGroupRows];
  float of_warp[ScoreConfig::kWarps];
};
static_assert(2 * sizeof(GroupScoreStorage<16>) <= arch::sm90::kMaxSharedBytes);

// Stores the scores of this warp's 16 keys of a tile for the queries of a block. The order of the sums is that in
// score.hpp.
template <bool kRelu, int kRows>
HOPWELL_DEVICE void store_scores(const GroupParams& p, const GroupScoreStorage<kRows>& s, const Group& group,
                                 const QuerySet& set, int tile, int block, const float (&d)[32]) {
  constexpr int kQueries = kHeadTile / kRows;
  const int t = tile::quad_lane(), odd = arch::lane_index() & 1;
  const int entry = tile * kTileEntries + tile::wgmma_row() + 8 * odd;
  HOPWELL_UNROLL
  for (int of_block = 0; of_block < kQueries; ++of_block) {
    const int member = block * kQueries + of_block;
    float sums[2] = {0, 0};
    HOPWELL_UNROLL
    for (int i = 0; i < kRows / 4; ++i) {
      const int head = i / 2 * 8 + 2 * t;
      const FloatPair weights = pair_at(s.weights + member * kRows + head);
      HOPWELL_UNROLL
      for (int second = 0; second < 2; ++second) {
        const float dot = d[of_block * kRows / 2 + 2 * i + second];
        const float term = weights.of[second] * (kRelu ? arch::max_nan(dot, 0) : dot);
        sums[i % 2] += head + second < p.heads ? term : 0;  // the product of a padding head may be NaN
      }
    }
    tile::share_sums(sums, 1, 1, odd);
    const float sum = sums[0] + arch::shuffle_xor(sums[0], 2);
    if (t >= 2 || !set.has(member) || entry >= s.keys.count[member]) continue;
    p.d_scores[int64_t{group.first + member} * p.topk + set.first + entry] = sum != sum ? -INFINITY : sum;
  }
}

// Scores of every second tile, from slot `number` on. Returns whether some key may be infinite or NaN: then its
// products with all heads are too, including the products in columns 0, 2, 4, 6.
template <bool kRelu, int kRows>
HOPWELL_DEVICE bool score_keys(const GroupParams& p, GroupScoreStorage<kRows>& s, const Group& group,
                               const QuerySet& set, int number, int warpgroup) {
  bool finite = true;
  HOPWELL_NO_UNROLL
  for (int tile = (number ^ warpgroup) & 1; tile < set.tiles(); tile += 2) {
    const GroupSlot<decltype(s.ring)> slot{s.ring, number + tile};
    slot.wait_full();
    arch::fence_proxy_async();
    HOPWELL_NO_UNROLL
    for (int block = 0; block < group.blocks; ++block) {
      float d[32];
      start_scores(d, slot.rows(), arch::shared_address(s.q[block]));
      arch::wgmma_wait<0>(d);
      if (block == group.blocks - 1) slot.release();
      finite = finite && fabsf(d[0]) < INFINITY && fabsf(d[2]) < INFINITY;
      store_scores<kRelu, kRows>(p, s, group, set, tile, block, d);
    }
  }
  return !finite;
}

// True if a number of q or a weight of this thread is infinite or NaN.
template <int kRows>
HOPWELL_DEVICE bool any_special(const GroupScoreStorage<kRows>& s, const Group& group) {
  const auto special = [](uint32_t bits) { return (bits & 0x7f80U) == 0x7f80U || (bits & 0x7f800000U) == 0x7f800000U; };
  const int thread = arch::thread_index();
  bool any = thread < group.blocks * kHeadTile && !(fabsf(s.weights[thread]) < INFINITY);
  for (int i = thread; i < group.blocks * int(kTileBytes / 16); i += ScoreConfig::kThreads) {
    const auto words = reinterpret_cast<const arch::Words4*>(s.q[0])[i];
    any = any || special(words.w[0]) || special(words.w[1]) || special(words.w[2]) || special(words.w[3]);
  }
  return any;
}

// One CTA per group.
template <bool kRelu, int kRows>
__global__ void __launch_bounds__(ScoreConfig::kThreads, 2)
    lightning_indexer_bwd_score_groups_sm90(const __grid_constant__ GroupParams p) {
#if HOPWELL_HAS_SM90A
  auto& s = arch::dynamic_smem<GroupScoreStorage<kRows>>();
  const int index = arch::grid_size() - 1 - arch::block_index();  // late queries see more keys, so they start first
  const Group group = group_of<kRows>(p, index);
  if (arch::thread_index() == 0) {
    s.ring.barriers.init(kGroupArrivals, 4);  // kept: on the emulator any warp releases the reads of wgmma
    arch::fence_mbarrier_init();
  }
  load_keys(p, group, s.keys);
  load_group<kRows>(p, s.q[0], s.weights, group, ScoreConfig::kThreads);
  arch::syncthreads();
  float ungrouped = any_special(s, group) ? 1 : 0;
  for_each_set(group, s.keys, false, [&](const QuerySet& set, int number) {
    const int warpgroup = arch::warpgroup_index();
    if (warpgroup == 2)
      gather_keys(p, s.ring, group, s.keys, set, number);
    else if (score_keys<kRelu, kRows>(p, s, group, set, number, warpgroup))
      ungrouped = 1;
    HOPWELL_NO_UNROLL
    for (int member = 0; member < group.queries; ++member) {
      if (!set.has(member)) continue;
      const int query = group.first + member;
      float bound = p.bounds.largest ? bound_of_heads(p, query) : 0;
      bound = 1.001F * reduce<Reduce::sum>(p, s.of_warp, bound);  // its barriers also order the scores
      scores_to_gradients<1>(p, s.of_warp, query, tile::entries_of(p.selection, query), bound);
    }
  });
  ungrouped = reduce<Reduce::max>(p, s.of_warp, ungrouped);
  if (arch::thread_index() == 0) p.ungrouped[index] = ungrouped > 0;
#endif
}

}  // namespace hopwell::ops::lightning_indexer_backward::HOPWELL_TARGET
