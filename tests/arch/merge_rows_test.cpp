// Merges index rows of adjacent queries on the emulator and compares with the union of multisets counted in a map.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "harness.hpp"
#include "mutant.hpp"
#include "tile/gpu/merge_rows.hpp"

namespace hopwell::tile {
namespace {

struct Problem {
  std::string name;
  int members, groups, topk, s_kv;
  int shared = 60;  // maximum percentage of entries shared with the previous row
  bool lengths = false, ranges = false, positions = false;
  float most = 1;
};

// Result for a group. `length`: 0 if it is not merged.
enum class Verdict { left_at_first_look, left_after_count, merged };
struct Union {
  std::vector<int> keys;
  std::vector<uint8_t> member_masks;
  int length = 0;
  Verdict verdict = Verdict::merged;
};

class Rows {
 public:
  Rows(const Problem& problem, uint64_t seed) : problem_(problem), random_(seed) {
    const int queries = problem.members * problem.groups;
    for (int query = 0; query < queries; ++query) {
      const bool repeats = below(3) == 0;
      for (int i = 0; i < problem.topk; ++i) {
        const bool shared = query > 0 && below(100) < problem.shared;
        const bool again = repeats && i > 0 && below(2) == 0;  // repeats an entry of the same row
        indices_.push_back(shared  ? indices_[indices_.size() - size_t(problem.topk)]
                           : again ? indices_[indices_.size() - 1 - size_t(below(i))]
                                   : below(problem.s_kv + problem.s_kv / 8 + 4) - problem.s_kv / 16 - 2);
      }
      lengths_.push_back(below(6) == 0 ? 0 : below(problem.topk + 4) - 1);
      const int a = below(problem.s_kv), b = below(problem.s_kv);
      starts_.push_back(std::min(a, b) - 2), ends_.push_back(std::max(a, b) + 3);
      positions_.push_back(problem.s_kv - 1 - below(problem.s_kv / 3 + 1));
    }
    SelectionParams& s = merge_.selection;
    s = {indices_.data(), nullptr, problem.topk, 1, {}, problem.s_kv, problem.topk, true};
    if (problem.lengths) s.lengths = lengths_.data();
    if (problem.ranges)
      s.visibility.k_start = starts_.data(), s.visibility.k_end = ends_.data(),
      s.visibility.k_start_stride = s.visibility.k_end_stride = 1;
    if (problem.positions) s.visibility.q_positions = positions_.data(), s.visibility.q_positions_stride = 1;
    merge_.members = problem.members, merge_.words = MergeStorage::words_of(problem.members);
    merge_.most = problem.most;
  }

  struct Merged {
    arch::emu::Report report;
    std::vector<int> keys, lengths;  // with one more element each, which nothing may write
    std::vector<uint8_t> member_masks;
  };
  [[nodiscard]] Merged merge(const arch::emu::Options& options) const {
    const size_t all = capacity() * size_t(problem_.groups);
    Merged merged{{},
                  std::vector<int>(all + 1, kPoison),
                  std::vector<int>(size_t(problem_.groups) + 1, kPoison),
                  std::vector<uint8_t>(all + 1, kPoisonByte)};
    MergeParams p = merge_;
    p.keys = merged.keys.data(), p.member_masks = merged.member_masks.data(), p.lengths = merged.lengths.data();
    const arch::emu::LaunchShape shape{
        {uint32_t(problem_.groups), 1, 1}, {kMergeThreads, 1, 1}, {1, 1, 1}, sizeof(MergeStorage)};
    merged.report = arch::emu::launch(
        shape, options, [&] { merge_rows_of_group(p, arch::dynamic_smem<MergeStorage>(), arch::block_index()); });
    return merged;
  }

  // Whether the group's result is as expected. For a group that is not merged only the length is compared.
  [[nodiscard]] bool is_union(const Merged& merged, int group, const Union& expected) const {
    const auto first = std::ptrdiff_t(size_t(group) * capacity());
    return merged.lengths[size_t(group)] == expected.length &&
           (expected.length == 0 ||
            (std::equal(expected.keys.begin(), expected.keys.end(), merged.keys.begin() + first) &&
             std::equal(expected.member_masks.begin(), expected.member_masks.end(),
                        merged.member_masks.begin() + first)));
  }
  [[nodiscard]] bool are_unions(const Merged& merged) const {
    for (int group = 0; group < problem_.groups; ++group)
      if (!is_union(merged, group, union_of(group))) return false;
    return true;
  }

  // Returns the results of the groups.
  std::map<Verdict, int> expect_union(const arch::emu::Options& options) const {
    const Merged merged = merge(options);
    EXPECT_TRUE(merged.report.clean()) << merged.report.text();
    EXPECT_EQ(merged.keys.back(), kPoison);
    EXPECT_EQ(merged.member_masks.back(), kPoisonByte);
    EXPECT_EQ(merged.lengths.back(), kPoison);
    std::map<Verdict, int> verdicts;
    for (int group = 0; group < problem_.groups; ++group) {
      const Union expected = union_of(group);
      EXPECT_TRUE(is_union(merged, group, expected)) << "group " << group;
      ++verdicts[expected.verdict];
    }
    return verdicts;
  }

