// sparse_mla_backward: bad input, and what case descriptions cannot express.
#include <sys/mman.h>

#include <cmath>
#include <limits>

#include "sparse_mla_problem.hpp"

namespace hopwell {
namespace {

using test::error_of;
using test::SparseMlaProblem;

std::string message(SparseMlaProblem& p, const std::function<void(SparseMlaBackwardArgs&)>& change) {
  SparseMlaBackwardArgs args = p.backward();
  change(args);
  return error_of([&] { sparse_mla_backward(args); });
}

TEST(SparseMlaBackward, BadInputIsRefusedWithOutputsUntouched) {
  SparseMlaProblem p;
  std::vector<bfloat16> dkv16(80);
  test::expect_common_errors("sparse_mla_backward", p, [&](const auto& change) { return message(p, change); });
  const auto expect = [&](const std::function<void(SparseMlaBackwardArgs&)>& change, const std::string& text) {
    EXPECT_EQ(message(p, change), "sparse_mla_backward: " + text);
  };
  expect([](auto& a) { a.d_v = 9; }, "d_v must be between 1 and d_qk = 8; got 9");
  expect([](auto& a) { a.d_out = nullptr; }, "d_out must be float32 [s_q=3, h_q=2, d_v=6]; got nothing");
  expect([](auto& a) { a.out = nullptr; }, "out must be float32 [s_q=3, h_q=2, d_v=6]; got nothing");
  expect([](auto& a) { a.lse = nullptr; }, "lse must be float32 [s_q=3, h_q=2]; got nothing");
  expect([&](auto& a) { a.d_out = p.view(p.d_out, {3, 2, 5}); },
         "d_out must be float32 [s_q=3, h_q=2, d_v=6]; got float32 [3, 2, 5]");
  expect([&](auto& a) { a.dq = p.view(dkv16, {3, 2, 8}); },
         "dq must be float32 [s_q=3, h_q=2, d_qk=8]; got bfloat16 [3, 2, 8]");
  expect([&](auto& a) { a.dkv = p.view(p.dkv, {9, 1, 8}); },
         "dkv must be float32 or bfloat16 [s_kv=10, h_kv=1, d_qk=8]; got float32 [9, 1, 8]");
  expect([&](auto& a) { a.dkv = p.view(p.dkv, {10, 8}, {.strides = {4, 1}}), a.kv = p.view(p.kv, {10, 8}); },
         "dkv must be an output whose elements do not overlap; got strides that make them share memory");
  expect([&](auto& a) { a.d_sink = p.view(p.d_sink, {2}); }, "d_sink needs an attn_sink");
  expect([&](auto& a) { a.accumulate = true, a.dkv = nullptr; }, "accumulate needs a float32 dkv to add into");
  expect([&](auto& a) { a.window = 3; }, "window_kv and window must both be given, or neither; got window alone");
  expect([&](auto& a) { a.window_kv = a.kv; },
         "window_kv and window must both be given, or neither; got window_kv alone");
  expect([&](auto& a) { a.window_kv = a.kv, a.window = 0; }, "window must be at least 1; got 0");
  expect([&](auto& a) { a.d_window_kv = a.dkv; }, "d_window_kv needs window_kv");
  expect([&](auto& a) { a.accumulate = true, a.dkv = p.view(dkv16, {10, 1, 8}); },
         "accumulate needs a float32 dkv to add into");
  expect([&](auto& a) { a.attn = p.view(p.attn, {3, 5}); }, "attn must be float32 [s_q=3, topk=4]; got float32 [3, 5]");
  for (const auto* output : {&p.dq, &p.dkv, &p.d_sink, &p.attn}) EXPECT_TRUE(SparseMlaProblem::all_untouched(*output));
}

TEST(SparseMlaBackward, NothingAskedForNothingWritten) {
  SparseMlaProblem p;
  SparseMlaBackwardArgs args = p.backward();
  args.dq = args.dkv = args.attn = nullptr;
  sparse_mla_backward(args);
  EXPECT_EQ(sparse_mla_backward_workspace_bytes(args), 0U);
}

TEST(SparseMlaBackward, WithoutQueriesDkvIsZeroOrAsItWas) {
  SparseMlaProblem p;
  p.s_q = 0;
  SparseMlaBackwardArgs args = p.backward();
  args.attn_sink = p.view(p.attn_sink, {2}), args.d_sink = p.view(p.d_sink, {2}), args.accumulate = true;
  sparse_mla_backward(args);
  EXPECT_TRUE(SparseMlaProblem::all_untouched(p.dkv));
  EXPECT_EQ(p.d_sink, std::vector<float>(2, 0.0F));
  args.accumulate = false;
  sparse_mla_backward(args);
  EXPECT_EQ(p.dkv, std::vector<float>(80, 0.0F));
}

// The distribution is a by-product of the same scores, so both operators must agree whatever the sink is.
TEST(SparseMlaBackward, ItsDistributionIsAttentionDistribution) {
  SparseMlaProblem p, other;
  SparseMlaForwardArgs forward = p.forward();
  forward.attn_sink = p.view(p.attn_sink, {2});
  sparse_mla_forward(forward);
  SparseMlaBackwardArgs args = p.backward();
  args.attn_sink = forward.attn_sink;
  sparse_mla_backward(args);
  other.lse = p.lse;
  attention_distribution(other.distribution());
  EXPECT_EQ(p.attn, other.attn);
}

double loss(SparseMlaProblem& p) {
  SparseMlaForwardArgs args = p.forward();
  args.attn_sink = p.view(p.attn_sink, {2});
  sparse_mla_forward(args);
  double sum = 0;
  for (std::size_t i = 0; i < p.out.size(); ++i) sum += static_cast<double>(p.out[i]) * static_cast<double>(p.d_out[i]);
  return sum;
}

// Against the forward itself: the change of sum(out * d_out) for a small step along a random direction of each input.
TEST(SparseMlaBackward, AgreesWithFiniteDifferencesOfTheForward) {
  SparseMlaProblem p;
  loss(p);
  SparseMlaBackwardArgs args = p.backward();
  args.attn_sink = p.view(p.attn_sink, {2}), args.d_sink = p.view(p.d_sink, {2});
  sparse_mla_backward(args);
  for (const auto& [x, gradient] :
       {std::pair{&p.q, &p.dq}, std::pair{&p.kv, &p.dkv}, std::pair{&p.attn_sink, &p.d_sink}}) {
    const std::vector<float> before = *x, direction = test::normal(static_cast<std::int64_t>(x->size()), 11);
    double expected = 0, at[2];
    for (std::size_t i = 0; i < x->size(); ++i)
      expected += static_cast<double>((*gradient)[i]) * static_cast<double>(direction[i]);
    const float step = 2e-3F;
    for (const int side : {0, 1}) {
      for (std::size_t i = 0; i < x->size(); ++i) (*x)[i] = before[i] + (side == 0 ? -step : step) * direction[i];
      at[side] = loss(p);
    }
    *x = before;
    EXPECT_NEAR((at[1] - at[0]) / (2 * static_cast<double>(step)), expected, 4e-3 * std::max(1.0, std::abs(expected)));
  }
}

TEST(SparseMlaBackward, DOutMayBeExpanded) {
  SparseMlaProblem p, expanded;
  std::fill(p.d_out.begin(), p.d_out.end(), 1.0F);
  std::vector<float> ones(6, 1.0F);
  for (SparseMlaProblem* problem : {&p, &expanded}) sparse_mla_forward(problem->forward());
  sparse_mla_backward(p.backward());
  SparseMlaBackwardArgs args = expanded.backward();
  args.d_out = expanded.view(ones, {3, 2, 6}, {.strides = {0, 0, 1}});
  sparse_mla_backward(args);
  EXPECT_EQ(expanded.dq, p.dq);
  EXPECT_EQ(expanded.dkv, p.dkv);
}

TEST(SparseMlaBackward, OffsetsAre64Bit) {
  const std::int64_t stride = (std::int64_t{1} << 31) + 64;
  const auto bytes = static_cast<std::size_t>(2 * stride + 8) * sizeof(float);
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) GTEST_SKIP() << "no address space for " << bytes << " bytes";
  auto* far = static_cast<float*>(memory);
  SparseMlaProblem p;
  p.indices = {0, 1, 2, -1, 2, 2, 0, 1, 1, 3, 0, 2};
  SparseMlaForwardArgs forward = p.forward();
  forward.kv = p.view(p.kv, {3, 8});
  sparse_mla_forward(forward);
  SparseMlaBackwardArgs args = p.backward();
  args.kv = forward.kv, args.dkv = p.view(p.dkv, {3, 8});
  sparse_mla_backward(args);
  const Tensor far_dkv(far, {3, 8}, {.strides = {stride, 1}});
  args.dkv = far_dkv;
  sparse_mla_backward(args);
  for (std::int64_t t = 0; t < 3; ++t)
    for (std::int64_t d = 0; d < 8; ++d) EXPECT_EQ(far[t * stride + d], p.dkv[static_cast<std::size_t>(t * 8 + d)]);
  munmap(memory, bytes);
}

TEST(SparseMlaBackward, ZeroMeansTheDefaultInC) {
  SparseMlaProblem p, c;
  for (SparseMlaProblem* problem : {&p, &c}) sparse_mla_forward(problem->forward());
  sparse_mla_backward(p.backward());
  const SparseMlaBackwardArgs cpp = c.backward();
  hopwell_sparse_mla_backward_args args{};
  args.d_out = cpp.d_out, args.q = cpp.q, args.kv = cpp.kv, args.indices = cpp.indices, args.out = cpp.out;
  args.lse = cpp.lse, args.sm_scale = cpp.sm_scale, args.d_v = cpp.d_v, args.dq = cpp.dq, args.dkv = cpp.dkv;
  ASSERT_EQ(hopwell_sparse_mla_backward(&args, nullptr), HOPWELL_OK) << hopwell_last_error();
  EXPECT_EQ(c.dkv, p.dkv);
  args.d_v = 0;  // 512
  EXPECT_EQ(hopwell_sparse_mla_backward(&args, nullptr), HOPWELL_INVALID_ARGUMENT);
  EXPECT_STREQ(hopwell_last_error(), "sparse_mla_backward: d_v must be between 1 and d_qk = 8; got 512");
  std::size_t bytes = 7;
  args.d_v = 6;
  EXPECT_EQ(hopwell_sparse_mla_backward_workspace_bytes(&args, &bytes), HOPWELL_OK);
  EXPECT_EQ(bytes, 0U);
}

TEST(SparseMlaBackward, SameBitsForAnyNumberOfThreads) {
  test::expect_same_bits_for_any_threads(test::suite_of("sparse_mla_backward"), test::cut_into_items);
}

TEST(SparseMlaBackward, SameBitsAHundredTimes) {
  cases::Random random(5);
  const auto& all = test::suite_of("sparse_mla_backward").cases;
  const auto c =
      std::find_if(all.begin(), all.end(), [](const cases::Case& one) { return one.name == "few_queries_many_keys"; });
  cases::Instance instance = c->make(random);
  instance.call("cpu", nullptr);
  std::vector<std::vector<std::byte>> first;
  for (const cases::Output& output : instance.outputs) first.push_back(output.array->memory());
  for (int run = 1; run < 100; ++run) {
    instance.call("cpu", nullptr);
    for (std::size_t i = 0; i < first.size(); ++i)
      ASSERT_EQ(instance.outputs[i].array->memory(), first[i]) << "run " << run;
  }
}

}  // namespace
}  // namespace hopwell
