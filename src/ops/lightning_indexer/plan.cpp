#include "ops/lightning_indexer/plan.hpp"

namespace hopwell::ops::lightning_indexer {
namespace {

constexpr std::int64_t kTileRows = 64;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
int to_int(std::int64_t x) { return static_cast<int>(x); }

// Slices are chosen by `groups_per_slice`(key blocks, groups, tiles a group).
template <class Choose>
ScorePlan plan_score(const Problem& p, std::int64_t queries, std::int64_t keys_per_cta, std::int64_t padded_heads,
                     Choose groups_per_slice) {
  const std::int64_t queries_per_tile = kTileRows / padded_heads, tiles_per_query = ceil_div(p.h_index, kTileRows);
  const std::int64_t groups = ceil_div(queries, queries_per_tile), key_blocks = ceil_div(p.s_kv, keys_per_cta);
  const std::int64_t each = groups_per_slice(to_int(key_blocks), to_int(groups), to_int(tiles_per_query));
  // CTAs of keys that no query sees take tiles of other keys: there should be one a multiprocessor at least.
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

std::int64_t queries_at_a_time(const Problem& p) {
  constexpr std::int64_t kFloats = 1 << 24, kLeast = 32;  // 64 MiB of scores
  return std::min(p.s_q, std::max(kLeast, kFloats / std::max<std::int64_t>(p.s_kv, 1)));
}

std::size_t workspace_bytes(const Problem& p) {
  return p.topk == 0 ? 0 : sizeof(float) * static_cast<std::size_t>(queries_at_a_time(p) * p.s_kv);
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
  // Few queries: as many warps as there can be. Many: several CTAs a multiprocessor hide each other's barriers.
  const bool few = queries <= 2 * std::int64_t{p.device.sms};
  return {to_int(std::clamp<std::int64_t>(p.s_kv / 256, 1, few ? kMaxSelectWarps : 8)), 1};
}

SelectPlan plan_cluster_select(const Problem& p) {
  // CTAs of eight warps; of more where even the largest cluster would not have room.
  const std::int64_t warps = std::max<std::int64_t>(ceil_div(p.s_kv, kKeysPerSelectWarp), 1);
  if (warps > kMaxSelectWarps * kMaxSelectCluster) return {0, 0};
  std::uint32_t cluster = 1;
  while (cluster < kMaxSelectCluster && 8 * cluster < warps) cluster *= 2;
  return {to_int(ceil_div(warps, cluster)), cluster};
}

}  // namespace hopwell::ops::lightning_indexer