 private:
  static constexpr int kPoison = -77;
  static constexpr uint8_t kPoisonByte = 0xa5;

  [[nodiscard]] size_t capacity() const { return size_t(problem_.members * problem_.topk); }
  int below(int n) { return int(random_() % uint64_t(n)); }

  // Expected union. For each range of keys with bits: first occurrences of every key of any member, ascending, then
  // second occurrences in a row, and so on. The member mask of an nth occurrence has the members that have the key at
  // least n times.
  Union union_of(int group) const {
    std::map<int, std::array<int, kMostMembers>> counts;
    std::array<int, kMostMembers> entries{};
    int64_t first = problem_.s_kv;
    for (int m = 0; m < problem_.members; ++m) {
      const auto query = size_t(group * problem_.members + m);
      int64_t begin = 0, end = problem_.s_kv;
      if (problem_.ranges) begin = std::max(starts_[query], 0), end = std::min(ends_[query], problem_.s_kv);
      if (problem_.positions)
        end = std::min<int64_t>(end, (problem_.ranges ? starts_[query] : 0) + positions_[query] + 1);
      if (begin < end) first = std::min(first, begin);
      const int length = problem_.lengths ? std::clamp(lengths_[query], 0, problem_.topk) : problem_.topk;
      for (int i = 0; i < length; ++i) {
        const int key = indices_[query * size_t(problem_.topk) + size_t(i)];
        if (key < begin || key >= end) continue;
        ++counts[key][size_t(m)], ++entries[size_t(m)];
      }
    }
    Union result;
    int sum = 0;
    bool empty = false;
    for (int m = 0; m < problem_.members; ++m) sum += entries[size_t(m)], empty |= entries[size_t(m)] == 0;
    const int at_once = 32 * MergeStorage::words_of(problem_.members);
    for (; first < problem_.s_kv; first += at_once) {
      const auto begin = counts.lower_bound(int(first)),
                 end = counts.lower_bound(int(std::min<int64_t>(first + at_once, problem_.s_kv)));
      for (int time = 0; time < problem_.topk; ++time) {
        for (auto at = begin; at != end; ++at) {
          int member_mask = 0;
          for (int m = 0; m < problem_.members; ++m) member_mask |= int(at->second[size_t(m)] > time) << m;
          if (member_mask != 0) result.keys.push_back(at->first), result.member_masks.push_back(uint8_t(member_mask));
        }
      }
    }
    const int length = int(result.keys.size());
    const bool worth = !empty && float(length) <= problem_.most * float(sum);
    result.verdict = is_left_at_first_look(counts) ? Verdict::left_at_first_look
                     : worth                       ? Verdict::merged
                                                   : Verdict::left_after_count;
    result.length = result.verdict == Verdict::merged ? length : 0;
    return result;
  }

  // Entries with a sampled key, and the slots of these.
  [[nodiscard]] bool is_left_at_first_look(const std::map<int, std::array<int, kMostMembers>>& counts) const {
    std::set<uint32_t> slots;
    int entries = 0;
    for (const auto& [key, times] : counts) {
      const uint32_t hash = sample_hash(key);
      if (!is_sampled(hash)) continue;
      slots.insert(sample_slot(hash));
      entries += std::accumulate(times.begin(), times.end(), 0);
    }
    return is_clearly_too_long(entries, entries - int(slots.size()), problem_.most);
  }

