// lightning_indexer and its backward: bad input, and what case descriptions cannot express.
#include <gtest/gtest.h>
#include <hopwell/hopwell.hpp>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "tile/cpu/parallel.hpp"

namespace hopwell {
namespace {

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.status() == HOPWELL_INVALID_ARGUMENT ? error.what() : "wrong status: " + std::string(error.what());
  }
  return "no error";
}

std::vector<float> normal(std::size_t count, unsigned seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> distribution;
  std::vector<float> values(count);
  for (float& value : values) value = distribution(engine);
  return values;
}

// One call of each operator on fp32 data of its own.
struct Problem {
  std::int64_t s_q, s_kv, h_index, d_index, topk;
  bool relu = true;
  std::vector<float> q = normal(static_cast<std::size_t>(s_q * h_index * d_index), 1);
  std::vector<float> k = normal(static_cast<std::size_t>(s_kv * d_index), 2);
  std::vector<float> weights = normal(static_cast<std::size_t>(s_q * h_index), 3);
  std::vector<float> target = std::vector<float>(static_cast<std::size_t>(s_q * topk), 1.0F / static_cast<float>(topk));
  std::vector<std::int32_t> indices = std::vector<std::int32_t>(target.size(), -77);
  std::vector<float> scores = std::vector<float>(target.size(), -77), loss = {-77};
  std::vector<float> d_q = q, d_k = k, d_weights = weights;

  [[nodiscard]] Tensor q_view() { return {q.data(), {s_q, h_index, d_index}}; }
  [[nodiscard]] Tensor k_view() { return {k.data(), {s_kv, d_index}}; }
  [[nodiscard]] Tensor weights_view() { return {weights.data(), {s_q, h_index}}; }
  [[nodiscard]] Tensor indices_view() { return {indices.data(), {s_q, topk}}; }
  [[nodiscard]] Tensor scores_view() { return {scores.data(), {s_q, topk}}; }
  [[nodiscard]] Tensor target_view() { return {target.data(), {s_q, topk}}; }

  void forward() {
    lightning_indexer({.q_index = q_view(),
                       .k_index = k_view(),
                       .weights = weights_view(),
                       .relu = relu,
                       .indices = indices_view(),
                       .scores = scores_view()});
  }
  void backward() {
    lightning_indexer_backward({.target = target_view(),
                                .q_index = q_view(),
                                .k_index = k_view(),
                                .weights = weights_view(),
                                .indices = indices_view(),
                                .relu = relu,
                                .loss = Tensor(loss.data(), {1}),
                                .d_q_index = Tensor(d_q.data(), {s_q, h_index, d_index}),
                                .d_k_index = Tensor(d_k.data(), {s_kv, d_index}),
                                .d_weights = Tensor(d_weights.data(), {s_q, h_index})});
  }
};

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

class Threads : public testing::Test {
 protected:
  void TearDown() override { cpu::set_max_threads(before_); }

 private:
  int before_ = cpu::max_threads();
};

TEST_F(Threads, AnyNumberGivesTheSameBits) {
  // Many queries; few queries and many keys, which are then split; more waves than one in the backward.
  for (const Problem& shape :
       {Problem{300, 700, 4, 24, 65}, Problem{2, 30000, 3, 16, 700}, Problem{70, 5000, 2, 128, 2048}}) {
    cpu::set_max_threads(1);
    Problem one = shape;
    one.forward();
    one.backward();
    for (const int threads : {2, 3, 5}) {
      cpu::set_max_threads(threads);
      Problem other = shape;
      other.forward();
      other.backward();
      EXPECT_TRUE(same_bits(one.indices, other.indices)) << threads;
      EXPECT_TRUE(same_bits(one.scores, other.scores)) << threads;
      EXPECT_TRUE(same_bits(one.loss, other.loss)) << threads;
      EXPECT_TRUE(same_bits(one.d_q, other.d_q)) << threads;
      EXPECT_TRUE(same_bits(one.d_k, other.d_k)) << threads;
      EXPECT_TRUE(same_bits(one.d_weights, other.d_weights)) << threads;
    }
  }
}

