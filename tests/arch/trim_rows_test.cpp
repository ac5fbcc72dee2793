// Finds the ends of index rows on the emulator and compares with a search from the end of each row.
#include <gtest/gtest.h>

#include <algorithm>
#include <climits>
#include <random>
#include <vector>

#include "harness.hpp"
#include "tile/gpu/trim_rows.hpp"

namespace hopwell::tile {
namespace {

constexpr int kPoison = -77;

struct Problem {
  int topk, s_kv = 50;
  bool lengths = false, ranges = false;
};

class Rows {
 public:
  Rows(const Problem& problem, uint64_t seed) : random_(seed) {
    selection_ = {nullptr, nullptr, problem.topk, 1, {}, problem.s_kv, problem.topk, true};
    for (int query = 0; query < kQueries; ++query) {
      // Valid and invalid entries up to a random end, then only invalid ones.
      const int end = query % 5 == 0 ? below(2) * problem.topk : below(problem.topk + 1);
      for (int i = 0; i < problem.topk; ++i)
        indices_.push_back(i < end && below(3) > 0 ? below(problem.s_kv) : invalid(problem.s_kv));
      lengths_.push_back(below(3) == 0 ? -4 : below(problem.topk + 40));
      starts_.push_back(below(problem.s_kv) - 2), ends_.push_back(starts_.back() + below(problem.s_kv));
    }
    selection_.indices = indices_.data();
    if (problem.lengths) selection_.lengths = lengths_.data();
    Visibility& v = selection_.visibility;
    if (problem.ranges) v.k_start = starts_.data(), v.k_end = ends_.data(), v.k_start_stride = v.k_end_stride = 1;
  }

  [[nodiscard]] std::vector<int> found(uint64_t seed) const {
    std::vector<int> lengths(kQueries + 1, kPoison);
    const TrimParams p{selection_, lengths.data(), kQueries};
    const arch::emu::LaunchShape shape{
        {(kQueries + kRowsOfTrimCta - 1) / kRowsOfTrimCta, 1, 1}, {kTrimThreads, 1, 1}, {1, 1, 1}, 0};
    const arch::emu::Report report = arch::emu::launch(shape, arch::test::options_for(seed), [&] {
      trim_row(p, arch::block_index() * kRowsOfTrimCta + arch::warp_index());
    });
    EXPECT_TRUE(report.clean()) << report.text();
    return lengths;
  }
  [[nodiscard]] std::vector<int> expected() const {
    std::vector<int> lengths;
    for (int query = 0; query < kQueries; ++query) {
      int length = selection_.topk;
      if (selection_.lengths) length = std::clamp(lengths_[size_t(query)], 0, length);
      const KeyRange visible = selection_.visibility.keys(query, selection_.s_kv);
      const int* const row = indices_.data() + size_t(query) * size_t(selection_.topk);
      while (length > 0 && !visible.has(row[length - 1])) --length;
      lengths.push_back(length);
    }
    lengths.push_back(kPoison);
    return lengths;
  }

 private:
  static constexpr int kQueries = 43;

  int below(int n) { return int(random_() % uint64_t(n)); }
  int invalid(int s_kv) {
    const int some[] = {-1, INT_MIN, s_kv, INT_MAX};
    return some[below(4)];
  }

  std::mt19937_64 random_;
  std::vector<int> indices_, lengths_, starts_, ends_;
  SelectionParams selection_;
};

TEST(TrimRows, EndBehindTheirLastValidEntry) {
  const Problem problems[] = {{1}, {31}, {32}, {33}, {287}, {288}, {289}, {900}, {700, 50, true, true}, {100, 1, true}};
  for (const Problem& problem : problems)
    for (uint64_t seed = 0; seed < 3; ++seed) {
      const Rows rows(problem, 100 * seed + uint64_t(problem.topk));
      EXPECT_EQ(rows.found(seed), rows.expected()) << "topk " << problem.topk << ", seed " << seed;
    }
}

}  // namespace
}  // namespace hopwell::tile
