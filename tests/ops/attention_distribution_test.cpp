// attention_distribution: bad input, and what case descriptions cannot express.
#include <cmath>
#include <cstring>
#include <limits>

#include "ops/attention_distribution/plan.hpp"
#include "sparse_mla_problem.hpp"

namespace hopwell {
namespace {

using test::error_of;
using test::SparseMlaProblem;

std::string message(SparseMlaProblem& p, const std::function<void(AttentionDistributionArgs&)>& change) {
  AttentionDistributionArgs args = p.distribution();
  change(args);
  return error_of([&] { attention_distribution(args); });
}

TEST(AttentionDistribution, BadInputIsRefusedWithOutputsUntouched) {
  SparseMlaProblem p;
  test::expect_common_errors("attention_distribution", p, [&](const auto& change) { return message(p, change); });
  const auto expect = [&](const std::function<void(AttentionDistributionArgs&)>& change, const std::string& text) {
    EXPECT_EQ(message(p, change), "attention_distribution: " + text);
  };
  expect([](auto& a) { a.lse = nullptr; }, "lse must be float32 [s_q=3, h_q=2]; got nothing");
  expect([](auto& a) { a.out = nullptr; }, "out must be float32 [s_q=3, topk=4]; got nothing");
  expect([&](auto& a) { a.out = p.view(p.attn, {4, 3}); }, "out must be float32 [s_q=3, topk=4]; got float32 [4, 3]");
  expect([](auto& a) { std::memset(&a.normalize, 1, sizeof a.normalize); },
         "normalize must be none or l1; got 16843009");
  EXPECT_TRUE(SparseMlaProblem::all_untouched(p.attn));
}

TEST(AttentionDistribution, EveryRowSumsToTheNumberOfHeadsOrToOne) {
  SparseMlaProblem p;
  sparse_mla_forward(p.forward());
  AttentionDistributionArgs args = p.distribution();
  for (const auto& [normalize, expected] :
       {std::pair{HOPWELL_NORMALIZE_NONE, 2.0}, std::pair{HOPWELL_NORMALIZE_L1, 1.0}}) {
    args.normalize = normalize;
    attention_distribution(args);
    for (std::size_t s = 0; s < 3; ++s) {
      double sum = 0;
      for (std::size_t i = 0; i < 4; ++i) sum += static_cast<double>(p.attn[s * 4 + i]);
      EXPECT_NEAR(sum, expected, 1e-5);
    }
  }
}

// Ranks that hold slices of the heads add their results.
TEST(AttentionDistribution, SlicesOfTheHeadsAddUp) {
  SparseMlaProblem p, slice;
  sparse_mla_forward(p.forward());
  attention_distribution(p.distribution());
  std::vector<float> sum(12, 0.0F);
  for (const std::size_t h : {0U, 1U}) {
    const Tensor q(p.q.data() + h * 8, {3, 1, 8}, {.strides = {16, 8, 1}}),
        lse(p.lse.data() + h, {3, 1}, {.strides = {2, 1}});
    AttentionDistributionArgs args = slice.distribution();
    args.q = q, args.lse = lse;
    attention_distribution(args);
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += slice.attn[i];
  }
  for (std::size_t i = 0; i < sum.size(); ++i)
    EXPECT_NEAR(static_cast<double>(sum[i]), static_cast<double>(p.attn[i]), 1e-6);
}

TEST(AttentionDistribution, AnEmptyRowsLseGivesZero) {
  SparseMlaProblem p;
  sparse_mla_forward(p.forward());
  std::fill(p.lse.begin(), p.lse.end(), std::numeric_limits<float>::infinity());
  AttentionDistributionArgs args = p.distribution();
  for (const auto normalize : {HOPWELL_NORMALIZE_NONE, HOPWELL_NORMALIZE_L1}) {
    args.normalize = normalize;
    attention_distribution(args);
    EXPECT_EQ(p.attn, std::vector<float>(12, 0.0F));
  }
}

TEST(AttentionDistribution, ZeroMeansTheDefaultInC) {
  SparseMlaProblem p, c;
  sparse_mla_forward(p.forward());
  c.lse = p.lse;
  attention_distribution(p.distribution());
  const AttentionDistributionArgs cpp = c.distribution();
  hopwell_attention_distribution_args args{};
  args.q = cpp.q, args.kv = cpp.kv, args.indices = cpp.indices, args.lse = cpp.lse, args.sm_scale = cpp.sm_scale;
  args.out = cpp.out;
  ASSERT_EQ(hopwell_attention_distribution(&args, nullptr), HOPWELL_OK) << hopwell_last_error();
  EXPECT_EQ(c.attn, p.attn);
  std::size_t bytes = 7;
  EXPECT_EQ(hopwell_attention_distribution_workspace_bytes(&args, &bytes), HOPWELL_OK);
  EXPECT_EQ(bytes, 0U);
}

TEST(AttentionDistribution, SameBitsForAnyNumberOfThreads) {
  test::expect_same_bits_for_any_threads(test::suite_of("attention_distribution"), test::cut_into_items);
}

// Every entry of every row belongs to one work tile, whatever the number of multiprocessors.
TEST(AttentionDistribution, PlansCoverEveryEntryOnce) {
  using namespace ops::attention_distribution;
  for (const int sms : {1, 8, 66, 114, 132, 148}) {
    for (const auto& [s_q, topk] : {std::pair{1, 1}, {3, 2048}, {131, 64}, {132, 2000}, {133, 65}, {400, 257}}) {
      for (const bool normalize_l1 : {false, true}) {
        Problem problem;
        problem.s_q = s_q, problem.topk = topk, problem.h_q = 64, problem.normalize_l1 = normalize_l1;
        problem.device.sms = sms;
        const Plan plan = plan_of(problem);
        EXPECT_TRUE(plan.alternate);
        EXPECT_EQ(plan.ctas, std::min(plan.work_tiles, sms));
        std::vector<int> covered(static_cast<std::size_t>(s_q));  // entries of each row so far
        for (int number = 0; number < plan.work_tiles; ++number) {
          const WorkTile work = work_tile_of(plan, topk, number);
          int& row = covered.at(static_cast<std::size_t>(work.query));
          EXPECT_EQ(work.first, row);
          EXPECT_GT(work.size, 0);
          EXPECT_TRUE(work.size == topk || (work.first % kTileKeys == 0 && !normalize_l1));
          row += work.size;
        }
        EXPECT_EQ(covered, std::vector<int>(static_cast<std::size_t>(s_q), topk));
      }
    }
  }
}

TEST(AttentionDistribution, PlansSplitRowsOfTheLastRoundOnly) {
  using namespace ops::attention_distribution;
  Problem problem;
  problem.s_q = 4096, problem.topk = 2048, problem.h_q = 128, problem.device.sms = 132;
  const Plan plan = plan_of(problem);
  EXPECT_FALSE(plan.alternate);
  EXPECT_EQ(plan.whole_queries, 31 * 132);
  EXPECT_EQ(plan.splits, 32);  // four rows, 32 tiles of keys in each, for 132 CTAs
  EXPECT_EQ(plan.split_entries, 64);
  EXPECT_EQ(plan.work_tiles, 31 * 132 + 4 * 32);
  problem.topk = 0;
  EXPECT_EQ(plan_of(problem).work_tiles, 4096);
}

// Rows are brought into ascending order where many queries read keys that do not fit in L2, and memory would bind.
TEST(AttentionDistribution, OrdersRowsWhereMemoryBinds) {
  using namespace ops::attention_distribution;
  const std::int32_t index = 0;
  Problem p;
  p.s_q = 4096, p.s_kv = 64 << 10, p.topk = 2048, p.h_q = 64, p.d_qk = 576;
  p.selection.indices = &index;
  p.device = {.location = {kDLCUDA, 0},
              .capability = 90,
              .sms = 132,
              .l2_bytes = std::size_t{50} << 20,
              .memory_bytes_per_ns = 3352};
  const auto with = [&p](auto change) {
    Problem changed = p;
    change(changed);
    return ordering_of(changed);
  };
  EXPECT_TRUE(ordering_of(p).orders_rows && ordering_of(p).throttles);
  EXPECT_EQ(ordering_of(p).steps, 8);
  EXPECT_EQ(ordering_of(p).bytes, 4096 * 2048 * 6 + 4096 * 4 + 256);
  EXPECT_FALSE(with([](Problem& x) { x.h_q = 128; }).throttles);
  EXPECT_TRUE(with([](Problem& x) { x.h_q = 128; }).orders_rows);
  const auto orders = [&](double bytes_per_ns, std::int64_t h_q, std::int64_t s_kv) {
    return with([=](Problem& x) { x.device.memory_bytes_per_ns = bytes_per_ns, x.h_q = h_q, x.s_kv = s_kv; })
        .orders_rows;
  };
  p.device.l2_bytes = std::size_t{60} << 20;  // an H200
  EXPECT_TRUE(orders(4917, 64, 64 << 10) && orders(4917, 64, 128 << 10));
  EXPECT_FALSE(orders(4917, 128, 128 << 10) || orders(4917, 64, 32 << 10) || orders(0, 64, 128 << 10));
  p.device.memory_bytes_per_ns = 4917;
  EXPECT_FALSE(with([](Problem& x) { x.s_kv = 64 << 10; }).throttles ||
               with([](Problem& x) { x.s_kv = 96 << 10; }).throttles);
  EXPECT_TRUE(with([](Problem& x) { x.s_kv = 128 << 10; }).throttles);
  p.indices_ascending = true;  // order is what throttling needs, and nothing else does
  EXPECT_FALSE(ordering_of(p).orders_rows || with([](Problem& x) { x.s_kv = 96 << 10; }).orders_rows);
  EXPECT_TRUE(with([](Problem& x) { x.s_kv = 128 << 10; }).throttles);
  p.indices_ascending = false;
  for (const Ordering& none : {with([](Problem& x) { x.s_kv = 32 << 10; }), with([](Problem& x) { x.s_q = 131; }),
                               with([](Problem& x) { x.topk = 255; }), with([](Problem& x) { x.topk = 4097; }),
                               with([](Problem& x) { x.selection.indices = nullptr; })}) {
    EXPECT_FALSE(none.orders_rows || none.throttles);
    EXPECT_EQ(none.bytes, 0);
  }
}

}  // namespace
}  // namespace hopwell
