// The vector building blocks, at every length near a vector's length, compared with double arithmetic.
#include "tile/cpu/vector.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <limits>
#include <random>
#include <thread>
#include <vector>

#include "tile/cpu/parallel.hpp"

namespace hopwell::cpu {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

std::vector<float> random(std::size_t count, unsigned seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(count);
  for (float& value : x) value = normal(engine);
  return x;
}

TEST(Vector, SumsProductsAndMaximaAtEveryLength) {
  for (std::size_t count = 0; count < 70; ++count) {
    const auto x = random(count, 1), y = random(count, 2);
    double product = 0, magnitude = 0;
    float largest = -kInf;
    for (std::size_t i = 0; i < count; ++i) {
      product += static_cast<double>(x[i]) * static_cast<double>(y[i]);
      magnitude += std::abs(static_cast<double>(x[i]) * static_cast<double>(y[i]));
      largest = std::max(largest, x[i]);
    }
    EXPECT_NEAR(static_cast<double>(dot(x.data(), y.data(), count)), product, 1e-6 * magnitude);
    EXPECT_EQ(max(x.data(), count), largest);
    auto sum = y;
    add(x.data(), sum.data(), count);
    auto scaled = x;
    scale(scaled.data(), 3.0F, count);
    for (std::size_t i = 0; i < count; ++i) {
      EXPECT_EQ(sum[i], x[i] + y[i]);
      EXPECT_EQ(scaled[i], 3.0F * x[i]);
    }
  }
}

TEST(Vector, MaximumPassesOverNaN) {
  std::vector<float> x(40, -2.0F);
  for (const std::size_t at : {0U, 7U, 39U}) x[at] = std::nanf("");
  x[20] = 3;
  EXPECT_EQ(max(x.data(), x.size()), 3.0F);
}

TEST(Vector, ExponentialsWithinTwoUlps) {
  std::vector<float> x;
  for (float value = -87; value < 80; value += 0.0137F) x.push_back(value);
  auto e = x;
  const float sum = exp_sum(e.data(), 1, 0, e.size());
  double expected_sum = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double expected = std::exp(static_cast<double>(x[i]));
    EXPECT_NEAR(static_cast<double>(e[i]), expected, expected * 0x1p-22) << x[i];
    expected_sum += expected;
  }
  EXPECT_NEAR(static_cast<double>(sum), expected_sum, expected_sum * 1e-5);
}

TEST(Vector, ExponentialsOfTheExtremes) {
  std::vector<float> x{-kInf, -1e30F, -200, 0, 100, kInf, std::nanf(""), -104.5F, 1e30F};
  exp_sum(x.data(), 1, 0, x.size());
  EXPECT_EQ(x[0], 0);
  EXPECT_EQ(x[1], 0);
  EXPECT_EQ(x[2], 0);
  EXPECT_EQ(x[3], 1);
  EXPECT_EQ(x[4], kInf);
  EXPECT_EQ(x[5], kInf);
  EXPECT_TRUE(std::isnan(x[6]));
  EXPECT_EQ(x[7], 0);
  EXPECT_EQ(x[8], kInf);
}

// The largest exponent is 0 and the others are relative to it, for scores of any size.
TEST(Vector, ExponentsAreDifferencesOfExactProducts) {
  for (const float factor : {0.0721F, -0.0721F, 1.3F}) {
    for (const float size : {1.0F, 1e4F, 1e9F, 1e30F}) {
      std::vector<float> x;
      for (int i = 0; i < 37; ++i) x.push_back(size * (1 + 0x1p-23F * static_cast<float>(i * 7 % 37)));
      const double largest = max_or_nan(x.data(), factor, x.size());
      auto e = x;
      exp_sum(e.data(), factor, largest, e.size());
      double expected_largest = -kInf;
      for (const float v : x) {
        const double product = static_cast<double>(factor) * static_cast<double>(v);
        expected_largest = std::max(expected_largest, product);
      }
      EXPECT_EQ(largest, expected_largest);
      for (std::size_t i = 0; i < x.size(); ++i) {
        const double expected = std::exp(static_cast<double>(factor) * static_cast<double>(x[i]) - largest);
        EXPECT_NEAR(static_cast<double>(e[i]), expected, expected * 0x1p-18 + 1e-37) << factor << " " << x[i];
      }
    }
  }
}

TEST(Vector, LargestProductOfTheExtremes) {
  const std::vector<float> none, infinite{1, kInf, 2}, negative{-kInf, -kInf}, large{1e30F, 2e30F};
  EXPECT_EQ(max_or_nan(none.data(), 1, 0), -kInf);
  EXPECT_EQ(max_or_nan(none.data(), 0, 0), -kInf);
  EXPECT_EQ(max_or_nan(infinite.data(), 2, infinite.size()), kInf);
  EXPECT_EQ(max_or_nan(infinite.data(), -2, infinite.size()), -2);
  EXPECT_TRUE(std::isnan(max_or_nan(infinite.data(), 0, infinite.size())));
  EXPECT_EQ(max_or_nan(negative.data(), 1, negative.size()), -kInf);
  EXPECT_EQ(max_or_nan(large.data(), 1e10F, large.size()), kInf);  // beyond float
  EXPECT_EQ(max_or_nan(large.data(), -1e10F, large.size()), -kInf);
}

TEST(ParallelFor, DoesEveryItemOnceAndRethrows) {
  for (const int threads : {1, 2, 5}) {
    set_max_threads(threads);
    std::vector<int> done(1000);
    parallel_for(1000, [&](std::int64_t item) { ++done[static_cast<std::size_t>(item)]; });
    EXPECT_EQ(std::count(done.begin(), done.end(), 1), 1000);
    EXPECT_THROW(parallel_for(100,
                              [](std::int64_t item) {
                                if (item == 42) throw std::bad_alloc();
                              }),
                 std::bad_alloc);
    EXPECT_EQ(max_threads(), threads);  // the caller's setting is unchanged
  }
  set_max_threads(0);
}

// Each item waits for the other one to begin: on one thread neither would end.
bool run_side_by_side() {
  std::atomic<int> begun{0};
  std::atomic<bool> met{true};
  parallel_for(2, [&](std::int64_t) {
    ++begun;
    for (int i = 0; begun < 2 && met; ++i) {
      if (i == 10'000) met = false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  return met;
}

TEST(ParallelFor, RunsItemsSideBySide) {
  set_max_threads(2);
  for (int i = 0; i < 100; ++i) EXPECT_TRUE(run_side_by_side());
  set_max_threads(0);
}

TEST(ParallelFor, LoopsOfSeveralThreadsAndLoopsInLoops) {
  set_max_threads(3);
  std::vector<std::thread> callers;
  std::atomic<int> items{0};
  for (int i = 0; i < 4; ++i) {
    callers.emplace_back([&items] {
      for (int repetition = 0; repetition < 200; ++repetition) {
        parallel_for(7, [&](std::int64_t) {
          EXPECT_EQ(max_threads(), 1);
          parallel_for(3, [&](std::int64_t) { ++items; });
        });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(items, 4 * 200 * 7 * 3);
  EXPECT_EQ(max_threads(), 3);
  set_max_threads(0);
}

}  // namespace
}  // namespace hopwell::cpu
