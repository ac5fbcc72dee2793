// lightning_indexer on GPUs: division of the work; depends on the problem and the device only.
#pragma once

#include <algorithm>

#include "ops/lightning_indexer/op.hpp"

namespace hopwell::ops::lightning_indexer {

// Whether a query may not see some keys.
inline bool masked(const Problem& p) {
  return p.visibility.k_start != nullptr || p.visibility.q_positions != nullptr || p.visibility.has_q_start;
}

// The workspace holds the scores of this many queries. The kernels run for them, then for the next ones. Long rows are
// selected in parts, and the workspace holds the candidates of each part: see long_select.hpp.
struct Plan {
  std::int64_t queries_at_a_time = 0;
  int parts = 1;
  std::size_t candidates = 0, candidate_scores = 0;  // offsets in the workspace
  std::size_t workspace_bytes = 0;
};
// For scores of `together` queries.
Plan plan_for(const Problem& p, std::int64_t together);
Plan plan_of(const Problem& p);
// Calls run(first query, number of queries) for one group of queries after another.
template <class Run>
void for_each_pass(const Problem& p, const Plan& plan, Run run) {
  if (p.topk == 0) return;
  const std::int64_t together = plan.queries_at_a_time;
  for (std::int64_t first = 0; first < p.s_q; first += together) run(first, std::min(together, p.s_q - first));
}

// Tiles of 64 rows of q: the heads of one or several queries, or 64 heads at a time of a query with more heads.
struct QueryTiles {
  int padded_heads;                       // rows per query in a tile
  int queries_per_tile, tiles_per_query;  // at least one of the two is 1
  int tiles, tiles_per_slice;             // tiles of all queries, and per CTA: only whole queries
};
struct ScorePlan {
  QueryTiles queries;
  int key_blocks, slices;  // one CTA per pair; the CTAs of one slice have different keys
};
// Plan for mma: the rows of a query are padded to a multiple of 8.
ScorePlan plan_mma_score(const Problem& p, std::int64_t queries, std::int64_t keys_per_cta);
// Plan for wgmma, which loads tiles as boxes of a tensor map: rows are padded to a power of two.
ScorePlan plan_wgmma_score(const Problem& p, std::int64_t queries, std::int64_t keys_per_cta);

// Number of groups of tiles per slice for `key_blocks` blocks of keys. A group is all tiles of one query, or one tile
// of several queries. Kernels call these too, when they know which keys are visible.
// For mma: about four times as many CTAs as run at the same time, which is two per SM.
HOPWELL_HOST_DEVICE int mma_groups_per_slice(int key_blocks, int groups, int sms) {
  const int wanted = 8 * sms / key_blocks, slices = wanted < 1 ? 1 : wanted < groups ? wanted : groups;
  return (groups + slices - 1) / slices;
}
// For wgmma, with one CTA per SM: minimises the number of waves times the length of a CTA. Loading the keys costs a CTA
// as much as about four tiles.
HOPWELL_HOST_DEVICE int wgmma_groups_per_slice(int key_blocks, int groups, int tiles_per_group, int sms) {
  constexpr int kTilesToBegin = 4, kTried = 8;
  const int fewest = (key_blocks + sms - 1) / sms;
  std::int64_t least = INT64_MAX;
  int best = groups;
  for (int rounds = fewest; rounds < fewest + kTried; ++rounds) {
    const int room = int(std::int64_t{rounds} * sms / key_blocks), slices = room < groups ? room : groups;
    const int each = (groups + slices - 1) / slices;
    const std::int64_t time = rounds * (std::int64_t{each} * tiles_per_group + kTilesToBegin);
    if (time < least) best = each, least = time;
  }
  return best;
}

// The CTAs that select for a query.
inline constexpr int kMaxSelectWarps = 32, kClusterSelectWarps = 16, kMaxBucketBits = 14;
struct SelectPlan {
  int warps;  // per CTA
  std::uint32_t cluster;
  int bucket_bits;  // bits of a score's bucket per counting pass; without clusters only
};
SelectPlan plan_select(const Problem& p, std::int64_t queries);
// Selection with an estimate from a sample of the row. warps 0: the row is too short or too long for it.
inline constexpr int kLeastSampledKeys = 4096, kMostSampledKeys = 262'144, kSampledBucketBits = 12;
SelectPlan plan_sampled_select(const Problem& p, std::int64_t queries);
inline constexpr int kKeysOfPart = 131'072;
// Selection by clusters that hold a row each in shared memory. They have the most CTAs with which all clusters run at
// the same time. cluster 0: there is no such number, or the row is too short or too long.
// clusters_that_fit(CTAs of a cluster): how many clusters the device runs at the same time.
inline constexpr int kMostClusterCtas = 8, kMostKeysOfClusterCta = 32'768;
template <class ClustersThatFit>
SelectPlan plan_cluster_select(const Problem& p, std::int64_t queries, const ClustersThatFit& clusters_that_fit) {
  if (p.s_kv < kLeastSampledKeys) return {0, 0, 0};
  for (int ctas = kMostClusterCtas; ctas > 1; ctas /= 2)
    if (p.s_kv <= ctas * kMostKeysOfClusterCta && clusters_that_fit(ctas) >= queries)
      return {kClusterSelectWarps, static_cast<std::uint32_t>(ctas), 0};
  return {0, 0, 0};
}

}  // namespace hopwell::ops::lightning_indexer
