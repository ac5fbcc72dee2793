// What the tests of the three sparse MLA operators share: one small problem whose arguments a test changes, and checks
// that need more than one call.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <hopwell/hopwell.hpp>
#include <random>
#include <string>
#include <vector>

#include "cases/case.hpp"
#include "sanitized.hpp"
#include "tile/cpu/parallel.hpp"

namespace hopwell::test {

inline std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.status() == HOPWELL_INVALID_ARGUMENT ? error.what() : "wrong status: " + std::string(error.what());
  }
  return "no error";
}

inline std::vector<float> normal(std::int64_t count, unsigned seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> distribution;
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& value : values) value = distribution(engine);
  return values;
}

// fp32 data of its own, outputs full of kUntouched.
struct SparseMlaProblem {
  static constexpr float kUntouched = -77;

  std::int64_t s_q = 3, s_kv = 10, h_q = 2, d_qk = 8, d_v = 6, topk = 4;
  std::vector<float> q = normal(s_q * h_q * d_qk, 1), kv = normal(s_kv * d_qk, 2), d_out = normal(s_q * h_q * d_v, 3);
  std::vector<float> attn_sink = normal(h_q, 4);
  std::vector<std::int32_t> indices = {0, 3, 9, 3, 1, -1, 2, 10, 5, 6, 7, 8}, topk_length = {4, 3, 2},
                            q_positions = {9, 9, 6};
  std::vector<float> out = untouched(s_q * h_q * d_v), max_logits = untouched(s_q * h_q), lse = untouched(s_q * h_q);
  std::vector<float> dq = untouched(s_q * h_q * d_qk), dkv = untouched(s_kv * d_qk), d_sink = untouched(h_q),
                     attn = untouched(s_q * topk);

  static std::vector<float> untouched(std::int64_t count) {
    return std::vector<float>(static_cast<std::size_t>(count), kUntouched);
  }
  static bool all_untouched(const std::vector<float>& x) {
    return std::all_of(x.begin(), x.end(), [](float value) { return value == kUntouched; });
  }

  template <class T>
  Tensor view(std::vector<T>& data, std::initializer_list<std::int64_t> shape, const Tensor::Options& options = {}) {
    return {data.data(), shape, options};
  }

  SparseMlaForwardArgs forward() {
    return {.q = view(q, {s_q, h_q, d_qk}),
            .kv = view(kv, {s_kv, 1, d_qk}),
            .indices = view(indices, {s_q, 1, topk}),
            .sm_scale = 0.5F,
            .d_v = d_v,
            .out = view(out, {s_q, h_q, d_v}),
            .max_logits = view(max_logits, {s_q, h_q}),
            .lse = view(lse, {s_q, h_q})};
  }
  // Runs the forward first where a test needs real `out` and `lse`.
  SparseMlaBackwardArgs backward() {
    return {.d_out = view(d_out, {s_q, h_q, d_v}),
            .q = view(q, {s_q, h_q, d_qk}),
            .kv = view(kv, {s_kv, 1, d_qk}),
            .indices = view(indices, {s_q, 1, topk}),
            .out = view(out, {s_q, h_q, d_v}),
            .lse = view(lse, {s_q, h_q}),
            .sm_scale = 0.5F,
            .d_v = d_v,
            .dq = view(dq, {s_q, h_q, d_qk}),
            .dkv = view(dkv, {s_kv, 1, d_qk}),
            .attn = view(attn, {s_q, topk})};
  }
  AttentionDistributionArgs distribution() {
    return {.q = view(q, {s_q, h_q, d_qk}),
            .kv = view(kv, {s_kv, 1, d_qk}),
            .indices = view(indices, {s_q, 1, topk}),
            .lse = view(lse, {s_q, h_q}),
            .sm_scale = 0.5F,
            .out = view(attn, {s_q, topk})};
  }
};

