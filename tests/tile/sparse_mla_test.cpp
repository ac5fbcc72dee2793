// Building blocks of the sparse MLA operators: rows by key, the gradient of the softmax, valid entries, and ordered
// sums.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "tile/cpu/parallel.hpp"
#include "tile/cpu/turns.hpp"
#include "tile/cpu/vector.hpp"
#include "tile/float16.hpp"
#include "tile/selection.hpp"

namespace hopwell::cpu {
namespace {

std::vector<float> random(std::size_t count, unsigned seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(count);
  for (float& value : x) value = normal(engine);
  return x;
}

TEST(SparseMlaTile, MaxOrNanFindsNanAnywhere) {
  EXPECT_EQ(max_or_nan(nullptr, 1, 0), -std::numeric_limits<float>::infinity());
  for (std::size_t count = 1; count < 40; ++count) {
    auto x = random(count, 7);
    EXPECT_EQ(max_or_nan(x.data(), 1, count), max(x.data(), count));
    EXPECT_EQ(max_or_nan(x.data(), -0.3F, count), double{-0.3F} * double{*std::min_element(x.begin(), x.end())});
    for (std::size_t at = 0; at < count; ++at) {
      auto with_nan = x;
      with_nan[at] = std::nanf("");
      EXPECT_TRUE(std::isnan(max_or_nan(with_nan.data(), -0.3F, count))) << at << " of " << count;
    }
  }
}

TEST(SparseMlaTile, SoftmaxGradientAtEveryLength) {
  for (std::size_t count = 0; count < 40; ++count) {
    const auto p = random(count, 1), dp = random(count, 2);
    auto p_out = p, ds = dp;
    softmax_gradient(p_out.data(), ds.data(), 0.5F, 3.0F, 0.25F, count);
    for (std::size_t i = 0; i < count; ++i) {
      EXPECT_EQ(p_out[i], p[i] * 0.5F);
      EXPECT_EQ(ds[i], p[i] * 0.5F * (dp[i] - 3.0F) * 0.25F);
    }
  }
}

TEST(SparseMlaTile, RowsAreGatheredAndScatteredByKey) {
  const std::size_t rows = 9, stride = 23;
  const std::vector<std::int32_t> keys = {8, 0, 3, 3, 8, 1, 3};
  const auto table = random(rows * stride, 3);
  std::vector<bfloat16> table16(table.size());
  from_float(table.data(), table16.data(), table.size());
  for (const std::size_t width : {1U, 7U, 8U, 16U, 21U}) {
    std::vector<float> wide(keys.size() * width), narrow(keys.size() * width), sums = table, expected = table;
    gather_rows(table.data(), stride, keys.data(), keys.size(), width, wide.data());
    gather_rows(table16.data(), stride, keys.data(), keys.size(), width, narrow.data());
    scatter_add_rows(wide.data(), width, keys.data(), keys.size(), width, sums.data(), stride);
    for (std::size_t i = 0; i < keys.size(); ++i) {
      for (std::size_t d = 0; d < width; ++d) {
        const std::size_t from = static_cast<std::size_t>(keys[i]) * stride + d;
        EXPECT_EQ(wide[i * width + d], table[from]);
        EXPECT_EQ(narrow[i * width + d], to_float(table16[from]));
        expected[from] += table[from];
      }
    }
    EXPECT_EQ(sums, expected);
  }
}

TEST(SparseMlaTile, ValidEntriesOfARow) {
  const std::vector<std::int32_t> row = {5, -1, 0, INT32_MIN, 9, 10, INT32_MAX, 5, 3, 2};
  std::int32_t length = 9, position = 5;
  Selection selection;
  selection.indices = row.data(), selection.s_q = 1, selection.s_kv = 10, selection.topk = 10;
  std::vector<std::int32_t> keys(10), places(10);
  const auto valid = [&](std::int64_t first, std::int64_t last) {
    const auto count = static_cast<std::size_t>(selection.valid_entries(0, first, last, keys.data(), places.data()));
    std::vector<std::int32_t> both(keys.begin(), keys.begin() + static_cast<std::ptrdiff_t>(count));
    both.insert(both.end(), places.begin(), places.begin() + static_cast<std::ptrdiff_t>(count));
    return both;
  };
  using Keys = std::vector<std::int32_t>;
  EXPECT_EQ(valid(0, 10), (Keys{5, 0, 9, 5, 3, 2, 0, 2, 4, 7, 8, 9}));
  EXPECT_EQ(valid(2, 5), (Keys{0, 9, 0, 2}));
  selection.topk_length = &length;
  EXPECT_EQ(valid(4, 10), (Keys{9, 5, 3, 0, 3, 4}));
  EXPECT_EQ(valid(9, 10), Keys{});
  selection.visibility.q_positions = &position, selection.visibility.kv_stride = 2;  // keys 0, 1, 2
  EXPECT_EQ(valid(0, 10), (Keys{0, 2}));
  EXPECT_TRUE(selection.any_valid(0));
  length = 2;
  EXPECT_FALSE(selection.any_valid(0));
  selection.visibility.kv_stride = 1;  // keys 0 ... 5
  EXPECT_TRUE(selection.any_valid(0));
  length = 10;
  std::int32_t start = 3, end = 8;
  selection.visibility.k_start = &start, selection.visibility.k_end = &end;
  EXPECT_EQ(valid(0, 10), (Keys{5, 5, 3, 0, 7, 8}));  // 3 ... 7
  selection.visibility.kv_stride = 3;                 // 3 and 4
  EXPECT_EQ(valid(0, 10), (Keys{3, 8}));
  start = INT32_MAX;
  EXPECT_FALSE(selection.any_valid(0));
  start = INT32_MIN, end = INT32_MAX, selection.visibility.q_positions = nullptr;
  EXPECT_EQ(valid(0, 3), (Keys{5, 0, 0, 2}));
}

TEST(Turns, PassEveryStationInAscendingOrder) {
  constexpr std::int64_t kItems = 500, kStations = 3;
  Turns turns(kStations);
  std::vector<std::vector<std::int64_t>> order(kStations);
  parallel_for(kItems, [&](std::int64_t item) {
    for (std::int64_t station = 0; station < kStations; ++station) {
      turns.in_turn(station, item, [&] { order[static_cast<std::size_t>(station)].push_back(item); });
    }
  });
  std::vector<std::int64_t> ascending(kItems);
  std::iota(ascending.begin(), ascending.end(), 0);
  for (const auto& items : order) EXPECT_EQ(items, ascending);
}

}  // namespace
}  // namespace hopwell::cpu
