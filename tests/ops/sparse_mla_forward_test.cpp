// sparse_mla_forward: bad input, and what case descriptions cannot express.
#include <sys/mman.h>

#include <array>
#include <cmath>

#include "ops/sparse_mla_forward/plan.hpp"
#include "ops/sparse_mla_forward/sm90/key_rows.hpp"
#include "sparse_mla_problem.hpp"

namespace hopwell {
namespace {

using test::error_of;
using test::SparseMlaProblem;

std::string message(SparseMlaProblem& p, const std::function<void(SparseMlaForwardArgs&)>& change) {
  SparseMlaForwardArgs args = p.forward();
  change(args);
  return error_of([&] { sparse_mla_forward(args); });
}

TEST(SparseMlaForward, BadInputIsRefusedWithOutputsUntouched) {
  SparseMlaProblem p;
  test::expect_common_errors("sparse_mla_forward", p, [&](const auto& change) { return message(p, change); });
  const auto expect = [&](const std::function<void(SparseMlaForwardArgs&)>& change, const std::string& text) {
    EXPECT_EQ(message(p, change), "sparse_mla_forward: " + text);
  };
  expect([](auto& a) { a.d_v = 9; }, "d_v must be between 1 and d_qk = 8; got 9");
  expect([](auto& a) { a.d_v = 0; }, "d_v must be between 1 and d_qk = 8; got 0");
  expect([&](auto& a) { a.attn_sink = p.view(p.attn_sink, {1}); },
         "attn_sink must be float32 [h_q=2]; got float32 [1]");
  expect([](auto& a) { a.out = nullptr; }, "out must be float32 [s_q=3, h_q=2, d_v=6]; got nothing");
  expect([&](auto& a) { a.out = p.view(p.out, {3, 2, 6}, {.strides = {0, 6, 1}}); },
         "out must be an output whose elements do not overlap; got strides that make them share memory");
  expect([&](auto& a) { a.lse = p.view(p.lse, {2, 3}); }, "lse must be float32 [s_q=3, h_q=2]; got float32 [2, 3]");
  expect([&](auto& a) { a.max_logits = p.view(p.indices, {3, 2}); },
         "max_logits must be float32 [s_q=3, h_q=2]; got int32 [3, 2]");
  for (const auto* output : {&p.out, &p.lse, &p.max_logits}) EXPECT_TRUE(SparseMlaProblem::all_untouched(*output));
}

TEST(SparseMlaForward, StatisticsAreOptionalAndRanksAreFree) {
  SparseMlaProblem p, bare;
  sparse_mla_forward(p.forward());
  SparseMlaForwardArgs args = bare.forward();
  args.max_logits = args.lse = nullptr;
  args.kv = bare.view(bare.kv, {10, 8});
  args.indices = bare.view(bare.indices, {3, 4});
  sparse_mla_forward(args);
  EXPECT_EQ(bare.out, p.out);
  EXPECT_TRUE(SparseMlaProblem::all_untouched(bare.lse));
  EXPECT_EQ(sparse_mla_forward_workspace_bytes(args), 0U);
  EXPECT_EQ(explain(args).rfind("cpu: chosen") != std::string::npos, true) << explain(args);
}

TEST(SparseMlaForward, ZeroMeansTheDefaultInC) {
  const std::int64_t d = 512;
  std::vector<float> q = test::normal(d, 1), kv = test::normal(3 * d, 2), out(512), expected(512);
  std::vector<std::int32_t> indices = {2, 0};
  const Tensor q_view(q.data(), {1, 1, d}), kv_view(kv.data(), {3, d}), indices_view(indices.data(), {1, 2}),
      out_view(out.data(), {1, 1, 512}), expected_view(expected.data(), {1, 1, 512});
  hopwell_sparse_mla_forward_args args{};
  args.q = q_view, args.kv = kv_view, args.indices = indices_view, args.sm_scale = 0.1F, args.out = out_view;
  args.d_v = 0, args.selection.kv_stride = 0;
  ASSERT_EQ(hopwell_sparse_mla_forward(&args, nullptr), HOPWELL_OK) << hopwell_last_error();
  sparse_mla_forward({.q = q_view, .kv = kv_view, .indices = indices_view, .sm_scale = 0.1F, .out = expected_view});
  EXPECT_EQ(out, expected);
  args.q = nullptr;
  EXPECT_EQ(hopwell_sparse_mla_forward(&args, nullptr), HOPWELL_INVALID_ARGUMENT);
  EXPECT_STREQ(hopwell_last_error(), "sparse_mla_forward: q must be bfloat16 or float32 [s_q, h_q, d_qk]; got nothing");
  std::size_t bytes = 7;
  args.q = q_view;
  EXPECT_EQ(hopwell_sparse_mla_forward_workspace_bytes(&args, &bytes), HOPWELL_OK);
  EXPECT_EQ(bytes, 0U);
}

TEST(SparseMlaForward, StridesMayBeNegativeOrZero) {
  SparseMlaProblem p, strided;
  std::copy_n(p.q.begin(), 16, p.q.begin() + 16);  // all queries alike
  std::copy_n(p.q.begin(), 16, p.q.begin() + 32);
  sparse_mla_forward(p.forward());
  std::vector<float> reversed(p.kv.size());
  for (std::size_t t = 0; t < 10; ++t)
    std::copy_n(p.kv.begin() + static_cast<std::ptrdiff_t>(t * 8), 8,
                reversed.end() - static_cast<std::ptrdiff_t>((t + 1) * 8));
  SparseMlaForwardArgs args = strided.forward();
  const Tensor q(p.q.data(), {3, 2, 8}, {.strides = {0, 8, 1}}),
      kv(reversed.data() + 9 * 8, {10, 8}, {.strides = {-8, 1}}), lse(strided.lse.data(), {3, 2}, {.strides = {1, 3}});
  args.q = q, args.kv = kv, args.lse = lse;
  sparse_mla_forward(args);
  EXPECT_EQ(strided.out, p.out);
  for (std::size_t s = 0; s < 3; ++s)
    for (std::size_t h = 0; h < 2; ++h) EXPECT_EQ(strided.lse[h * 3 + s], p.lse[s * 2 + h]);
}

// Rows of kv more than 2^31 elements apart: only addresses, since untouched pages take no memory.
TEST(SparseMlaForward, OffsetsAre64Bit) {
  const std::int64_t stride = (std::int64_t{1} << 31) + 64;
  const auto bytes = static_cast<std::size_t>(2 * stride + 8) * sizeof(float);
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) GTEST_SKIP() << "no address space for " << bytes << " bytes";
  auto* far = static_cast<float*>(memory);
  SparseMlaProblem p, distant;
  p.indices = distant.indices = {0, 1, 2, -1, 2, 2, 0, 1, 1, 3, 0, 2};
  for (std::int64_t t = 0; t < 3; ++t) std::copy_n(p.kv.data() + t * 8, 8, far + t * stride);
  SparseMlaForwardArgs near_args = p.forward(), far_args = distant.forward();
  near_args.kv = p.view(p.kv, {3, 8});
  const Tensor far_kv(far, {3, 8}, {.strides = {stride, 1}});
  far_args.kv = far_kv;
  sparse_mla_forward(near_args);
  sparse_mla_forward(far_args);
  munmap(memory, bytes);
  EXPECT_EQ(distant.out, p.out);
}

TEST(SparseMlaForward, SameBitsForAnyNumberOfThreads) {
  test::expect_same_bits_for_any_threads(test::suite_of("sparse_mla_forward"), test::cut_into_items);
}

TEST(SparseMlaForward, SameBitsAHundredTimes) {
  cases::Random random(5);
  const auto& all = test::suite_of("sparse_mla_forward").cases;
  const auto c =
      std::find_if(all.begin(), all.end(), [](const cases::Case& one) { return one.name == "few_queries_many_keys"; });
  cases::Instance instance = c->make(random);
  instance.call("cpu", nullptr);
  const auto first = instance.outputs[0].array->memory();
  for (int run = 1; run < 100; ++run) {
    instance.outputs[0].array->poison();
    instance.call("cpu", nullptr);
    ASSERT_EQ(instance.outputs[0].array->memory(), first) << "run " << run;
  }
}

// The CPU's bound on the statistics is tighter than the one that the cases hold every backend to:
// 1e-6 * max(1, |ref|) + 2^-22 * scale * max sum |q||k|.
TEST(SparseMlaForward, StatisticsAreExactOnTheCpu) {
  int compared = 0;
  for (const cases::Case& c : test::suite_of("sparse_mla_forward").cases) {
    if (!c.suits("cpu") || c.name == "many_queries" || c.name == "production") continue;  // for the test's time
    if (test::kSanitized && ++compared > 3) break;
    cases::Random random(4);
    cases::Instance instance = c.make(random);
    instance.reference(instance);
    instance.call("cpu", nullptr);
    for (cases::Output& output : instance.outputs) {
      if (output.array->name() == "out") continue;
      output.tolerance = {.absolute = 1e-6, .relative = 1e-6};
      for (double& magnitude : output.magnitude) magnitude /= 2;
      EXPECT_EQ(cases::compare(output).failure, "") << c.name;
    }
  }
}

ops::sparse_mla_forward::Problem problem_of_heads(std::int64_t h_q, std::int64_t s_q) {
  static std::int32_t somewhere;  // nothing is read
  ops::sparse_mla_forward::Problem p;
  p.h_q = h_q, p.s_q = s_q, p.s_kv = 8192, p.topk = 2048, p.d_qk = 576;
  p.selection.indices = &somewhere;
  p.device.capability = 90, p.device.sms = 132, p.device.l2_bytes = std::size_t{60} << 20;
  return p;
}

TEST(SparseMlaForward, PlansFillTheDeviceWithTilesOfHeads) {
  using namespace ops::sparse_mla_forward;
  Problem problem = problem_of_heads(1, 100);
  const auto expect = [&](std::int64_t h_q, int tile_heads, int head_tiles, std::uint32_t ctas) {
    problem.h_q = h_q;
    const Plan plan = plan_of(problem);
    ASSERT_EQ(plan.launches.size(), 1U) << h_q;
    const LaunchPlan& launch = plan.launches.front();
    EXPECT_EQ(launch.first_head, 0) << h_q;
    EXPECT_EQ(launch.heads, h_q) << h_q;
    EXPECT_EQ(launch.tile_heads, tile_heads) << h_q;
    EXPECT_EQ(launch.head_tiles, head_tiles) << h_q;
    EXPECT_EQ(launch.work_tiles, 100U * static_cast<std::uint32_t>(head_tiles)) << h_q;
    EXPECT_EQ(launch.ctas, ctas) << h_q;
  };
  expect(1, 16, 1, 100);
  expect(16, 16, 1, 100);
  expect(17, 32, 1, 100);
  expect(33, 64, 1, 100);
  expect(65, 64, 2, 132);
  expect(128, 64, 2, 132);
  problem.device.sms = 8;
  expect(128, 64, 2, 8);
}

TEST(SparseMlaForward, HeadsAfterTheLastWholeTileHaveALaunch) {
  using namespace ops::sparse_mla_forward;
  const auto expect = [](std::int64_t h_q, std::int64_t first_heads, int tile_heads) {
    const Plan plan = plan_of(problem_of_heads(h_q, 4096));
    ASSERT_EQ(plan.launches.size(), 2U) << h_q;
    const LaunchPlan &many = plan.launches[0], &few = plan.launches[1];
    EXPECT_EQ(many.first_head, 0) << h_q;
    EXPECT_EQ(many.heads, first_heads) << h_q;
    EXPECT_EQ(many.tile_heads, 64) << h_q;
    EXPECT_EQ(many.work_tiles, 4096 * first_heads / 64) << h_q;
    EXPECT_EQ(few.first_head, first_heads) << h_q;
    EXPECT_EQ(few.heads, h_q - first_heads) << h_q;
    EXPECT_EQ(few.tile_heads, tile_heads) << h_q;
    EXPECT_EQ(few.head_tiles, 1) << h_q;
    EXPECT_EQ(few.work_tiles, 4096U) << h_q;
    EXPECT_EQ(few.queries_at_once, 2) << h_q;
    EXPECT_EQ(plan.groups.count, 0) << h_q;
  };
  expect(65, 64, 16);
  expect(80, 64, 16);
  expect(81, 64, 32);
  expect(96, 64, 32);
  expect(144, 128, 16);
  expect(160, 128, 32);
  for (const std::int64_t h_q : {1, 32, 33, 64, 97, 127, 128, 161, 192})
    EXPECT_EQ(plan_of(problem_of_heads(h_q, 4096)).launches.size(), 1U) << h_q;
}

TEST(SparseMlaForward, TwoLaunchesTakeFewerWavesThanOne) {
  using namespace ops::sparse_mla_forward;
  const auto launches = [](const Problem& p) { return plan_of(p).launches.size(); };
  const auto expect = [&](std::int64_t s_q, std::size_t of_80_heads, std::size_t of_96_heads) {
    EXPECT_EQ(launches(problem_of_heads(80, s_q)), of_80_heads) << s_q;
    EXPECT_EQ(launches(problem_of_heads(96, s_q)), of_96_heads) << s_q;
  };
  expect(0, 1, 1);
  expect(66, 1, 1);   // waves of 64 heads: 1 instead of 1, and the second launch
  expect(132, 1, 1);  // 1 instead of 2; no CTA of the second launch has two queries
  expect(198, 1, 1);  // 2 instead of 3
  expect(199, 2, 2);  // 2 instead of 4
  expect(264, 2, 2);
  expect(265, 1, 1);  // 3 instead of 5; a third query counts as two
  expect(396, 1, 1);  // 3 instead of 6; two waves of pairs of queries take longer than three
  expect(1024, 2, 2);
  expect(4096, 2, 2);
}

TEST(SparseMlaForward, ASecondLaunchNeedsAlignedRowsAndSelectedKeysInL2) {
  using namespace ops::sparse_mla_forward;
  Problem p = problem_of_heads(80, 4096);
  p.s_kv = 54613;
  EXPECT_EQ(plan_of(p).launches.size(), 2U);
  p.s_kv = 54614;
  EXPECT_EQ(plan_of(p).launches.size(), 1U);
  p.selection.indices = nullptr;
  EXPECT_EQ(plan_of(p).launches.size(), 2U);
  for (View Problem::* tensor : {&Problem::q, &Problem::kv, &Problem::window_kv}) {
    Problem unaligned = p;
    (unaligned.*tensor).dtype = DType::kBFloat16, (unaligned.*tensor).shape[0] = 9, (unaligned.*tensor).stride[0] = 12;
    EXPECT_EQ(plan_of(unaligned).launches.size(), 1U);
  }
  p = problem_of_heads(80, 2);
  p.s_kv = 1 << 20, p.device.capability = 0;  // the emulator's own profile
  EXPECT_EQ(plan_of(p).launches.size(), 2U);
}

TEST(SparseMlaForward, ALaunchHasTheTensorsOfItsHeads) {
  using namespace ops::sparse_mla_forward;
  std::array<char, 1 << 16> memory;  // nothing is read
  char* const middle = memory.data() + memory.size() / 2;
  const auto view = [&](DType dtype, int ndim, std::array<std::int64_t, View::kMaxDims> stride) {
    View v;
    v.data = middle, v.dtype = dtype, v.present = true, v.ndim = ndim;
    v.shape =
        ndim == 1 ? std::array<std::int64_t, View::kMaxDims>{80} : std::array<std::int64_t, View::kMaxDims>{9, 80};
    v.stride = stride;
    return v;
  };
  Problem p = problem_of_heads(80, 9);
  p.device.capability = 0;
  p.q = view(DType::kBFloat16, 3, {1000, 8, 1}), p.out = view(DType::kBFloat16, 3, {8, -16, 1});
  p.lse = view(DType::kFloat32, 2, {1, 9}), p.attn_sink = view(DType::kFloat32, 1, {-3});
  const Plan plan = plan_of(p);
  ASSERT_EQ(plan.launches.size(), 2U);
  const Problem first = heads_of_launch(p, plan.launches[0]), second = heads_of_launch(p, plan.launches[1]);
  EXPECT_EQ(first.h_q, 64);
  EXPECT_EQ(second.h_q, 16);
  for (const View Problem::* tensor : {&Problem::q, &Problem::out, &Problem::lse}) {
    EXPECT_EQ((first.*tensor).shape[1], 64);
    EXPECT_EQ((second.*tensor).shape[1], 16);
    EXPECT_EQ((first.*tensor).data, middle);
    EXPECT_EQ((second.*tensor).stride, (p.*tensor).stride);
  }
  EXPECT_EQ(second.attn_sink.shape[0], 16);
  EXPECT_EQ(second.q.data, middle + 64 * 8 * 2);
  EXPECT_EQ(second.out.data, middle - 64 * 16 * 2);
  EXPECT_EQ(second.lse.data, middle + 64 * 9 * 4);
  EXPECT_EQ(second.attn_sink.data, middle - 64 * 3 * 4);
  EXPECT_FALSE(second.max_logits);
  EXPECT_EQ(second.max_logits.data, nullptr);
}

// 64 queries that may be taken in groups, of 132 multiprocessors.
ops::sparse_mla_forward::Problem problem_of_groups(std::int64_t h_q, std::int64_t topk = 256) {
  static std::int32_t somewhere;  // nothing is read
  ops::sparse_mla_forward::Problem p;
  p.s_q = 64, p.h_q = h_q, p.s_kv = 8192, p.topk = topk, p.device.sms = 132, p.device.capability = 90;
  const auto rows = [h_q](std::int64_t columns) {
    View view;
    view.present = true, view.ndim = 3, view.shape = {64, h_q, columns}, view.stride = {h_q * columns, columns, 1};
    return view;
  };
  p.q = rows(576), p.out = rows(512), p.max_logits = p.lse = rows(1);
  p.selection.indices = &somewhere, p.share_keys = true;
  return p;
}

TEST(SparseMlaForward, PlansHaveGroupsOnlyWhereTheyMayBe) {
  using namespace ops::sparse_mla_forward;
  const auto members = [](const Problem& p) {
    const Plan plan = plan_of(p);
    EXPECT_EQ(plan.groups.count, plan.groups.members > 1 ? 64 / plan.groups.members : 0);
    return plan.groups.members;
  };
  EXPECT_EQ(members(problem_of_groups(1)), 8);
  EXPECT_EQ(members(problem_of_groups(12)), 5);
  EXPECT_EQ(members(problem_of_groups(16)), 4);
  EXPECT_EQ(members(problem_of_groups(32)), 2);
  for (const std::int64_t h_q : {33, 80}) EXPECT_EQ(members(problem_of_groups(h_q)), 1);
  EXPECT_EQ(members(problem_of_groups(16, 4096)), 4);
  EXPECT_EQ(members(problem_of_groups(16, 4097)), 1);
  EXPECT_EQ(members(problem_of_groups(16, 0)), 1);
  const auto changed = [&](const auto& change) {
    Problem p = problem_of_groups(16);
    change(p);
    return members(p);
  };
  EXPECT_EQ(changed([](Problem& p) { p.share_keys = false; }), 1);
  EXPECT_EQ(changed([](Problem& p) { p.selection.indices = nullptr; }), 1);
  EXPECT_EQ(changed([](Problem& p) { p.s_q = 3; }), 1);
  EXPECT_EQ(changed([](Problem& p) { p.max_logits = p.lse = {}; }), 4);
  for (View Problem::* tensor : {&Problem::q, &Problem::out, &Problem::max_logits, &Problem::lse})
    EXPECT_EQ(changed([&](Problem& p) { (p.*tensor).stride[0] += 64; }), 1);
}

TEST(SparseMlaForward, PlansOfGroupsHaveWorkspaceAndLeaveTheRest) {
  using namespace ops::sparse_mla_forward;
  const Problem p = problem_of_groups(12);  // 12 groups of 5, and 4 queries
  const Plan plan = plan_of(p);
  const LaunchPlan of_groups = plan_of_groups(p, plan);
  EXPECT_EQ(of_groups.work_tiles, 12U);
  EXPECT_EQ(of_groups.ctas, 12U);
  EXPECT_EQ(of_groups.tile_heads, 64);
  EXPECT_EQ(plan.launches.front().work_tiles, 64U);  // the kernel skips the queries of groups
  EXPECT_EQ(plan.launches.front().tile_heads, 16);
  const std::size_t entries = 60UL * 256;
  EXPECT_LE(plan.merged_rows.keys + 4 * entries, plan.merged_rows.member_masks);
  EXPECT_LE(plan.merged_rows.member_masks + entries, plan.merged_rows.lengths);
  EXPECT_LE(plan.merged_rows.lengths + 4UL * 12, plan.workspace_bytes);
  EXPECT_LE(plan.workspace_bytes, 5 * entries + 4UL * 12 + 3UL * 256);
  Problem apart = p;
  apart.share_keys = false;
  EXPECT_EQ(plan_of(apart).workspace_bytes, 0U);
}

View rows_at(std::uintptr_t address, std::int64_t count, std::int64_t stride) {
  View view;
  view.data = reinterpret_cast<void*>(address), view.present = true, view.ndim = 2;  // nothing is read
  view.shape = {count, 512}, view.stride = {stride, 1};
  return view;
}

TEST(SparseMlaForward, RowsOfTwoTensorsHaveOneBaseAndUnit) {
  using ops::sparse_mla_forward::key_rows_of;
  constexpr std::uintptr_t kSome = 0x7f0000000000;
  const auto expect = [](const View& kv, const View& window, std::uint32_t unit) {
    const auto rows = key_rows_of(kv, window);
    ASSERT_TRUE(rows.has_value());
    EXPECT_EQ(rows->unit, unit);
    const auto address = [&](const View& v, std::int64_t row) {
      return reinterpret_cast<std::uintptr_t>(v.data) + static_cast<std::uintptr_t>(2 * row * v.stride[0]);
    };
    const auto found = [&](bool of_window, std::int64_t key) {
      return rows->base + std::uintptr_t{rows->offset_of_key(of_window, static_cast<int>(key))} * unit;
    };
    const std::int64_t s_kv = kv.shape[0];
    const auto check = [&](bool of_window, const View& v) {
      if (v.shape[0] == 0) return;
      for (const std::int64_t row : {std::int64_t{0}, v.shape[0] - 1})
        EXPECT_EQ(found(of_window, (of_window ? s_kv : 0) + row), address(v, row));
    };
    check(false, kv), check(true, window);
  };
  expect(rows_at(kSome, 100, 512), rows_at(kSome + (1 << 20), 70, 512), 1024);
  expect(rows_at(kSome + (1 << 20), 100, 520), rows_at(kSome, 70, 512), 16);
  expect(rows_at(kSome, 100, 512), rows_at(kSome + 512, 70, 1024), 512);
  expect(rows_at(kSome, 0, 512), rows_at(kSome + 16, 70, 512), 1024);
  expect(rows_at(0, 0, 512), rows_at(kSome + 16, 1, 512), 1024);
  expect(rows_at(kSome + 64, 1, -8), rows_at(kSome, 0, 512), 1024);
  expect(rows_at(kSome, 9, 0), rows_at(kSome + 32, 5, 0), 32);
  constexpr std::uintptr_t kFar = std::uintptr_t{0xfffffffe} * 512;
  expect(rows_at(kSome, 9, 256), rows_at(kSome + kFar, 1, 256), 512);
  expect(rows_at(kSome + kFar, 1, 256), rows_at(kSome, 9, 256), 512);
  EXPECT_FALSE(key_rows_of(rows_at(kSome, 9, 256), rows_at(kSome + kFar, 2, 256)));
  EXPECT_FALSE(key_rows_of(rows_at(kSome, 9, 256), rows_at(kSome + kFar + 16, 1, 256)));
  EXPECT_FALSE(key_rows_of(rows_at(kSome, 9, -256), rows_at(kSome, 1, 256)));
  EXPECT_FALSE(key_rows_of(rows_at(kSome, 9, 256), rows_at(kSome, 2, -256)));
}

TEST(SparseMlaForward, LongCallsFindTheEndsOfTheirRows) {
  using namespace ops::sparse_mla_forward;
  Problem p = problem_of_groups(64, 512);
  EXPECT_FALSE(plan_of(p).trimmed.enabled);
  p.s_q = 8192;
  EXPECT_TRUE(plan_of(p).trimmed.enabled);
  EXPECT_LE(plan_of(p).trimmed.lengths + 4UL * 8192, plan_of(p).workspace_bytes);
  EXPECT_EQ(trimmed_rows_plan(p).workspace_bytes, 4UL * 8192);
  p.selection.indices = nullptr;
  EXPECT_FALSE(plan_of(p).trimmed.enabled);
  EXPECT_EQ(trimmed_rows_plan(p).workspace_bytes, 0U);
}

}  // namespace
}  // namespace hopwell
