// lightning_indexer on GPUs: how the work is cut, from the problem and the device alone.
#pragma once

#include <algorithm>

#include "ops/lightning_indexer/op.hpp"

namespace hopwell::ops::lightning_indexer {

// The workspace holds the scores of so many queries; kernels run for them, then for the next ones.
std::int64_t queries_at_a_time(const Problem& p);
std::size_t workspace_bytes(const Problem& p);
// run(first query, how many) for one pass after another.
template <class Run>
void for_each_pass(const Problem& p, Run run) {
  if (p.topk == 0) return;
  const std::int64_t together = queries_at_a_time(p);
  for (std::int64_t first = 0; first < p.s_q; first += together) run(first, std::min(together, p.s_q - first));
}

// Tiles of 64 rows of q: the heads of one or several queries, or, of a query with more heads, 64 at a time.
struct QueryTiles {
  int padded_heads;                       // rows of a query in a tile
  int queries_per_tile, tiles_per_query;  // one of them is 1
  int tiles, tiles_per_slice;             // of all queries, and of a CTA: of whole queries
};
struct ScorePlan {
  QueryTiles queries;
  std::uint32_t key_blocks, slices;  // the grid: CTAs that share a slice have other keys
};
// By mma: a query's rows are a multiple of 8.
ScorePlan plan_mma_score(const Problem& p, std::int64_t queries, std::int64_t keys_per_cta);
// By wgmma, whose tiles come as boxes of a tensor map: a power of two.
ScorePlan plan_wgmma_score(const Problem& p, std::int64_t queries, std::int64_t keys_per_cta);

// The CTAs that select for a query.
inline constexpr int kMaxSelectWarps = 32, kMaxSelectCluster = 8, kKeysPerSelectWarp = 1024;
struct SelectPlan {
  int warps;  // of a CTA
  std::uint32_t cluster;
};
SelectPlan plan_select(const Problem& p, std::int64_t queries);
// A cluster whose warps hold the row in registers; cluster 0: the row is too long.
SelectPlan plan_cluster_select(const Problem& p);

}  // namespace hopwell::ops::lightning_indexer