// Equal keys have equal scores wherever they stand, in a full tile or at an edge, in this split or the next: the first
// ones win.
TEST(LightningIndexer, EqualKeysTieWhereverTheyStand) {
  for (const std::int64_t s_kv : {3, 17, 255, 256, 257, 1000, 20000}) {
    for (const std::int64_t h_index : {1, 3, 64}) {
      Problem p{2, s_kv, h_index, 40, 16};
      for (std::vector<float>* values : {&p.q, &p.k, &p.weights})
        for (float& value : *values) value = std::round(4 * value) / 4;
      for (std::int64_t t = 1; t < s_kv; ++t) std::copy_n(p.k.begin(), p.d_index, p.k.begin() + t * p.d_index);
      p.forward();
      for (std::int64_t i = 0; i < p.s_q * p.topk; ++i) {
        const std::int64_t rank = i % p.topk;
        EXPECT_EQ(p.indices[static_cast<std::size_t>(i)], rank < s_kv ? rank : -1)
            << "s_kv " << s_kv << ", h_index " << h_index;
      }
    }
  }
}

TEST(LightningIndexer, ScoresAreOptional) {
  Problem with{5, 100, 4, 16, 10}, without = with;
  with.forward();
  lightning_indexer({.q_index = without.q_view(),
                     .k_index = without.k_view(),
                     .weights = without.weights_view(),
                     .indices = without.indices_view()});
  EXPECT_EQ(with.indices, without.indices);
}

// Of the same scores the loss against their softmax is none, with the relu and without it; of the others there is one.
TEST(LightningIndexer, SelectsByTheScoresOfTheLoss) {
  for (const bool relu : {true, false}) {
    Problem p{5, 100, 4, 16, 10};
    p.relu = relu;
    p.forward();
    for (std::int64_t s = 0; s < p.s_q; ++s) {
      const auto first = p.scores.begin() + s * p.topk, end = first + p.topk;
      const float peak = *std::max_element(first, end);
      float sum = 0;
      for (auto score = first; score < end; ++score) sum += std::exp(*score - peak);
      std::transform(first, end, p.target.begin() + s * p.topk,
                     [&](float score) { return std::exp(score - peak) / sum; });
    }
    p.backward();
    EXPECT_NEAR(p.loss[0], 0, 1e-4) << relu;
    p.relu = !relu;
    p.backward();
    EXPECT_GT(p.loss[0], 0.1) << relu;
  }
}

TEST(LightningIndexer, TopkFarBeyondTheKeys) {
  Problem p{1, 5, 2, 8, 1 << 20};
  p.forward();
  EXPECT_EQ(p.indices[4], 4);
  EXPECT_EQ(p.indices[5], -1);
  EXPECT_EQ(p.indices.back(), -1);
  EXPECT_EQ(p.scores.back(), -std::numeric_limits<float>::infinity());
}

