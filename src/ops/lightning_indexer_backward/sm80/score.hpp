// lightning_indexer_backward by mma.sync: computes the scores, then g, and the loss.
//
// Tile      a CTA has a query: 64 heads of q in shared memory, then the next 64
// Roles     up to eight warps, each with 16 entries at a time, whose keys it gathers into registers as operand A of mma
// Timeline  q │ scores of all entries, to the workspace │ barrier │ maximum │ sum │ g in their place, loss
// Budget    shared 16,384 B per bf16 split term + 288 B
#pragma once

#include "ops/lightning_indexer_backward/loss.hpp"
#include "ops/lightning_indexer_backward/sm80/entries.hpp"

namespace hopwell::ops::lightning_indexer_backward::HOPWELL_TARGET {

struct ScoreConfig {
  static constexpr int kMaxWarps = 8, kEntries = 16;
};

template <class T>
struct ScoreStorage {
  MmaTile<kSplitTerms<T>, kHeadTile> q;
  float weights[kHeadTile];
  float of_warp[ScoreConfig::kMaxWarps];
};

// Loads 64 heads.
template <class T>
HOPWELL_DEVICE void load_heads(const Params<T>& p, ScoreStorage<T>& s, int query, int first) {
  arch::syncthreads();  // the previous heads have been read
  for_each_chunk(p, query, first, 32 * p.score_warps,
                 [&](int row, int number, const Chunk<kSplitTerms<T>>& chunk, float weight) {
                   s.q.store(row, number, chunk);
                   if (number == 0) s.weights[row] = weight;
                 });
  arch::syncthreads();
}

// Adds 64 heads to the scores of 16 entries of this warp.
template <bool kRelu, class T>
HOPWELL_DEVICE void add_scores(const Params<T>& p, const ScoreStorage<T>& s, const tile::Entries& entries, int query,
                               int first_entry, int first_head) {
  const int g = tile::fragment_row(), t = tile::quad_lane();
  const int keys[2] = {entries.key(first_entry + g), entries.key(first_entry + 8 + g)};
  MmaRows<kSplitTerms<T>> rows[1];
  gather(p, keys, rows[0]);
  float sums[2] = {0, 0};
  const int heads = p.heads - first_head < kHeadTile ? p.heads - first_head : kHeadTile;
  for (int head = 0; head < heads; head += 16) {
    float d[2][1][4] = {};
    tile::multiply<false>(d, rows, s.q, head, p.column_blocks);
    HOPWELL_UNROLL
    for (int i = 0; i < 8; ++i) {
      const int column = head + i / 4 * 8 + tile::fragment_column() + i % 2;
      const float dot = d[i / 4][0][i % 4], term = s.weights[column] * (kRelu ? tile::relu(dot) : dot);
      sums[i / 2 % 2] += column < heads ? term : 0;
    }
  }
  HOPWELL_UNROLL
  for (int half = 0; half < 2; ++half) {
    const float sum = tile::sum_of_quad(sums[half]);
    const int entry = first_entry + 8 * half + g;
    if (t != half || entry >= entries.length) continue;
    float* score = gradients_of(p, query, entries) + entry;
    const float whole = (first_head == 0 ? 0 : *score) + sum;
    const bool last = first_head + kHeadTile >= p.heads;
    *score = keys[half] < 0 || (last && whole != whole) ? -INFINITY : whole;
  }
}

template <class T, bool kRelu>
__global__ void __launch_bounds__(32 * ScoreConfig::kMaxWarps)
    lightning_indexer_bwd_score_sm80(const __grid_constant__ Params<T> p) {
  auto& s = arch::dynamic_smem<ScoreStorage<T>>();
  const int query = arch::block_index(), warp = arch::warp_index(), lane = arch::lane_index();
  const tile::Entries entries = tile::entries_of(p.selection, query);
  float bound = 0;  // Σ_j |w_j| max |q_j| over this warp's heads, in lane 0
  for (int first = 0; first < p.heads; first += kHeadTile) {
    load_heads(p, s, query, first);
    for (int entry = ScoreConfig::kEntries * warp; entry < entries.length;
         entry += ScoreConfig::kEntries * p.score_warps)
      add_scores<kRelu>(p, s, entries, query, entry, first);
    if (!p.bounds.largest) continue;
    for (int row = warp; row < kHeadTile && first + row < p.heads; row += p.score_warps) {
      float largest = 0, x[8];
      for (int number = lane; number < 4 * p.column_blocks; number += 32) {
        tile::sum_split(s.q.load(row, number), x);
        for (float value : x) largest = fmaxf(largest, fabsf(value));
      }
      largest = tile::max_of_warp(largest);
      if (lane == 0) bound += fabsf(s.weights[row]) * largest;
    }
  }
  bound = 1.001F * reduce<Reduce::sum>(p, s.of_warp, bound);  // its barriers also order the scores
  scores_to_gradients(p, s.of_warp, query, entries, bound);
}

}  // namespace hopwell::ops::lightning_indexer_backward::HOPWELL_TARGET
