// How lightning_indexer and its backward cut their work on devices of any size. No GPU is needed.
#include "ops/lightning_indexer/plan.hpp"

#include <gtest/gtest.h>

#include "ops/lightning_indexer_backward/plan.hpp"

namespace hopwell::ops {
namespace {

constexpr int kSms[] = {8, 66, 114, 132, 148};
constexpr std::int64_t kKeysPerCta = 384;

lightning_indexer::Problem forward(std::int64_t s_q, std::int64_t s_kv, std::int64_t h_index, int sms) {
  lightning_indexer::Problem p;
  p.s_q = s_q, p.s_kv = s_kv, p.h_index = h_index, p.d_index = 128, p.topk = 2048;
  p.device.sms = p.device.cluster_sms = sms;
  return p;
}

// Every tile belongs to one slice, and the tiles of a query to the same one.
void expect_whole(const lightning_indexer::ScorePlan& plan, const lightning_indexer::Problem& p) {
  const auto& [padded_heads, queries_per_tile, tiles_per_query, tiles, tiles_per_slice] = plan.queries;
  EXPECT_EQ(queries_per_tile, 64 / padded_heads);
  EXPECT_GE(std::int64_t{padded_heads} * tiles_per_query, p.h_index);
  EXPECT_TRUE(queries_per_tile == 1 || tiles_per_query == 1);
  EXPECT_EQ(tiles % tiles_per_query, 0);
  EXPECT_GE(std::int64_t{tiles / tiles_per_query} * queries_per_tile, p.s_q);
  EXPECT_EQ(tiles_per_slice % tiles_per_query, 0);
  EXPECT_GE(plan.slices * std::int64_t{tiles_per_slice}, tiles);
  EXPECT_LT((plan.slices - 1) * std::int64_t{tiles_per_slice}, tiles);
  EXPECT_EQ(plan.key_blocks, (p.s_kv + kKeysPerCta - 1) / kKeysPerCta);
}

TEST(LightningIndexerPlan, ScoresOfAllTilesAreMadeOnce) {
  for (const int sms : kSms) {
    for (const std::int64_t h_index : {1, 8, 9, 16, 33, 64, 65, 200}) {
      for (const std::int64_t s_q : {1, 3, 512, 70'000}) {
        const auto p = forward(s_q, 5000, h_index, sms);
        SCOPED_TRACE(testing::Message() << sms << " SMs, " << h_index << " heads, " << s_q << " queries");
        expect_whole(plan_mma_score(p, s_q, kKeysPerCta), p);
        expect_whole(plan_wgmma_score(p, s_q, kKeysPerCta), p);
      }
    }
  }
}

TEST(LightningIndexerPlan, RowsOfAQueryFillATile) {
  const auto padded = [](std::int64_t h_index) {
    const auto p = forward(1, 100, h_index, 132);
    return std::pair{plan_mma_score(p, 1, kKeysPerCta).queries.padded_heads,
                     plan_wgmma_score(p, 1, kKeysPerCta).queries.padded_heads};
  };
  EXPECT_EQ(padded(1), std::pair(8, 8));
  EXPECT_EQ(padded(17), std::pair(24, 32));
  EXPECT_EQ(padded(64), std::pair(64, 64));
  EXPECT_EQ(padded(100), std::pair(64, 64));
}

// 512 queries of 8,192 keys: 22 blocks of keys.
TEST(LightningIndexerPlan, SlicesFillRoundsOfTheMultiprocessors) {
  const auto tiles_per_slice = [](int sms) {
    return plan_wgmma_score(forward(512, 8192, 64, sms), 512, kKeysPerCta).queries.tiles_per_slice;
  };
  EXPECT_EQ(tiles_per_slice(8), 512);
  EXPECT_EQ(tiles_per_slice(66), 171);
  EXPECT_EQ(tiles_per_slice(114), 103);
  EXPECT_EQ(tiles_per_slice(132), 86);
  EXPECT_EQ(tiles_per_slice(148), 40);
}

// One document of 512 in 32,768 keys, and as a call of its own: the same slices of its two blocks of keys, and CTAs for
// them.
TEST(LightningIndexerPlan, SlicesOfWhatIsSeenAreThoseOfACallOfItsOwn) {
  const std::int32_t range = 0;
  for (const int sms : kSms) {
    auto packed = forward(512, 32'768, 64, sms);
    packed.visibility.k_start = packed.visibility.k_end = &range;
    const auto plan = plan_wgmma_score(packed, 512, kKeysPerCta),
               alone = plan_wgmma_score(forward(512, 512, 64, sms), 512, kKeysPerCta);
    const int each = lightning_indexer::wgmma_groups_per_slice(2, 512, 1, sms);
    EXPECT_EQ(each, alone.queries.tiles_per_slice);
    EXPECT_GE(plan.key_blocks * plan.slices / 2, (512 + each - 1) / each) << sms;
  }
}

TEST(LightningIndexerPlan, ClustersOfFewQueriesHaveRoomForARow) {
  const auto cluster = [](std::int64_t s_kv, std::int64_t queries = 1) {
    const auto fit = [](int ctas) { return ctas == 8 ? 14 : ctas == 4 ? 31 : 66; };
    const auto plan = plan_cluster_select(forward(1, s_kv, 64, 132), queries, fit);
    return std::pair{plan.warps, int(plan.cluster)};
  };
  EXPECT_EQ(cluster(0), std::pair(0, 0)) << "a CTA is enough";
  EXPECT_EQ(cluster(4'095), std::pair(0, 0));
  EXPECT_EQ(cluster(4'096), std::pair(16, 8));
  EXPECT_EQ(cluster(262'144), std::pair(16, 8));
  EXPECT_EQ(cluster(262'145), std::pair(0, 0)) << "no cluster holds it";
  EXPECT_EQ(cluster(65'536, 14), std::pair(16, 8));
  EXPECT_EQ(cluster(65'536, 15), std::pair(16, 4)) << "clusters of eight would not run at the same time";
  EXPECT_EQ(cluster(65'536, 31), std::pair(16, 4));
  EXPECT_EQ(cluster(65'536, 32), std::pair(16, 2));
  EXPECT_EQ(cluster(65'537, 32), std::pair(0, 0)) << "two CTAs do not hold it";
  EXPECT_EQ(cluster(65'536, 67), std::pair(0, 0));
}

TEST(LightningIndexerPlan, FewQueriesHaveMoreWarpsEach) {
  for (const int sms : kSms) {
    EXPECT_EQ(plan_select(forward(1, 65'536, 64, sms), 2 * sms).warps, 32);
    EXPECT_EQ(plan_select(forward(1, 8192, 64, sms), 2 * sms).warps, 32);
    EXPECT_EQ(plan_select(forward(1, 8192, 64, sms), 2 * sms + 1).warps, 8);
    EXPECT_EQ(plan_select(forward(1, 65'536, 64, sms), 2 * sms + 1).warps, 32);
    EXPECT_EQ(plan_select(forward(1, 100, 64, sms), 1).warps, 1);
    EXPECT_EQ(plan_select(forward(1, 3'000, 64, sms), 1).warps, 8) << "a power of two";
  }
}

TEST(LightningIndexerPlan, RowsOfWhichASampleIsTakenFillTheMultiprocessors) {
  const auto warps = [](std::int64_t s_kv, std::int64_t queries) {
    return plan_sampled_select(forward(1, s_kv, 64, 132), queries).warps;
  };
  EXPECT_EQ(warps(4095, 1), 0) << "too short";
  EXPECT_EQ(warps(262'145, 128), 0) << "too long";
  EXPECT_EQ(warps(131'072, 128), 32);
  EXPECT_EQ(warps(65'536, 256), 16);
  EXPECT_EQ(warps(32'768, 512), 8);
  EXPECT_EQ(warps(8192, 529), 4);
}

TEST(LightningIndexerPlan, PassesHaveRoomInTheWorkspace) {
  for (const std::int64_t s_kv : {1, 8192, 1 << 20, 1 << 24}) {
    const auto p = forward(3000, s_kv, 64, 132);
    const auto plan = plan_of(p);
    std::int64_t next = 0;
    for_each_pass(p, plan, [&](std::int64_t first, std::int64_t count) {
      EXPECT_EQ(first, next);
      EXPECT_LE(4 * static_cast<std::size_t>(count * s_kv), plan.workspace_bytes);
      next += count;
    });
    EXPECT_EQ(next, p.s_q);
    const auto candidates = static_cast<std::size_t>(plan.parts > 1 ? plan.queries_at_a_time * plan.parts * p.topk : 0);
    EXPECT_LE(plan.workspace_bytes,
              std::max<std::size_t>(64 << 20, 32 * 4 * static_cast<std::size_t>(s_kv)) + 8 * candidates);
  }
}

lightning_indexer_backward::PassProblem backward(bool deterministic, int sms) {
  lightning_indexer_backward::PassProblem p;
  p.s_q = 100, p.s_kv = 1000, p.h_index = 65, p.d_index = 100, p.topk = 77, p.deterministic = deterministic;
  p.pass_queries = p.s_q;
  p.device.sms = sms;
  return p;
}

TEST(LightningIndexerBackwardPlan, WorkspaceHoldsItsParts) {
  const auto bytes = plan_of(backward(false, 132)).workspace_bytes;
  const auto floats = plan_of(backward(false, 132)).workspace;
  EXPECT_EQ(floats.gradients, 0U);
  EXPECT_EQ(floats.losses, 30'976U);  // 4 · 100 · 77 bytes, in whole 256
  EXPECT_EQ(floats.ungrouped, 30'976U + 1'024U);
  EXPECT_EQ(bytes, floats.ungrouped + 512U);
  const auto fixed = plan_of(backward(true, 132)).workspace;
  EXPECT_EQ(fixed.fixed_d_k, bytes);
  EXPECT_EQ(fixed.largest, fixed.fixed_d_k + 800'000U);
  EXPECT_EQ(fixed.count, fixed.largest + 4'096U);
  EXPECT_EQ(fixed.of_all, fixed.count + 4'096U);
  EXPECT_EQ(plan_of(backward(true, 132)).workspace_bytes, fixed.of_all + 256U);
}

TEST(LightningIndexerBackwardPlan, PassesFillTheDevice) {
  for (const int sms : kSms) {
    auto p = backward(false, sms);
    const auto plan = plan_of(p);
    EXPECT_EQ(plan.pass_ctas, std::min(391U, 8U * static_cast<unsigned>(sms)));  // 100,000 elements
    EXPECT_EQ(plan.head_tiles, 2);
    EXPECT_EQ(plan.column_blocks, 4);
    p.s_kv = 0;
    EXPECT_EQ(plan_of(p).pass_ctas, 0U);
  }
}

// Without indices, up to 64 heads: as many queries as have room in 128 rows, while each multiprocessor has a group.
TEST(LightningIndexerBackwardPlan, GroupsLeaveNoMultiprocessorWithoutWork) {
  auto p = backward(false, 132);
  p.indices = {};
  const auto group_of = [&p](std::int64_t heads, std::int64_t queries) {
    p.h_index = heads, p.s_q = p.pass_queries = queries;
    const auto plan = plan_of(p);
    EXPECT_EQ(plan.group_rows, heads > 64 ? 0 : heads > 32 ? 64 : heads > 16 ? 32 : 16);
    return plan.group;
  };
  EXPECT_EQ(group_of(16, 8 * 132), 8);
  EXPECT_EQ(group_of(32, 4 * 132), 4);
  EXPECT_EQ(group_of(64, 2 * 132), 2);
  EXPECT_EQ(group_of(65, 8 * 132), 1);
  EXPECT_EQ(group_of(32, 264), 2);
  EXPECT_EQ(group_of(32, 263), 2) << "the last group is not whole";
  EXPECT_EQ(group_of(32, 262), 1);
  EXPECT_EQ(group_of(1, 1), 1);
}

}  // namespace
}  // namespace hopwell::ops