TEST(LightningIndexer, BadArgumentsAreNamedAndWriteNothing) {
  Problem p{3, 10, 2, 8, 4};
  std::vector<double> wide(48);
  std::vector<std::int32_t> positions(3);
  const Tensor q = p.q_view(), k = p.k_view(), weights = p.weights_view(), indices = p.indices_view(),
               scores = p.scores_view();
  const Tensor position_view(positions.data(), {3});
  const auto message = [](const LightningIndexerArgs& args) { return error_of([&] { lightning_indexer(args); }); };
  const LightningIndexerArgs good{.q_index = q, .k_index = k, .weights = weights, .indices = indices, .scores = scores};

  LightningIndexerArgs args = good;
  args.q_index = nullptr;
  EXPECT_EQ(
      message(args),
      "lightning_indexer: q_index must be bfloat16 or float32 or float8_e4m3fn [s_q, h_index, d_index]; got nothing");
  args = good;
  const Tensor doubles(wide.data(), {3, 2, 8});
  args.q_index = doubles;
  EXPECT_EQ(message(args),
            "lightning_indexer: q_index must be bfloat16 or float32 or float8_e4m3fn [s_q, h_index, d_index]; got "
            "float64 [3, 2, 8]");
  args = good;
  const Tensor q_scale(p.d_weights.data(), {3, 2}), k_scale(p.d_k.data(), {10});
  for (Tensor* scale : {&args.q_scale, &args.k_scale}) {
    args = good;
    *scale = scale == &args.q_scale ? q_scale : k_scale;
    EXPECT_EQ(message(args),
              "lightning_indexer: q_scale and k_scale need float8_e4m3fn q_index and k_index; scales of bfloat16 "
              "and float32 belong into weights");
  }
  args = good;
  args.q_scale = k_scale;
  EXPECT_EQ(message(args), "lightning_indexer: q_scale must be float32 [s_q=3, h_index=2]; got float32 [10]");
  args = good;
  args.k_scale = q_scale;
  EXPECT_EQ(message(args), "lightning_indexer: k_scale must be float32 [s_kv=10]; got float32 [3, 2]");
  args = good;
  const Tensor narrow(p.k.data(), {10, 7});
  args.k_index = narrow;
  EXPECT_EQ(message(args), "lightning_indexer: k_index must be float32 [s_kv, d_index=8]; got float32 [10, 7]");
  args = good;
  const Tensor no_heads(p.q.data(), {3, 0, 8});
  args.q_index = no_heads;
  const Tensor no_weights(p.weights.data(), {3, 0});
  args.weights = no_weights;
  EXPECT_EQ(message(args), "lightning_indexer: q_index must be [s_q, h_index >= 1, d_index]; got h_index = 0");
  args = good;
  args.weights = scores;
  EXPECT_EQ(message(args),
            "lightning_indexer: weights must be float32 or bfloat16 [s_q=3, h_index=2]; got float32 [3, 4]");
  args = good;
  args.indices = scores;
  EXPECT_EQ(message(args), "lightning_indexer: indices must be int32 [s_q=3, topk]; got float32 [3, 4]");
  args = good;
  args.selection.kv_stride = 0;
  EXPECT_EQ(message(args), "lightning_indexer: kv_stride must be at least 1; got 0");
  args = good;
  args.selection.q_positions = position_view;
  args.selection.q_start = 0;
  EXPECT_EQ(message(args), "lightning_indexer: q_positions and q_start exclude each other");
  args = good;
  args.selection.topk_length = position_view;
  EXPECT_EQ(message(args),
            "lightning_indexer: topk_length must be absent, because this operator does not take it; got a value");
  args = good;
  const Tensor one_row(p.scores.data(), {3, 4}, {.strides = {0, 1}});
  args.scores = one_row;
  EXPECT_NE(message(args).find("scores must be an output whose elements do not overlap"), std::string::npos);
  EXPECT_EQ(p.indices, std::vector<std::int32_t>(12, -77));
  EXPECT_EQ(p.scores, std::vector<float>(12, -77));
  EXPECT_EQ(message(good), "no error");
}