// Bad inputs that the three operators refuse in the same words. `message` changes a fresh argument struct, calls, and
// gives the error.
template <class Message>
void expect_common_errors(const std::string& op, SparseMlaProblem& p, Message message) {
  std::vector<std::int64_t> wide(12);
  std::vector<std::int32_t> two_heads(24);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const auto expect = [&](auto change, const std::string& text) { EXPECT_EQ(message(change), op + ": " + text); };
  expect([](auto& a) { a.q = nullptr; }, "q must be bfloat16 or float32 [s_q, h_q, d_qk]; got nothing");
  expect([&](auto& a) { a.q = p.view(p.indices, {3, 2, 2}); },
         "q must be bfloat16 or float32 [s_q, h_q, d_qk]; got int32 [3, 2, 2]");
  expect([&](auto& a) { a.q = p.view(p.q, {3, 0, 8}); }, "q must be [s_q, h_q >= 1, d_qk]; got h_q = 0");
  expect([&](auto& a) { a.q = p.view(p.q, {3, 2, 8}, {.strides = {1, 3, 6}}); },
         "q must be contiguous in its last dimension; got a stride of 6");
  expect([&](auto& a) { a.kv = p.view(p.kv, {5, 2, 8}); }, "kv must be [s_kv, h_kv=1, d_qk]; got h_kv = 2");
  expect([&](auto& a) { a.kv = p.view(p.kv, {16, 5}); }, "kv must be float32 [s_kv, d_qk=8]; got float32 [16, 5]");
  expect([&](auto& a) { a.kv = p.view(p.kv, {10, 1, 8}, {.device = {kDLCUDA, 0}}); },
         "kv must be on cpu as q is; got cuda:0");
  expect([&](auto& a) { a.indices = nullptr, a.selection.topk_length = p.view(p.topk_length, {3}); },
         "topk_length needs indices; without them every visible key counts");
  expect([&](auto& a) { a.indices = p.view(wide, {3, 1, 4}); },
         "indices must be int32 [s_q=3, h_kv=1, topk]; got int64 [3, 1, 4]");
  expect([&](auto& a) { a.indices = p.view(p.indices, {2, 6}); },
         "indices must be int32 [s_q=3, topk]; got int32 [2, 6]");
  expect([&](auto& a) { a.sm_scale = nan; }, "sm_scale must be finite; got nan");
  expect([&](auto& a) { a.selection.topk_length = p.view(p.topk_length, {2}); },
         "topk_length must be int32 [s_q=3]; got int32 [2]");
  expect([&](auto& a) { a.selection.q_positions = p.view(p.lse, {3}); },
         "q_positions must be int32 [s_q=3]; got float32 [3]");
  expect([&](auto& a) { a.selection.q_positions = p.view(p.q_positions, {3}), a.selection.q_start = 0; },
         "q_positions and q_start exclude each other");
  expect([&](auto& a) { a.selection.k_start = p.view(p.q_positions, {3}); },
         "k_start and k_end must both be given, or neither; got k_start alone");
  expect([&](auto& a) { a.selection.k_end = p.view(p.q_positions, {3}); },
         "k_start and k_end must both be given, or neither; got k_end alone");
  expect([&](auto& a) { a.selection.k_start = a.selection.k_end = p.view(p.q_positions, {2}); },
         "k_start must be int32 [s_q=3]; got int32 [2]");
  expect([](auto& a) { a.selection.q_start = INT64_MIN; },
         "q_start must be between -2^62 and 2^62; got -9223372036854775808");
  expect([](auto& a) { a.selection.kv_stride = 0; }, "kv_stride must be at least 1; got 0");
  expect([](auto& a) { a.selection.kv_stride = -3; }, "kv_stride must be at least 1; got -3");
  std::string unknown = message([](auto& a) { a.backend = "gpu"; });
  EXPECT_NE(unknown.find("gpu"), std::string::npos) << unknown;
  EXPECT_NE(unknown.find("cpu"), std::string::npos) << unknown;
}

// Calls every case of the suite whose name `wanted` accepts with one and with several threads, and compares the bits of
// all arrays.
inline void expect_same_bits_for_any_threads(const cases::Suite& suite,
                                             const std::function<bool(const std::string&)>& wanted) {
  const int threads_before = cpu::max_threads();
  int compared = 0;
  for (const cases::Case& c : suite.cases) {
    if (!c.suits("cpu") || !wanted(c.name) || (kSanitized && compared == 3)) continue;
    ++compared;
    cases::Random random(3);
    cases::Instance instance = c.make(random);
    std::vector<std::vector<std::byte>> before, first;
    for (const cases::Array& array : instance.arrays) before.push_back(array.memory());
    for (const int threads : kSanitized ? std::vector{1, 3} : std::vector{1, 2, 3, 5}) {
      for (std::size_t i = 0; i < before.size(); ++i) instance.arrays[i].restore(before[i]);
      cpu::set_max_threads(threads);
      instance.call("cpu", nullptr);
      for (std::size_t i = 0; i < before.size(); ++i) {
        if (threads == 1)
          first.push_back(instance.arrays[i].memory());
        else
          EXPECT_EQ(instance.arrays[i].memory(), first[i])
              << c.name << ": " << instance.arrays[i].name() << ", " << threads << " threads";
      }
    }
  }
  cpu::set_max_threads(threads_before);
  EXPECT_GE(compared, kSanitized ? 3 : 8);
}

inline bool cut_into_items(const std::string& name) {
  const auto has = [&](const char* part) { return name.find(part) != std::string::npos; };
  return has("many_keys") || has("lengths") || has("hot") || has("duplicates") || has("basic") || has("many_queries") ||
         has("topk_2049");
}

inline const cases::Suite& suite_of(const std::string& op) {
  const auto& all = cases::suites();
  return *std::find_if(all.begin(), all.end(), [&](const cases::Suite& suite) { return suite.op == op; });
}

}  // namespace hopwell::test