  Problem problem_;
  std::mt19937_64 random_;
  std::vector<int> indices_, lengths_, starts_, ends_, positions_;
  MergeParams merge_{};
};

const Problem kProblems[] = {
    {.name = "few_keys", .members = 4, .groups = 6, .topk = 90, .s_kv = 40},
    {.name = "one_word", .members = 2, .groups = 5, .topk = 20, .s_kv = 31},
    {.name = "eight_members", .members = 8, .groups = 3, .topk = 130, .s_kv = 3000},
    {.name = "three_members", .members = 3, .groups = 4, .topk = 515, .s_kv = 5000},
    {.name = "nothing_shared", .members = 4, .groups = 3, .topk = 64, .s_kv = 60000, .shared = 0},
    {.name = "all_shared", .members = 4, .groups = 3, .topk = 64, .s_kv = 500, .shared = 100},
    {.name = "lengths", .members = 2, .groups = 12, .topk = 70, .s_kv = 300, .lengths = true},
    {.name = "ranges", .members = 2, .groups = 10, .topk = 70, .s_kv = 90, .ranges = true},
    {.name = "positions", .members = 3, .groups = 5, .topk = 70, .s_kv = 400, .positions = true},
    {.name = "two_rounds_of_bits", .members = 4, .groups = 2, .topk = 300, .s_kv = 140000},
    {.name = "bits_from_anywhere", .members = 2, .groups = 4, .topk = 200, .s_kv = 600000, .ranges = true},
    {.name = "exactly_all_bits", .members = 2, .groups = 2, .topk = 100, .s_kv = 262144},
    {.name = "longest_row", .members = 8, .groups = 1, .topk = 4096, .s_kv = 20000, .shared = 90},
    {.name = "nothing_shared_nor_worth_it",
     .members = 4,
     .groups = 3,
     .topk = 300,
     .s_kv = 90000,
     .shared = 0,
     .most = 0.6F},
    {.name = "worth_it_or_not_of_many_keys",
     .members = 2,
     .groups = 8,
     .topk = 700,
     .s_kv = 150000,
     .shared = 38,
     .most = 0.8F},
    {.name = "worth_it_or_not", .members = 4, .groups = 12, .topk = 40, .s_kv = 600, .shared = 45, .most = 0.6F},
};

class MergeRows : public testing::TestWithParam<Problem> {};

// In the first three inputs some groups are merged and some are not: because of a member without a key, or because the
// union is too long, which the sample or only the count detects.
TEST_P(MergeRows, AreTheUnionUnderManySchedules) {
  const Problem& problem = GetParam();
  std::map<Verdict, int> verdicts;
  for (uint64_t seed = 0; seed < arch::test::schedules(6); ++seed) {
    Rows rows(problem, seed);
    const std::map<Verdict, int> of_seed = rows.expect_union(arch::test::options_for(seed));
    ASSERT_FALSE(HasFailure()) << "seed " << seed;
    for (const auto& [verdict, groups] : of_seed)
      if (seed < 3) verdicts[verdict] += groups;
  }
  const bool any_shared = problem.shared > 0 || problem.most == 1;
  EXPECT_EQ(verdicts[Verdict::merged] > 0, any_shared);
  EXPECT_EQ(verdicts[Verdict::left_at_first_look] > 0, !any_shared);
  if (problem.lengths || problem.most < 1) EXPECT_GT(verdicts[Verdict::left_after_count], 0);
}

INSTANTIATE_TEST_SUITE_P(All, MergeRows, testing::ValuesIn(kProblems),
                         [](const auto& info) { return info.param.name; });

// Leaves out one synchronisation call at a time. Groups whose keys take several rounds, merged or not, must detect it.
TEST(MergeRowsMutants, EverySynchronisationCallIsNeeded) {
  std::vector<Rows> all;
  for (const Problem& problem : kProblems)
    if (problem.name == "worth_it_or_not_of_many_keys" || problem.name == "few_keys" ||
        problem.name == "two_rounds_of_bits")
      all.emplace_back(problem, 1);
  std::vector<arch::emu::SynchronisationCall> calls;
  for (const Rows& rows : all)
    for (const auto& counted : rows.merge(arch::test::options_for(0)).report.synchronisation)
      if (std::find(calls.begin(), calls.end(), counted.call) == calls.end()) calls.push_back(counted.call);
  ASSERT_GE(calls.size(), 8U);
  for (const auto& call : calls) {
    if (arch::test::is_kept(call.where)) continue;
    const auto noticed = [&] {
      for (uint64_t seed = 0; seed < 6; ++seed) {
        arch::emu::Options options = arch::test::options_for(seed);
        options.leave_out = call;
        for (const Rows& rows : all) {
          const Rows::Merged merged = rows.merge(options);
          if (!merged.report.clean() || !rows.are_unions(merged)) return true;
        }
      }
      return false;
    };
    EXPECT_TRUE(arch::test::in_child(noticed).noticed)
        << call.instruction << " at " << arch::emu::to_string(call.where) << " can be left out unnoticed";
  }
}

// A group that the sample rejects would also be rejected by the count, except near the limit. Four rows of 2,048 random
// keys whose union is `share` of their entries.
double left_at_first_look(double share, float most) {
  constexpr int kRows = 4, kKeys = 2048, kTrials = 400;
  std::mt19937_64 random(7);
  int left = 0;
  for (int trial = 0; trial < kTrials; ++trial) {
    std::set<uint32_t> slots;
    int entries = 0;
    const int keys_of_all = int(std::lround(kKeys * kRows * (1 - share) / (kRows - 1)));
    for (int i = 0; i < kRows * kKeys - (kRows - 1) * keys_of_all; ++i) {
      const uint32_t hash = sample_hash(int(random() % (1 << 20)));
      if (!is_sampled(hash)) continue;
      slots.insert(sample_slot(hash));
      entries += i < keys_of_all ? kRows : 1;
    }
    left += is_clearly_too_long(entries, entries - int(slots.size()), most);
  }
  return double(left) / kTrials;
}
TEST(MergeRowsFirstLook, LeavesWhatIsClear) {
  EXPECT_EQ(left_at_first_look(1, 0.6F), 1);
  EXPECT_GT(left_at_first_look(0.684, 0.6F), 0.85);  // the share of random rows of 8,192 keys
  EXPECT_LT(left_at_first_look(0.6, 0.6F), 0.06);
  EXPECT_EQ(left_at_first_look(0.5, 0.6F), 0);
  EXPECT_EQ(left_at_first_look(0.25, 0.6F), 0);
}

}  // namespace
}  // namespace hopwell::tile
