// The plan of sparse_mla_backward on devices of many sizes: all work once, nothing in the workspace twice.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "ops/sparse_mla_backward/plan.hpp"

namespace hopwell::ops::sparse_mla_backward {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr MainKernels kHopper{64, 64, 128, false}, kDeterministicPairs{64, 64, 128, true}, kAmpere{16, 32},
    kMergesRows{64, 64, 128, false, true}, kStreamsKeys{64, 64, 128, false, true, true};
constexpr int kSms[] = {8, 66, 114, 132, 148};

View view(DType dtype, std::initializer_list<std::int64_t> shape) {
  static float somewhere[4];  // aligned; nothing is read or written
  View v;
  v.data = somewhere, v.dtype = dtype, v.present = true;
  for (const std::int64_t size : shape) v.shape.at(static_cast<std::size_t>(v.ndim++)) = size;
  std::int64_t stride = 1;
  for (int i = v.ndim - 1; i >= 0; --i)
    v.stride.at(static_cast<std::size_t>(i)) = stride, stride *= v.shape.at(static_cast<std::size_t>(i));
  return v;
}

Problem problem_of(std::int64_t s_q, std::int64_t h_q, std::int64_t s_kv, std::int64_t topk, int sms) {
  Problem p;
  p.s_q = s_q, p.h_q = h_q, p.s_kv = s_kv, p.topk = topk, p.d_qk = 576, p.d_v = 512;
  p.q = p.dq = view(DType::kBFloat16, {s_q, h_q, 576});
  p.kv = view(DType::kBFloat16, {s_kv, 576});
  p.out = p.d_out = view(DType::kBFloat16, {s_q, h_q, 512});
  p.dkv = view(DType::kFloat32, {s_kv, 576});
  p.device = {.location = {kDLCUDA, 0}, .capability = 90, .sms = sms, .l2_bytes = 60 * kMiB};
  return p;
}

// Every head of every query meets every entry of its row once.
void expect_all_work_once(const Problem& p, const Plan& plan) {
  const auto entries = static_cast<int>(p.topk + p.window.most_keys());
  std::map<std::pair<int, int>, std::vector<std::pair<int, int>>> ranges;  // of entries, by query and 64 heads
  for (const MainPass& pass : {plan.pairs, plan.singles}) {
    int first_slice = 0;
    for (int cluster = 0; cluster < pass.clusters(); ++cluster) {
      const WorkTile work = work_tile_of(pass, cluster, pass.heads);
      ASSERT_TRUE(work.query >= 0 && work.query < p.s_q);
      ASSERT_TRUE(work.first_head >= 0 && work.first_head < p.h_q);
      ASSERT_EQ(work.split, cluster < pass.whole_tiles ? -1 : first_slice++);
      const int end = work.split < 0 ? entries : work.first_entry + pass.split_entries;
      for (int head = work.first_head; head < work.first_head + pass.heads; head += 64)
        ranges[{work.query, head}].emplace_back(work.first_entry, std::min(end, entries));
    }
  }
  for (int query = 0; query < p.s_q; ++query) {
    for (int head = 0; head < p.h_q; head += 64) {
      auto& of_head = ranges[{query, head}];
      std::sort(of_head.begin(), of_head.end());
      int covered = 0;
      for (const auto& [first, end] : of_head) {
        ASSERT_LT(first, end) << query << ' ' << head;  // no empty split
        ASSERT_EQ(first, covered) << query << ' ' << head;
        covered = end;
      }
      ASSERT_EQ(covered, entries) << query << ' ' << head;
    }
  }
}

TEST(SparseMlaBackwardPlan, AllWorkOnce) {
  for (const int sms : kSms)
    for (const std::int64_t s_q : {1, 3, 65, 133, 300})
      for (const std::int64_t h_q : {1, 64, 65, 128, 129, 192, 200})
        for (const std::int64_t topk : {1, 64, 200, 2048})
          for (const bool deterministic : {false, true})
            for (const MainKernels& kernels : {kHopper, kDeterministicPairs}) {
              Problem p = problem_of(s_q, h_q, 8192, topk, sms);
              p.deterministic = deterministic;
              expect_all_work_once(p, make_plan(p, kernels));
            }
}

TEST(SparseMlaBackwardPlan, HeadsGoToPairsFirst) {
  const auto blocks = [](std::int64_t h_q, bool deterministic, const MainKernels& kernels) {
    Problem p = problem_of(10, h_q, 1000, 64, 132);
    p.deterministic = deterministic;
    const Plan plan = make_plan(p, kernels);
    return std::pair{plan.pairs.head_blocks, plan.singles.head_blocks};
  };
  using Blocks = std::pair<int, int>;
  EXPECT_EQ(blocks(16, false, kHopper), Blocks(0, 1));
  EXPECT_EQ(blocks(64, false, kHopper), Blocks(0, 1));
  EXPECT_EQ(blocks(65, false, kHopper), Blocks(1, 0));
  EXPECT_EQ(blocks(128, false, kHopper), Blocks(1, 0));
  EXPECT_EQ(blocks(192, false, kHopper), Blocks(1, 1));
  EXPECT_EQ(blocks(256, false, kHopper), Blocks(2, 0));
  EXPECT_EQ(blocks(128, true, kHopper), Blocks(0, 2));
  EXPECT_EQ(blocks(128, true, kDeterministicPairs), Blocks(1, 0));
}

TEST(SparseMlaBackwardPlan, SplitsFillTheLastWave) {
  for (const int sms : kSms) {
    for (const std::int64_t h_q : {64, 128}) {
      for (std::int64_t s_q = 1; s_q <= 400; ++s_q) {
        const Problem p = problem_of(s_q, h_q, 32768, 2048, sms);
        const Plan plan = make_plan(p, kHopper);
        const MainPass& pass = h_q == 64 ? plan.singles : plan.pairs;
        const int at_a_time = sms / pass.ctas;
        ASSERT_EQ(pass.whole_tiles + pass.split_tiles, s_q);
        ASSERT_LE(pass.splits, 8);
        if (pass.splits == 1) continue;
        EXPECT_EQ(pass.whole_tiles % at_a_time, 0);
        EXPECT_LE(pass.split_tiles * pass.splits, at_a_time);
        EXPECT_EQ(pass.split_entries % 64, 0);
        EXPECT_LE(plan.workspace_bytes, 4UL * 32768 * 576 + (4UL * 2048 + 4) * 400 + 2048);
      }
    }
  }
  // 4,096 queries on a whole H200: 31 waves and 4 tiles, or 62 and 4.
  const Plan single = make_plan(problem_of(4096, 64, 8192, 2048, 132), kHopper),
             pair = make_plan(problem_of(4096, 128, 8192, 2048, 132), kHopper);
  EXPECT_EQ(single.singles.split_tiles, 4);
  EXPECT_EQ(single.singles.splits, 8);
  EXPECT_EQ(pair.pairs.split_tiles, 4);
  EXPECT_EQ(pair.pairs.splits, 8);
  EXPECT_EQ(single.workspace_bytes, 4UL * 4 * 8 * 64 * 576);
}

// 10 steps in 8 splits are 2 steps each, for which 5 splits are enough.
TEST(SparseMlaBackwardPlan, NoSplitIsEmpty) {
  const Plan plan = make_plan(problem_of(1, 64, 8192, 640, 132), kHopper);
  EXPECT_EQ(plan.singles.split_entries, 128);
  EXPECT_EQ(plan.singles.splits, 5);
  EXPECT_EQ(make_plan(problem_of(1, 64, 8192, 0, 132), kHopper).singles.splits, 1);
}

// Sums that are not in the output must be added to in any case, so splits would add nothing but dq's memory.
TEST(SparseMlaBackwardPlan, NoSplitsWhereSumsAreInTheWorkspace) {
  Problem p = problem_of(133, 64, 8192, 2048, 132);
  EXPECT_GT(make_plan(p, kHopper).singles.splits, 1);
  p.accumulate = true;
  EXPECT_EQ(make_plan(p, kHopper).singles.splits, 1);
  p.accumulate = false, p.deterministic = true;
  EXPECT_EQ(make_plan(p, kHopper).singles.splits, 1);
}

TEST(SparseMlaBackwardPlan, WhereDkvIsSummed) {
  const auto sums = [](const auto& change) {
    Problem p = problem_of(10, 64, 1000, 64, 132);
    change(p);
    return make_plan(p, kHopper).dkv_accum;
  };
  EXPECT_EQ(sums([](Problem&) {}), DkvAccum::output);
  EXPECT_EQ(sums([](Problem& p) { p.dkv = {}; }), DkvAccum::none);
  EXPECT_EQ(sums([](Problem& p) { p.accumulate = true; }), DkvAccum::scratch);
  EXPECT_EQ(sums([](Problem& p) { p.dkv.dtype = DType::kBFloat16; }), DkvAccum::scratch);
  EXPECT_EQ(sums([](Problem& p) { p.dkv.stride[0] = 577; }), DkvAccum::scratch);
  EXPECT_EQ(sums([](Problem& p) { p.dkv.data = static_cast<char*>(p.dkv.data) + 4; }), DkvAccum::scratch);
  EXPECT_EQ(sums([](Problem& p) { p.deterministic = true; }), DkvAccum::fixed_point);
  EXPECT_EQ(sums([](Problem& p) { p.deterministic = true, p.topk = 0; }), DkvAccum::output);
}

Problem with_window(std::int64_t s_q) {
  Problem p = problem_of(s_q, 64, 2048, 512, 132);
  p.window = {.size = 128, .s_q = s_q, .s_w = s_q + 127};
  p.window_kv = view(DType::kBFloat16, {s_q + 127, 576});
  p.d_window_kv = view(DType::kFloat32, {s_q + 127, 576});
  return p;
}

TEST(SparseMlaBackwardPlan, WindowKeysAreEntriesAndRowsOfTheSums) {
  Problem p = with_window(133);
  const std::int64_t rows = 2048 + 133 + 127;
  const Plan plan = make_plan(p, kHopper);
  EXPECT_EQ(plan.dkv_accum, DkvAccum::scratch);
  EXPECT_GT(plan.singles.splits, 1);
  expect_all_work_once(p, plan);
  EXPECT_EQ(plan.workspace_bytes, static_cast<std::size_t>(4 * rows * 576 + 4 * 64 * 576 * plan.singles.splits));
  EXPECT_FALSE(unsupported(p, plan));
  p.window_kv.stride[0] = std::int64_t{1} << 40;
  EXPECT_EQ(unsupported(p, plan)->reason, "needs the row stride of window_kv below 2^31");
  p.window_kv.stride[0] = 577;
  EXPECT_EQ(unsupported(p, plan)->reason, "needs rows of window_kv 16-byte aligned");
  p.dkv = {};
  EXPECT_EQ(make_plan(p, kHopper).dkv_accum, DkvAccum::scratch);
  p.d_window_kv = {};
  EXPECT_EQ(make_plan(p, kHopper).dkv_accum, DkvAccum::none);
}

TEST(SparseMlaBackwardPlan, DeterministicWindowKeysAreBoundedByTheirDistribution) {
  Problem p = with_window(4096);
  p.deterministic = true;
  const Plan plan = make_plan(p, kHopper);
  EXPECT_EQ(plan.dkv_accum, DkvAccum::fixed_point);
  EXPECT_TRUE(plan.bound_distribution && plan.window_distribution);
  // The index rows and attn of the window keys take no memory: the sums will be there.
  const std::size_t sums = plan.workspace.dkv, end = sums + 4UL * (2048 + 4096 + 127) * 576;
  EXPECT_GE(plan.workspace.window_rows, sums);
  EXPECT_GE(plan.workspace.window_attn, plan.workspace.window_rows + 4UL * 4096 * 128);
  EXPECT_LE(plan.workspace.window_attn + 4UL * 4096 * 128, end);
  EXPECT_GE(plan.workspace.scale, end);
  p.topk = 0;
  const Plan alone = make_plan(p, kHopper);
  EXPECT_EQ(alone.dkv_accum, DkvAccum::fixed_point);
  EXPECT_TRUE(!alone.bound_distribution && alone.window_distribution && !alone.orders_rows);
}

// With a sink, attn without it is not the distribution that bounds the sums of dkv.
TEST(SparseMlaBackwardPlan, SumsAreBoundedByTheDistributionWithTheSink) {
  struct Distributions {
    bool attn, bounds;
    bool operator==(const Distributions&) const = default;
  };
  const auto distributions = [](bool attn, bool sink, bool attn_with_sink) {
    Problem p = problem_of(64, 64, 2048, 512, 132);
    p.deterministic = true, p.attn_with_sink = attn_with_sink;
    if (attn) p.attn = view(DType::kFloat32, {64, 512});
    if (sink) p.attn_sink = view(DType::kFloat32, {64});
    const Plan plan = make_plan(p, kHopper);
    return Distributions{plan.distribution, plan.bound_distribution};
  };
  EXPECT_EQ(distributions(false, false, false), (Distributions{false, true}));
  EXPECT_EQ(distributions(false, true, false), (Distributions{false, true}));
  EXPECT_EQ(distributions(true, false, false), (Distributions{true, false}));
  EXPECT_EQ(distributions(true, true, true), (Distributions{true, false}));
  EXPECT_EQ(distributions(true, true, false), (Distributions{true, true}));
}

TEST(SparseMlaBackwardPlan, OrderAndThrottleFollowL2) {
  const auto plan = [](std::int64_t s_kv, int sms, std::size_t l2_bytes) {
    Problem p = problem_of(4096, 64, s_kv, 2048, sms);
    p.device.l2_bytes = l2_bytes;
    return make_plan(p, kHopper);
  };
  for (const int sms : kSms) {
    EXPECT_FALSE(plan(8 << 10, sms, 60 * kMiB).ascending);
    for (const std::int64_t s_kv : {32 << 10, 64 << 10, 128 << 10}) {
      const Plan large = plan(s_kv, sms, 60 * kMiB);
      EXPECT_TRUE(large.ascending && large.orders_rows && large.throttles);
      EXPECT_EQ(large.max_lead, s_kv == 32 << 10 ? 3 : 1);
    }
    EXPECT_FALSE(plan(32 << 10, sms, 126 * kMiB).ascending);
    EXPECT_TRUE(plan(8 << 10, sms, 10 * kMiB).ascending);
  }
  Problem ascending = problem_of(4096, 64, 32 << 10, 8192, 132);
  EXPECT_FALSE(make_plan(ascending, kHopper).ascending);  // too long to be put in order
  ascending.indices_ascending = true;
  EXPECT_TRUE(make_plan(ascending, kHopper).throttles);
  EXPECT_FALSE(make_plan(ascending, kHopper).orders_rows);
}

// Devices as plans see them: an A100, H100, H200 and B200, a split of an H100, the emulator, and the emulator as an
// H100.
std::vector<runtime::Device> devices() {
  const auto card = [](int capability, int sms, std::size_t l2_mib, double bytes_per_ns, DLDeviceType type = kDLCUDA) {
    return runtime::Device{.location = {type, 0},
                           .capability = capability,
                           .sms = sms,
                           .cluster_sms = sms,
                           .l2_bytes = l2_mib * kMiB,
                           .memory_bytes_per_ns = bytes_per_ns};
  };
  return {card(80, 108, 40, 1555),        card(90, 132, 50, 3352), card(90, 132, 60, 4917),
          card(100, 148, 126, 7672),      card(90, 16, 6, 419),    runtime::host_device({kDLCPU, 0}),
          card(90, 132, 50, 3352, kDLCPU)};
}

// What of a plan decides in which order the keys of a query are taken, and how its dq is added up.
struct OrderOfDq {
  bool orders_rows;
  int serpentine_tiles, split_tiles, pair_blocks, single_blocks;
  std::int64_t groups;
  bool operator==(const OrderOfDq&) const = default;
};
OrderOfDq order_of_dq(const Problem& p, const MainKernels& kernels) {
  const Plan plan = make_plan(p, kernels);
  return {plan.orders_rows,       plan.serpentine_tiles,    plan.pairs.split_tiles + plan.singles.split_tiles,
          plan.pairs.head_blocks, plan.singles.head_blocks, plan.groups.count};
}

TEST(SparseMlaBackwardPlan, DeterministicDqDependsOnItsRowAlone) {
  static const std::int32_t index = 0;  // is not read
  for (const MainKernels& kernels : {kStreamsKeys, kDeterministicPairs, kAmpere})
    for (const std::int64_t h_q : {1, 16, 20, 64, 128, 192})
      for (const std::int64_t s_kv : {100, 8192, 20'000, 60'000, 140'000})
        for (const std::int64_t topk : {1, 255, 2048, 5000})
          for (const bool ascending : {false, true}) {
            Problem alone = problem_of(1, h_q, s_kv, topk, 132);
            alone.deterministic = true, alone.indices_ascending = ascending, alone.dkv = {};
            alone.selection.indices = &index;
            const OrderOfDq expected = order_of_dq(alone, kernels);
            EXPECT_TRUE(expected.orders_rows == !ascending && expected.serpentine_tiles == 0 &&
                        expected.split_tiles == 0 && expected.groups == 0);
            for (const runtime::Device& device : devices())
              for (const std::int64_t s_q : {1, 2, 131, 132, 133, 700})
                for (const bool dkv : {false, true})
                  for (const bool attn : {false, true})
                    for (const bool share_keys : {false, true}) {
                      Problem p = problem_of(s_q, h_q, s_kv, topk, 132);
                      p.deterministic = true, p.indices_ascending = ascending, p.share_keys = share_keys;
                      p.selection.indices = &index, p.device = device;
                      if (!dkv) p.dkv = {};
                      if (attn) p.attn = view(DType::kFloat32, {s_q, topk});
                      ASSERT_EQ(order_of_dq(p, kernels), expected)
                          << s_q << " queries, " << h_q << " heads, " << s_kv << " keys, topk " << topk << ", sms "
                          << device.sms << ", dkv " << dkv << ", attn " << attn;
                    }
          }
}

// A row that ascends begins with entries that are not valid if its query has a k_start.
TEST(SparseMlaBackwardPlan, DeterministicRowsWithAStartAreOrderedDespiteTheHint) {
  static const std::int32_t number = 0;  // is not read
  Problem p = problem_of(5, 64, 1024, 80, 132);
  p.deterministic = p.indices_ascending = true, p.selection.indices = &number;
  EXPECT_FALSE(make_plan(p, kHopper).orders_rows);
  p.selection.visibility.k_start = p.selection.visibility.k_end = &number;
  EXPECT_TRUE(make_plan(p, kHopper).orders_rows);
  p.deterministic = false;
  EXPECT_FALSE(make_plan(p, kHopper).orders_rows);
  p.deterministic = true, p.selection.indices = nullptr;  // the entries are the visible keys
  EXPECT_FALSE(make_plan(p, kHopper).orders_rows);
}

// One CTA does not clear the sums of all keys.
TEST(SparseMlaBackwardPlan, FewQueriesDoNotClearSumsWhileTheyAreOrdered) {
  const auto clears = [](std::int64_t s_q) {
    Problem p = problem_of(s_q, 64, 140'000, 2048, 132);
    p.deterministic = true;
    const Plan plan = make_plan(p, kHopper);
    EXPECT_TRUE(plan.orders_rows);
    EXPECT_EQ(plan.throttles, s_q >= 132);
    return plan.order_clears_dkv_accum;
  };
  EXPECT_FALSE(clears(1));
  EXPECT_FALSE(clears(131));
  EXPECT_TRUE(clears(132));
}

TEST(SparseMlaBackwardPlan, WavesTurnWhereOneKernelHasOrderedRows) {
  const auto serpentine_tiles = [](std::int64_t h_q, std::int64_t s_kv, auto change) {
    Problem p = problem_of(4096, h_q, s_kv, 2048, 132);
    change(p);
    return make_plan(p, kMergesRows).serpentine_tiles;
  };
  const auto as_it_is = [](Problem&) {};
  EXPECT_EQ(serpentine_tiles(64, 65536, as_it_is), 132);
  EXPECT_EQ(serpentine_tiles(128, 65536, as_it_is), 66);
  EXPECT_EQ(serpentine_tiles(160, 65536, as_it_is), 0);  // a pair, and a CTA for the remaining heads
  EXPECT_EQ(serpentine_tiles(64, 8192, as_it_is), 0);
  EXPECT_EQ(serpentine_tiles(64, 65536, [](Problem& p) { p.indices_ascending = true; }), 0);
  EXPECT_EQ(serpentine_tiles(64, 65536, [](Problem& p) { p.deterministic = true; }), 0);
}

// By the bandwidth of an H200 and an H100: where sums miss L2; where memory is busy half of the time keys leave it
// first, and CTAs stay closer together.
TEST(SparseMlaBackwardPlan, FetchesSumsAheadWhereItPays) {
  const auto plan = [](double bytes_per_ns, std::int64_t h_q, std::int64_t s_kv, bool share_keys = false,
                       const MainKernels& kernels = kStreamsKeys) {
    Problem p = problem_of(4096, h_q, s_kv, 2048, 132);
    p.device.l2_bytes = 50 * kMiB, p.device.memory_bytes_per_ns = bytes_per_ns, p.share_keys = share_keys;
    return make_plan(p, kernels);
  };
  for (const double bytes_per_ns : {4917.0, 3352.0}) {
    const bool h100 = bytes_per_ns < 4000;
    for (const std::int64_t h_q : {64, 128})
      for (const std::int64_t s_kv : {8 << 10, 32 << 10})
        EXPECT_FALSE(plan(bytes_per_ns, h_q, s_kv).prefetch_dkv_accum);
    for (const std::int64_t h_q : {64, 128}) {
      EXPECT_EQ(plan(bytes_per_ns, h_q, 64 << 10).prefetch_dkv_accum, h100 || h_q == 64);
      EXPECT_TRUE(plan(bytes_per_ns, h_q, 128 << 10).prefetch_dkv_accum);
      for (const std::int64_t s_kv : {8 << 10, 32 << 10, 64 << 10, 128 << 10}) {
        const bool streams = h_q == 64 && s_kv == 128 << 10;
        EXPECT_EQ(plan(bytes_per_ns, h_q, s_kv).kv_evict_first, streams);
        EXPECT_EQ(plan(bytes_per_ns, h_q, s_kv).max_lead == 0, streams);
      }
    }
  }
  EXPECT_FALSE(plan(0, 64, 128 << 10).prefetch_dkv_accum);
  for (const std::int64_t h_q : {64, 128}) {  // kernels that cannot, and the pair, where memory is as busy
    const std::int64_t s_kv = h_q == 64 ? 128 << 10 : 512 << 10;
    const Plan busy = plan(h_q == 64 ? 3352 : 1600, h_q, s_kv, false, h_q == 64 ? kHopper : kStreamsKeys);
    EXPECT_FALSE(busy.prefetch_dkv_accum);
    EXPECT_FALSE(busy.kv_evict_first);
    EXPECT_EQ(busy.max_lead, 1);
  }
  // Deterministic calls without pairs run the single kernel for all heads.
  Problem p = problem_of(4096, 128, 128 << 10, 2048, 132);
  p.device.memory_bytes_per_ns = 4917, p.deterministic = true;
  EXPECT_TRUE(make_plan(p, kStreamsKeys).kv_evict_first);
  p.deterministic = false;
  EXPECT_FALSE(make_plan(p, kStreamsKeys).kv_evict_first);

  const Plan shared = plan(3352, 16, 128 << 10, true);  // neighbours' keys meet in L2
  EXPECT_TRUE(shared.prefetch_dkv_accum);
  EXPECT_FALSE(shared.kv_evict_first);
}

// Adds up what a call needs, and sees that no two things share memory but those that may.
TEST(SparseMlaBackwardPlan, NothingInTheWorkspaceTwice) {
  for (const bool deterministic : {false, true}) {
    for (const bool attn : {false, true}) {
      for (const bool accumulate : {false, true}) {
        Problem p = problem_of(300, 192, 32 << 10, 2048, 132);
        p.deterministic = deterministic, p.accumulate = accumulate;
        p.attn_sink = p.d_sink = view(DType::kFloat32, {192});
        if (attn) p.attn = view(DType::kFloat32, {300, 2048});
        const Plan plan = make_plan(p, kHopper);
        const Workspace& w = plan.workspace;
        std::vector<std::pair<std::size_t, std::size_t>> parts = {
            {w.rows, 4UL * 300 * 2048}, {w.lengths, 4UL * 300}, {w.progress, 4UL}, {w.sink_parts, 4UL * 300 * 192}};
        if (deterministic || accumulate) parts.emplace_back(w.dkv, 4UL * 576 << 15);
        if (deterministic)
          for (const std::size_t offset : {w.scale, w.largest, w.count}) parts.emplace_back(offset, 4UL << 15);
        if (attn && !deterministic) parts.emplace_back(w.sources, 2UL * 300 * 2048);
        for (const MainPass& pass : {plan.pairs, plan.singles}) {
          const auto splits = static_cast<std::size_t>(pass.split_tiles * (pass.splits > 1 ? pass.splits : 0));
          EXPECT_LE(w.dq_splits + 4UL * 576 * splits * static_cast<std::size_t>(pass.heads), plan.workspace_bytes);
        }
        std::sort(parts.begin(), parts.end());
        for (std::size_t i = 0; i < parts.size(); ++i) {
          EXPECT_EQ(parts[i].first % 256, 0U);
          EXPECT_LE(parts[i].first + parts[i].second, i + 1 < parts.size() ? parts[i + 1].first : plan.workspace_bytes);
        }
      }
    }
  }
}

// Queries that may be taken in groups, of 132 multiprocessors.
Problem problem_of_groups(std::int64_t s_q, std::int64_t h_q, std::int64_t topk = 256) {
  static std::int32_t somewhere;  // nothing is read
  Problem p = problem_of(s_q, h_q, 8192, topk, 132);
  p.lse = view(DType::kFloat32, {s_q, h_q});
  p.selection.indices = &somewhere, p.share_keys = true;
  return p;
}

TEST(SparseMlaBackwardPlan, GroupsHoldAsManyQueriesAsFit) {
  const std::map<std::int64_t, int> members = {{1, 8}, {5, 8}, {8, 8}, {9, 7}, {16, 4}, {21, 3}, {24, 2}, {32, 2}};
  for (const auto& [h_q, count] : members) {
    for (const std::int64_t s_q : {2, 3, 7, 8, 9, 64, 1001}) {
      const Problem p = problem_of_groups(s_q, h_q);
      const Plan plan = make_plan(p, kMergesRows);
      const MainPass& groups = plan.grouped;
      if (s_q < count) {
        EXPECT_EQ(groups.clusters(), 0);
        continue;
      }
      ASSERT_EQ(groups.members, count) << h_q;
      EXPECT_EQ(groups.clusters(), s_q / count);
      EXPECT_LE(groups.members * h_q, groups.heads);
      std::vector<int> covered(static_cast<std::size_t>(s_q));
      for (int cluster = 0; cluster < groups.clusters(); ++cluster) {
        const WorkTile work = work_tile_of(groups, cluster, groups.heads);
        EXPECT_EQ(work.split, -1);
        EXPECT_EQ(work.first_head, 0);
        for (int member = 0; member < count; ++member)
          ++covered.at(static_cast<std::size_t>(work.query * count + member));
      }
      for (std::size_t query = 0; query < covered.size(); ++query)
        EXPECT_EQ(covered[query], query < static_cast<std::size_t>(s_q / count * count) ? 1 : 0);
      expect_all_work_once(p, plan);  // what is left to the other kernels is found out on the device
    }
  }
}

TEST(SparseMlaBackwardPlan, GroupsOnlyWhereTheyMayBe) {
  const auto has_groups = [](const auto& change, const MainKernels& kernels = kMergesRows) {
    Problem p = problem_of_groups(64, 16);
    change(p);
    return make_plan(p, kernels).groups.count > 0;
  };
  EXPECT_TRUE(has_groups([](Problem&) {}));
  EXPECT_FALSE(has_groups([](Problem&) {}, kHopper));
  EXPECT_FALSE(has_groups([](Problem& p) { p.share_keys = false; }));
  EXPECT_FALSE(has_groups([](Problem& p) { p.selection.indices = nullptr; }));
  EXPECT_FALSE(has_groups([](Problem& p) { p.attn = view(DType::kFloat32, {64, 256}); }));
  EXPECT_FALSE(has_groups([](Problem& p) { p.deterministic = true; }));
  EXPECT_TRUE(has_groups([](Problem& p) { p = problem_of_groups(64, 32); }));
  EXPECT_FALSE(has_groups([](Problem& p) { p = problem_of_groups(64, 33); }));
  EXPECT_FALSE(has_groups([](Problem& p) { p = problem_of_groups(64, 128); }));
  EXPECT_TRUE(has_groups([](Problem& p) { p = problem_of_groups(64, 16, 4096); }));
  EXPECT_FALSE(has_groups([](Problem& p) { p = problem_of_groups(64, 16, 4097); }));
  EXPECT_FALSE(has_groups([](Problem& p) { p = problem_of_groups(64, 16, 0); }));
  EXPECT_TRUE(has_groups([](Problem& p) { p.dq = {}; }));
  for (View Problem::* tensor : {&Problem::q, &Problem::out, &Problem::d_out, &Problem::lse, &Problem::dq}) {
    EXPECT_FALSE(has_groups([&](Problem& p) { (p.*tensor).stride[0] += 64; }));
    EXPECT_TRUE(has_groups([&](Problem& p) { (p.*tensor).stride[1] *= 2, (p.*tensor).stride[0] *= 2; }));
    EXPECT_TRUE(has_groups([&](Problem& p) {  // one head: queries are rows, however far apart
      p = problem_of_groups(64, 1);
      (p.*tensor).stride[0] += 64;
    }));
  }
}

TEST(SparseMlaBackwardPlan, GroupsHaveWorkspaceOfTheirOwn) {
  for (const bool accumulate : {false, true}) {
    Problem p = problem_of_groups(301, 16, 2048);
    p.s_kv = 32 << 10, p.kv = view(DType::kBFloat16, {p.s_kv, 576}), p.dkv = view(DType::kFloat32, {p.s_kv, 576});
    p.accumulate = accumulate;
    p.attn_sink = p.d_sink = view(DType::kFloat32, {16});
    const Plan plan = make_plan(p, kMergesRows);
    ASSERT_TRUE(plan.orders_rows && plan.throttles);
    EXPECT_EQ(plan.serpentine_tiles, 0);
    const Workspace& w = plan.workspace;
    const std::size_t entries = 75UL * 4 * 2048;
    const auto splits = static_cast<std::size_t>(plan.singles.split_tiles * plan.singles.splits);
    std::vector<std::pair<std::size_t, std::size_t>> parts = {{w.rows, 4UL * 301 * 2048},
                                                              {w.lengths, 4UL * 301},
                                                              {w.progress, 8UL},
                                                              {w.sink_parts, 4UL * 301 * 16},
                                                              {w.merged_rows.keys, 4 * entries},
                                                              {w.merged_rows.member_masks, entries},
                                                              {w.merged_rows.lengths, 4UL * 75}};
    if (accumulate) parts.emplace_back(w.dkv, 4UL * 576 << 15);
    if (splits > 0) parts.emplace_back(w.dq_splits, 4UL * 576 * 64 * splits);
    std::sort(parts.begin(), parts.end());
    for (std::size_t i = 0; i < parts.size(); ++i) {
      EXPECT_EQ(parts[i].first % 256, 0U);
      EXPECT_LE(parts[i].first + parts[i].second, i + 1 < parts.size() ? parts[i + 1].first : plan.workspace_bytes);
    }
  }
}

TEST(SparseMlaBackwardPlan, OnlyRowsThatAscendAreAddedToWhereTheyLie) {
  const auto sums = [](std::int64_t stride) {
    Problem p = problem_of(10, 64, 1000, 64, 132);
    p.dkv.stride[0] = stride;
    return make_plan(p, kHopper).dkv_accum;
  };
  EXPECT_EQ(sums(576), DkvAccum::output);
  EXPECT_EQ(sums(-576), DkvAccum::scratch);
  EXPECT_EQ(sums(std::int64_t{1} << 31), DkvAccum::scratch);
  EXPECT_EQ(sums(-(std::int64_t{1} << 33)), DkvAccum::scratch);
}

// 2^10 rows whose distance is 2^23 elements: 2^33 elements from the first row to the end.
TEST(SparseMlaBackwardPlan, RowsThatAreFarApartAreAddedToInTheWorkspace) {
  Problem p = problem_of(10, 64, 1 << 10, 64, 132);
  p.dkv.stride[0] = (1 << 23) - 4;
  EXPECT_EQ(make_plan(p, kHopper).dkv_accum, DkvAccum::output);
  p.dkv.stride[0] = 1 << 23;
  const Plan plan = make_plan(p, kHopper);
  EXPECT_EQ(plan.dkv_accum, DkvAccum::scratch);
  EXPECT_FALSE(unsupported(p, plan));
}

TEST(SparseMlaBackwardPlan, LimitsOfKernelsAreRefusedInWords) {
  const auto reason = [](const auto& change) {
    Problem p = problem_of(10, 64, 1000, 64, 132);
    change(p);
    const auto found = unsupported(p, make_plan(p, kHopper));
    return found ? found->reason : "";
  };
  EXPECT_EQ(reason([](Problem&) {}), "");
  EXPECT_EQ(reason([](Problem& p) { p.d_qk = 128; }), "needs d_qk 576 or 512");
  EXPECT_EQ(reason([](Problem& p) { p.d_v = 256; }), "needs d_v 512");
  EXPECT_EQ(reason([](Problem& p) { p.q.stride[1] = 577; }), "needs rows of q, kv, out, d_out and dq 16-byte aligned");
  EXPECT_EQ(reason([](Problem& p) { p.s_kv = 15 << 20; }),
            "needs dkv with fewer than 2^33 elements, 2^32 if deterministic");
  EXPECT_EQ(reason([](Problem& p) { p.kv.stride[0] = std::int64_t{1} << 31; }),
            "needs the row stride of kv below 2^31");
  EXPECT_EQ(reason([](Problem& p) { p.kv.stride[0] = -(std::int64_t{1} << 31); }),
            "needs the row stride of kv below 2^31");
  EXPECT_EQ(reason([](Problem& p) { p.topk = (std::int64_t{1} << 31) - 64; }),
            "needs topk plus the window's keys below 2^31 - 64");
  EXPECT_EQ(reason([](Problem& p) { p.kv.stride[0] = std::int64_t{1} << 40, p.s_kv = p.kv.shape[0] = 1; }), "");
  EXPECT_EQ(reason([](Problem& p) { p.s_q = std::int64_t{1} << 31; }), "needs s_q times blocks of 32 heads below 2^31");
}

}  // namespace
}  // namespace hopwell::ops::sparse_mla_backward
