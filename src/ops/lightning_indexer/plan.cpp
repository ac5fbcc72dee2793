#include "ops/lightning_indexer/plan.hpp"

namespace hopwell::ops::lightning_indexer {
namespace {

constexpr std::int64_t kTileRows = 64, kMaxGridY = 65535;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
int to_int(std::int64_t x) { return static_cast<int>(x); }

// Slices of so many tiles, of whole queries, are chosen by `groups_per_slice`(key blocks, groups, tiles a group): a group is
// the tiles of one query, or the one tile of several.
template <class Choose>
ScorePlan plan_score(const Problem& p, std::int64_t queries, std::int64_t keys_per_cta, std::int64_t padded_heads,
                     Choose groups_per_slice) {
  const std::int64_t queries_per_tile = kTileRows / padded_heads, tiles_per_query = ceil_div(p.h_index, kTileRows);
  const std::int64_t groups = ceil_div(queries, queries_per_tile), key_blocks = ceil_div(p.s_kv, keys_per_cta);
  const std::int64_t each = groups_per_slice(key_blocks, groups, tiles_per_query);
  return {{.padded_heads = to_int(padded_heads),
           .queries_per_tile = to_int(queries_per_tile),
           .tiles_per_query = to_int(tiles_per_query),
           .tiles = to_int(groups * tiles_per_query),
           .tiles_per_slice = to_int(each * tiles_per_query)},
          static_cast<std::uint32_t>(key_blocks),
          static_cast<std::uint32_t>(ceil_div(groups, each))};
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
  // About four CTAs for each that can run at a time, two a multiprocessor.
  return plan_score(p, queries, keys_per_cta, padded_heads,
                    [&](std::int64_t key_blocks, std::int64_t groups, std::int64_t) {
                      const std::int64_t wanted = 8 * std::int64_t{p.device.sms} / key_blocks;
                      return ceil_div(groups, std::clamp<std::int64_t>(wanted, 1, std::min(groups, kMaxGridY)));
                    });
}

ScorePlan plan_wgmma_score(const Problem& p, std::int64_t queries, std::int64_t keys_per_cta) {
  std::int64_t padded_heads = 8;
  while (padded_heads < std::min(p.h_index, kTileRows)) padded_heads *= 2;
  // So that all CTAs, one a multiprocessor, take the fewest rounds by their length. Loading the keys takes a CTA as long as
  // about four tiles.
  constexpr std::int64_t kTilesToBegin = 4, kRounds = 4;
  return plan_score(p, queries, keys_per_cta, padded_heads,
                    [&](std::int64_t key_blocks, std::int64_t groups, std::int64_t tiles) {
                      const std::int64_t sms = p.device.sms;
                      std::int64_t best = groups, least = INT64_MAX;
                      for (std::int64_t slices = 1; slices <= std::min({groups, kRounds * sms, kMaxGridY}); ++slices) {
                        const std::int64_t each = ceil_div(groups, slices);
                        const std::int64_t time = ceil_div(key_blocks * slices, sms) * (each * tiles + kTilesToBegin);
                        if (time < least) best = each, least = time;
                      }
                      return best;
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