TEST(LightningIndexerBackward, BadArgumentsAreNamedAndWriteNothing) {
  Problem p{3, 10, 2, 8, 4};
  const Tensor target = p.target_view(), q = p.q_view(), k = p.k_view(), weights = p.weights_view(),
               indices = p.indices_view();
  const Tensor loss(p.loss.data(), {}), d_q(p.d_q.data(), {3, 2, 8}), d_k(p.d_k.data(), {10, 8}),
      d_weights(p.d_weights.data(), {3, 2});
  const auto message = [](const LightningIndexerBackwardArgs& args) {
    return error_of([&] { lightning_indexer_backward(args); });
  };
  const LightningIndexerBackwardArgs good{.target = target,
                                          .q_index = q,
                                          .k_index = k,
                                          .weights = weights,
                                          .indices = indices,
                                          .loss = loss,
                                          .d_q_index = d_q,
                                          .d_k_index = d_k,
                                          .d_weights = d_weights};
  LightningIndexerBackwardArgs args = good;
  std::vector<float8_e4m3> codes(48);
  const Tensor fp8(codes.data(), {3, 2, 8});
  args.q_index = fp8;
  EXPECT_EQ(
      message(args),
      "lightning_indexer_backward: q_index must be bfloat16 or float32 [s_q, h_index, d_index]; got float8_e4m3fn [3, "
      "2, 8]");
  args = good;
  args.target = weights;
  EXPECT_EQ(message(args), "lightning_indexer_backward: target must be float32 [s_q=3, topk=4]; got float32 [3, 2]");
  args = good;
  args.loss = d_weights;
  EXPECT_EQ(message(args), "lightning_indexer_backward: loss must be one element; got [3, 2]");
  args = good;
  args.d_loss = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(message(args), "lightning_indexer_backward: d_loss must be finite; got nan");
  args.d_loss = 1, args.d_loss_array = d_weights;
  EXPECT_EQ(message(args), "lightning_indexer_backward: d_loss must be one element; got [3, 2]");
  args.d_loss = 2, args.d_loss_array = loss;
  EXPECT_EQ(message(args), "lightning_indexer_backward: d_loss and d_loss_array exclude each other");
  args = good;
  args.d_scores = target;
  EXPECT_EQ(message(args), "lightning_indexer_backward: target and d_scores exclude each other");
  args.target = nullptr;
  EXPECT_EQ(message(args), "lightning_indexer_backward: there is no loss and no row_loss of d_scores");
  args.loss = nullptr, args.d_scores = weights;
  EXPECT_EQ(message(args), "lightning_indexer_backward: d_scores must be float32 [s_q=3, topk=4]; got float32 [3, 2]");
  args = good;
  args.row_weights = loss;
  EXPECT_EQ(message(args), "lightning_indexer_backward: row_weights must be float32 [s_q=3]; got float32 []");
  args = good;
  args.row_loss = loss;
  EXPECT_EQ(message(args), "lightning_indexer_backward: row_loss must be float32 [s_q=3]; got float32 []");
  args = good;
  args.target = nullptr;
  EXPECT_EQ(message(args), "lightning_indexer_backward: target must be float32 [s_q=3, topk=4]; got nothing");
  args = good;
  args.d_k_index = nullptr;
  EXPECT_EQ(message(args), "lightning_indexer_backward: d_k_index must be float32 [s_kv=10, d_index=8]; got nothing");
  args = good;
  args.indices = target;
  EXPECT_EQ(message(args), "lightning_indexer_backward: indices must be int32 [s_q=3, topk]; got float32 [3, 4]");
  const std::vector<std::int32_t> range(3);
  const Tensor start(range.data(), {3}), short_end(range.data(), {2});
  args = good;
  args.selection.k_start = start;
  EXPECT_EQ(message(args),
            "lightning_indexer_backward: k_start and k_end must both be given, or neither; got k_start alone");
  args.selection.k_end = short_end;
  EXPECT_EQ(message(args), "lightning_indexer_backward: k_end must be int32 [s_q=3]; got int32 [2]");
  args = good;
  args.selection.kv_stride = 4;
  EXPECT_EQ(
      message(args),
      "lightning_indexer_backward: kv_stride must be absent, because this operator does not take it; got a value");
  args.selection = {.q_start = 0};
  EXPECT_EQ(message(args),
            "lightning_indexer_backward: q_start must be absent, because this operator does not take it; got a value");
  EXPECT_EQ(p.loss[0], -77);
  EXPECT_EQ(p.d_q, p.q);
  EXPECT_EQ(message(good), "no error");
}

// FP32 differences of the loss itself, for one element of each input.
TEST(LightningIndexerBackward, AgreesWithDifferencesOfTheLoss) {
  Problem p{4, 30, 3, 8, 12};
  p.forward();
  p.backward();
  const auto difference = [&](std::vector<float>& input, std::size_t at) {
    constexpr float kStep = 1e-2F;
    const float value = input[at];
    Problem plus = p, minus = p;
    const auto same = [&](Problem& other) -> std::vector<float>& {
      return &input == &p.q ? other.q : &input == &p.k ? other.k : other.weights;
    };
    same(plus)[at] = value + kStep;
    same(minus)[at] = value - kStep;
    plus.backward();
    minus.backward();
    return (plus.loss[0] - minus.loss[0]) / (2 * kStep);
  };
  EXPECT_NEAR(difference(p.q, 5), p.d_q[5], 2e-2);
  EXPECT_NEAR(difference(p.weights, 3), p.d_weights[3], 2e-2);
  const auto key = static_cast<std::size_t>(p.indices[0] * p.d_index + 2);
  EXPECT_NEAR(difference(p.k, key), p.d_k[key], 5e-2);
}

}  // namespace
}  // namespace hopwell
