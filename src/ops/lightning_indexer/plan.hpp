// lightning_indexer on GPUs: how the work is cut, from the problem and the device alone.
#pragma once

#include <algorithm>

#include "ops/lightning_indexer/op.hpp"

namespace hopwell::ops::lightning_indexer {

// Whether there may be keys that a query does not see.
inline bool masked(const Problem& p) {
  return p.visibility.k_start != nullptr || p.visibility.q_positions != nullptr || p.visibility.has_q_start;
}

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
  int key_blocks, slices;  // CTAs: one for each pair; those that share a slice have other keys
};
// By mma: a query's rows are a multiple of 8.
ScorePlan plan_mma_score(const Problem& p, std::int64_t queries, std::int64_t keys_per_cta);
// By wgmma, whose tiles come as boxes of a tensor map: a power of two.
ScorePlan plan_wgmma_score(const Problem& p, std::int64_t queries, std::int64_t keys_per_cta);

// How many groups of tiles a slice has where so many blocks of keys are scored: a group is the tiles of one query, or the
// one tile of several. Kernels ask too, once they know which keys are seen.
// By mma: about four CTAs for each that can run at a time, two a multiprocessor.
HOPWELL_HOST_DEVICE int mma_groups_per_slice(int key_blocks, int groups, int sms) {
  const int wanted = 8 * sms / key_blocks, slices = wanted < 1 ? 1 : wanted < groups ? wanted : groups;
  return (groups + slices - 1) / slices;
}
// By wgmma: so that all CTAs, one a multiprocessor, take the fewest rounds by their length. Loading the keys takes a CTA as
// long as about four tiles.
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
inline constexpr int kMaxSelectWarps = 32, kSelectCluster = 8, kKeysPerSelectWarp = 1024, kMaxDigitBits = 14;
struct SelectPlan {
  int warps;  // of a CTA
  std::uint32_t cluster;
  int digit_bits;  // of a score, counted at a time; without clusters only
};
SelectPlan plan_select(const Problem& p, std::int64_t queries);
// Where a sample of the row tells what to look for; warps 0: the row is too short or too long for that.
inline constexpr int kLeastSampledKeys = 4096, kMostSampledKeys = 262'144, kSampledDigitBits = 12;
SelectPlan plan_sampled_select(const Problem& p, std::int64_t queries);
// A cluster whose warps hold the row in registers; cluster 0: a CTA is at least as fast, since the row is short or the
// clusters would take turns, or the row is too long.
SelectPlan plan_cluster_select(const Problem& p, std::int64_t queries);

}  // namespace hopwell::ops::lightning_indexer
