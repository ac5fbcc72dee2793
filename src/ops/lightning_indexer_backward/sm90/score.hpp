// lightning_indexer_backward for Hopper: the scores, then g and the loss; and the signs of the products.
//
// Tile      a CTA has a query: 64 heads of q in shared memory, further heads one tile after another; 64 entries per
//           step
// Roles     warpgroups 0, 1   score    scores of alternate tiles; then, with the other warps, g and the loss
//           warpgroup 2       gather   producer: keys, in four stages
// Timeline  q │ gather K2 ▒▒▒│ K3 ▒▒▒ … │ barrier │ maximum │ sum │ g in their place, loss
//               score 0 S0 ▓ Σ │ S2 ▓ Σ     score 1 S1 ▓ Σ │ S3 …
// Budget    shared: q 16,384 + 4 × (16,384 rows + 1,408 entries) + 64 of barriers + 304, 89,088 B with gaps: two CTAs
//           per SM
// Bound     the gather, 16 KB per tile
#pragma once

#include "ops/lightning_indexer_backward/loss.hpp"
#include "ops/lightning_indexer_backward/sm90/entries.hpp"

namespace hopwell::ops::lightning_indexer_backward::HOPWELL_TARGET {

struct ScoreConfig {
  static constexpr int kWarps = 12, kThreads = 32 * kWarps;
};

struct ScoreStorage {
  alignas(1024) unsigned char q[kTileBytes];
  EntryRing<4> ring;
  float weights[kHeadTile], of_warp[ScoreConfig::kWarps];
};
static_assert(decltype(ScoreStorage::ring)::kStages % 2 == 0 &&
              2 * sizeof(ScoreStorage) <= arch::sm90::kMaxSharedBytes);

// Adds w_j relu(dot_ij) to this lane's two entries, 8 rows from each other, for every fourth pair of a tile's heads.
// `heads`: number of heads.
template <bool kRelu, bool kAllHeads>
HOPWELL_DEVICE void weigh(float (&sums)[2], const ScoreStorage& s, int heads, const float (&d)[32]) {
  HOPWELL_UNROLL
  for (int i = 0; i < 32; ++i) {
    const int column = i / 4 * 8 + tile::fragment_column() + i % 2;
    const float term = s.weights[column] * (kRelu ? arch::max_nan(d[i], 0) : d[i]);
    sums[i / 2 % 2] += kAllHeads || column < heads ? term : 0;  // the product of a padding head may be NaN
  }
}

// Adds 64 heads from `first_head` on to the scores of this warp's 16 entries of a tile.
template <bool kRelu>
HOPWELL_DEVICE void add_scores(const Params<bf16>& p, const ScoreStorage& s, float* scores, int entries, int tile,
                               const int (&keys)[2], int first_head, const float (&d)[32]) {
  const int t = tile::quad_lane(), odd = arch::lane_index() & 1, heads = p.heads - first_head;
  float sums[2] = {0, 0};
  if (heads >= kHeadTile)
    weigh<kRelu, true>(sums, s, heads, d);
  else
    weigh<kRelu, false>(sums, s, heads, d);
  tile::share_sums(sums, 1, 1, odd);
  const float sum = sums[0] + arch::shuffle_xor(sums[0], 2);
  const int entry = tile * kTileEntries + tile::wgmma_row() + 8 * odd;
  if (t >= 2 || entry >= entries) return;
  const float whole = (first_head == 0 ? 0 : scores[entry]) + sum;
  const bool last = heads <= kHeadTile;
  scores[entry] = (odd ? keys[1] : keys[0]) < 0 || (last && whole != whole) ? -INFINITY : whole;
}

// Scores of every second tile, so that a stage always has tiles of the same warpgroup; from slot `number` on.
template <bool kRelu>
HOPWELL_DEVICE void score_tiles(const EntryParams& p, ScoreStorage& s, int query, const tile::Entries& entries,
                                int first_head, int number, int group) {
  const int tiles = entry_tiles(entries), row = tile::wgmma_row();
  float* const scores = gradients_of(p, query, entries);
  [[maybe_unused]] uint32_t* const positive =
      p.positive_of(query, first_head / kHeadTile, 0) + arch::thread_index() % 128;
  HOPWELL_NO_UNROLL
  for (int tile = (number ^ group) & 1; tile < tiles; tile += 2) {
    const EntrySlot<decltype(s.ring)> slot{s.ring, number + tile};
    slot.wait_full();
    arch::fence_proxy_async();
    float d[32];
    start_scores(d, slot.rows(), arch::shared_address(s.q));
    const int keys[2] = {slot.entries().key[row], slot.entries().key[row + 8]};
    arch::wgmma_wait<0>(d);
    slot.release();
    if constexpr (kRelu) positive[tile * kPositiveWords] = positive_bits(d);
    add_scores<kRelu>(p, s, scores, entries.length, tile, keys, first_head, d);
  }
}

// Σ_j |w_j| max |q_j| over this warp's heads, in lane 0.
HOPWELL_DEVICE float bound_of_heads(const Params<bf16>& p, int query) {
  float bound = 0;
  for (int head = arch::warp_index(); head < p.heads; head += ScoreConfig::kWarps) {
    const int column = 8 * arch::lane_index();
    float largest = 0, x[8];
    if (column < p.columns) {
      tile::sum_split(p.q.chunk(p.q.data + query * p.q_stride + head * p.q.stride, column), x);
      for (const float value : x) largest = fmaxf(largest, fabsf(value));
    }
    largest = tile::reduce<8, 1>(largest, tile::Larger{});
    const float weight = tile::load_fp32(p.weights, p.weights_bf16, query * p.weights_stride + head);
    if (arch::lane_index() == 0) bound += fabsf(weight) * largest;
  }
  return bound;
}

template <bool kRelu>
__global__ void __launch_bounds__(ScoreConfig::kThreads, 2)
    lightning_indexer_bwd_score_sm90(const __grid_constant__ EntryParams p) {
#if HOPWELL_HAS_SM90A
  auto& s = arch::dynamic_smem<ScoreStorage>();
  tile::launch_dependents();
  const int query = arch::block_index(), group = arch::warpgroup_index();
  const tile::Entries entries = tile::entries_of(p.selection, query);
  if (arch::thread_index() == 0) {
    s.ring.barriers.init(kEntryArrivals, 4);
    arch::fence_mbarrier_init();
  }
  for (int first = 0, number = 0; first < p.heads; first += kHeadTile, number += entry_tiles(entries)) {
    if (first > 0) arch::syncthreads();  // the previous heads have been read
    load_heads(p, s.q, s.weights, query, first, ScoreConfig::kThreads);
    arch::syncthreads();
    if (group < 2)
      score_tiles<kRelu>(p, s, query, entries, first, number, group);
    else
      gather_tiles<false, kRelu>(p, s.ring, query, 0, entries, number);
  }
  float bound = p.bounds.largest ? bound_of_heads(p, query) : 0;
  bound = 1.001F * reduce<Reduce::sum>(p, s.of_warp, bound);  // its barriers also order the scores
  tile::wait_for_prior_kernels();  // the bounds are clear; kernels that wait for this one rely on a cleared dk
  scores_to_gradients(p, s.of_warp, query, entries, bound);
#endif
}

}  // namespace hopwell::ops::lightning_indexer_backward::HOPWELL_TARGET
