#include "ops/lightning_indexer/plan.hpp"

#include <bit>

#include "runtime/workspace.hpp"
#include "tile/ceil_div.hpp"

namespace hopwell::ops::lightning_indexer {
namespace {

constexpr std::int64_t kTileRows = 64;

using tile::ceil_div;
int to_int(std::int64_t x) { return static_cast<int>(x); }

// `groups_per_slice`(key blocks, groups, tiles per group) returns the groups of a slice. A CTA processes a slice.
template <class Choose>
ScorePlan plan_score(const Problem& p, std::int64_t queries, std::int64_t keys_per_cta, std::int64_t padded_heads,
                     Choose groups_per_slice) {
  const std::int64_t queries_per_tile = kTileRows / padded_heads, tiles_per_query = ceil_div(p.h_index, kTileRows);
  const std::int64_t groups = ceil_div(queries, queries_per_tile), key_blocks = ceil_div(p.s_kv, keys_per_cta);
  const std::int64_t each = groups_per_slice(to_int(key_blocks), to_int(groups), to_int(tiles_per_query));
  // With masks all CTAs share the visible keys (score_task.hpp), so the grid has a CTA per SM if there are enough
  // groups.
  const std::int64_t slices =
      std::max(ceil_div(groups, each), masked(p) ? std::min(groups, ceil_div(p.device.sms, key_blocks)) : 0);
  return {{.padded_heads = to_int(padded_heads),
           .queries_per_tile = to_int(queries_per_tile),
           .tiles_per_query = to_int(tiles_per_query),
           .tiles = to_int(groups * tiles_per_query),
           .tiles_per_slice = to_int(each * tiles_per_query)},
          to_int(key_blocks),
          to_int(slices)};
}

}  // namespace

Plan plan_of(const Problem& p) {
  constexpr std::int64_t kFloats = 1 << 24, kLeast = 32;  // 64 MiB of scores
  const std::int64_t together = std::min(p.s_q, std::max(kLeast, kFloats / std::max<std::int64_t>(p.s_kv, 1)));
  return plan_for(p, together);
}

Plan plan_for(const Problem& p, std::int64_t together) {
  Plan plan{.queries_at_a_time = together};
  if (p.topk == 0) return plan;
  const std::int64_t scores = together * p.s_kv * static_cast<std::int64_t>(sizeof(float));
  plan.workspace_bytes = static_cast<std::size_t>(scores);
  const std::int64_t parts = ceil_div(p.s_kv, std::int64_t{kKeysOfPart});
  if (p.s_kv <= kMostSampledKeys || 2 * parts * p.topk > p.s_kv) return plan;
  const std::int64_t candidates = together * parts * p.topk;
  runtime::WorkspaceLayout layout;
  layout.reserve(scores);
  plan.parts = to_int(parts);
  plan.candidates = layout.reserve(candidates * static_cast<std::int64_t>(sizeof(int)));
  plan.candidate_scores = layout.reserve(candidates * static_cast<std::int64_t>(sizeof(float)));
  plan.workspace_bytes = layout.bytes;
  return plan;
}

ScorePlan plan_mma_score(const Problem& p, std::int64_t queries, std::int64_t keys_per_cta) {
  const std::int64_t padded_heads = std::min(ceil_div(p.h_index, 8) * 8, kTileRows);
  return plan_score(p, queries, keys_per_cta, padded_heads, [&](int key_blocks, int groups, int) {
    return mma_groups_per_slice(key_blocks, groups, p.device.sms);
  });
}

ScorePlan plan_wgmma_score(const Problem& p, std::int64_t queries, std::int64_t keys_per_cta) {
  std::int64_t padded_heads = 8;
  while (padded_heads < std::min(p.h_index, kTileRows)) padded_heads *= 2;
  return plan_score(p, queries, keys_per_cta, padded_heads, [&](int key_blocks, int groups, int tiles) {
    return wgmma_groups_per_slice(key_blocks, groups, tiles, p.device.sms);
  });
}

SelectPlan plan_select(const Problem& p, std::int64_t queries) {
  // Few queries: the maximum number of warps. Many queries: several CTAs per SM hide each other's barriers, if their
  // warps still have enough work between barriers.
  const bool few = queries <= 2 * std::int64_t{p.device.sms};
  const std::int64_t most = few ? kMaxSelectWarps : std::clamp<std::int64_t>(p.s_kv / 2048, 8, kMaxSelectWarps);
  const auto warps = static_cast<std::uint64_t>(std::clamp<std::int64_t>(p.s_kv / 256, 1, most));
  // If there are more scores than buckets, a pass over the row costs more than a pass over the buckets.
  const int bucket_bits = p.s_kv >= 32'768 ? kMaxBucketBits : p.s_kv >= 4096 ? 12 : 8;
  return {to_int(static_cast<std::int64_t>(std::bit_floor(warps))), 1, bucket_bits};
}

SelectPlan plan_sampled_select(const Problem& p, std::int64_t queries) {
  if (p.s_kv < kLeastSampledKeys || p.s_kv > kMostSampledKeys) return {0, 0, 0};
  // An SM has registers for 32 warps. A warp's fixed cost per row equals the cost of 1,024 keys.
  const std::int64_t ctas = ceil_div(queries, std::max<std::int64_t>(p.device.sms, 1));
  return {ctas <= 1 ? 32 : ctas <= 2 ? 16 : ctas <= 4 ? 8 : 4, 1, kSampledBucketBits};
}

}  // namespace hopwell::ops::lightning_indexer
