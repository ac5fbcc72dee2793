// The operators' kernels on the emulator, through the public interface: correct and without findings under many
// schedules, and the tests detect it if any synchronisation call of a kernel is left out.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <hopwell/hopwell.hpp>
#include <limits>
#include <list>
#include <map>

#include "arch/emu/launch.hpp"
#include "cases/suites.hpp"
#include "harness.hpp"
#include "mutant.hpp"

namespace hopwell {
namespace {

using arch::emu::Session;

// Kernels and their cases, with the operator's suite.
struct Subject : cases::Subject {
  const cases::Suite* suite;
  friend std::ostream& operator<<(std::ostream& to, const Subject& subject) { return to << subject.backend; }
};

// A subject's cases with inputs and expected results, made once for all runs.
struct Prepared {
  cases::Case c;
  cases::Instance instance;
};
std::list<Prepared> prepare_cases(const Subject& subject) {
  std::list<Prepared> prepared;
  for (const std::string& name : subject.cases) {
    const cases::Case c = subject.suite->case_named(name);
    prepared.push_back({c, cases::prepare(c, 1)});
  }
  return prepared;
}

// Runs a case under two schedules, one per call. In the second schedule CTA 0 of a cluster is late: other CTAs must
// have waited for its data.
cases::Report run_under_two(Session& session, uint64_t pair, Prepared& of_case, const std::string& backend) {
  const auto choose = [&](uint64_t seed, int late_cta) {
    const arch::emu::Options chosen = arch::test::options_for(seed);
    session.options.seed = chosen.seed, session.options.async = chosen.async;
    session.options.late_cta = late_cta;
  };
  choose(2 * pair, -1);
  return cases::run(of_case.c, of_case.instance, backend, [&] { choose(2 * pair + 1, 0); });
}

// A mutant leaves out a synchronisation call, or initialises barriers with one arrival more or fewer. `cases` execute
// the place, shortest first.
struct Mutant {
  int arrivals;  // more than the kernel's; 0: a call is left out
  std::string name;
  arch::emu::CallSite where;
  std::function<void(arch::emu::Options&)> change;
  std::vector<Prepared*> cases;
};

std::vector<Mutant> mutants_in(const arch::emu::Report& report) {
  std::vector<Mutant> mutants;
  for (const auto& counted : report.synchronisation) {
    const auto& call = counted.call;
    mutants.push_back({0,
                       call.instruction + " at " + arch::emu::to_string(call.where) + " left out",
                       call.where,
                       [=](arch::emu::Options& options) { options.leave_out = call; },
                       {}});
  }
  for (const auto& barriers : report.barriers) {
    for (const int by : {1, -1}) {
      if (int(barriers.arrivals) + by == 0) continue;
      mutants.push_back({by,
                         barriers.name + " at " + arch::emu::to_string(barriers.where) + " with " +
                             std::to_string(int(barriers.arrivals) + by) + " arrivals",
                         barriers.where,
                         [=](arch::emu::Options& options) { options.change_count = {barriers, by}; },
                         {}});
    }
  }
  return mutants;
}

// The mutants of all places of the operator that the cases execute.
std::vector<Mutant> mutants_of(const Subject& subject, std::list<Prepared>& prepared) {
  std::vector<Mutant> mutants;
  std::map<const Prepared*, uint64_t> switches;
  for (Prepared& of_case : prepared) {
    Session session({});
    run_under_two(session, 0, of_case, subject.backend);
    switches[&of_case] = session.report.statistics.switches;
    for (Mutant& mutant : mutants_in(session.report)) {
      if (mutant.where.file.find(subject.folder) == std::string::npos) continue;
      auto known = std::find_if(mutants.begin(), mutants.end(), [&](const Mutant& one) {
        return one.name == mutant.name && one.where == mutant.where;
      });
      if (known == mutants.end()) known = mutants.insert(known, std::move(mutant));
      known->cases.push_back(&of_case);
    }
  }
  for (Mutant& mutant : mutants)
    std::stable_sort(mutant.cases.begin(), mutant.cases.end(),
                     [&](const Prepared* x, const Prepared* y) { return switches[x] < switches[y]; });
  return mutants;
}

// Whether any of the cases fails or has a finding.
bool is_noticed(const Subject& subject, const Mutant& mutant) {
  for (uint64_t pair = 0; pair < 3; ++pair) {
    for (Prepared* of_case : mutant.cases) {
      arch::emu::Options options;
      mutant.change(options);
      options.max_switches = 5'000'000;  // without a wait or an arrival, threads may poll for ever
      options.throw_findings = true;     // ends the launch at its first finding, which is enough to fail the case
      Session session(options);
      if (!run_under_two(session, pair, *of_case, subject.backend).failures.empty()) return true;
    }
  }
  return false;
}

class Operators : public testing::TestWithParam<Subject> {
 protected:
  void SetUp() override {
    if (GetParam().multiprocessors) ASSERT_EQ(setenv("HOPWELL_EMULATOR_SMS", GetParam().multiprocessors, 1), 0);
  }
  void TearDown() override { unsetenv("HOPWELL_EMULATOR_SMS"); }
};

bool is_nightly() { return arch::test::schedules(1) > 1; }

// `make test` runs the first case under one pair of schedules. RightOnDevicesOfAllSizes runs this pair for every case,
// and `hopwell check` another pair; together they meet all three policies of asynchronous work.
TEST_P(Operators, RightAndCleanUnderManySchedules) {
  const Subject& subject = GetParam();
  const uint64_t schedules =
      is_nightly() ? arch::test::schedules(subject.schedules) : std::min<uint64_t>(subject.schedules, 2);
  const auto end = is_nightly() ? subject.cases.end() : subject.cases.begin() + 1;
  for (const std::string& name : std::vector<std::string>(subject.cases.begin(), end)) {
    const cases::Case c = subject.suite->case_named(name);
    for (uint64_t pair = 0; 2 * pair < schedules; ++pair) {
      Session session({});
      Prepared prepared{c, cases::prepare(c, pair)};
      const cases::Report report = run_under_two(session, pair, prepared, subject.backend);
      ASSERT_FALSE(report.unsupported);
      ASSERT_TRUE(report.failures.empty()) << name << ", pair " << pair << ": " << report.failures.front();
      ASSERT_TRUE(session.report.clean()) << name << ", pair " << pair << "\n" << session.report.text();
    }
  }
}

// Numbers of SMs of the devices on which a backend's machine code runs: a slice of a GPU and a large card; with
// HOPWELL_EMULATOR_SCHEDULES (make nightly) also a small card.
std::vector<const char*> sizes_of_devices(const std::string& backend) {
  std::vector<const char*> sizes = {"8", backend == "emu:sm90" ? "132" : "148"};
  if (is_nightly()) sizes.push_back("66");
  return sizes;
}

// Plans depend on the number of SMs. At most one size may leave a case to another backend. `make test` runs the first
// case on all sizes, and the others on one size each, in turn.
TEST_P(Operators, RightOnDevicesOfAllSizes) {
  const std::vector<const char*> all_sizes = sizes_of_devices(GetParam().backend);
  size_t number = 0;
  for (Prepared& of_case : prepare_cases(GetParam())) {
    const std::string& name = of_case.c.name;
    std::vector<const char*> sizes = all_sizes;
    if (!is_nightly() && number > 0) sizes = {all_sizes[number % all_sizes.size()]};
    ++number;
    size_t runs = 0;
    for (const char* multiprocessors : sizes) {
      ASSERT_EQ(setenv("HOPWELL_EMULATOR_SMS", multiprocessors, 1), 0);
      Session session({});
      const cases::Report report = run_under_two(session, 0, of_case, GetParam().backend);
      unsetenv("HOPWELL_EMULATOR_SMS");
      if (report.unsupported) continue;
      ++runs;
      EXPECT_TRUE(report.failures.empty()) << name << " on " << multiprocessors << ": " << report.failures.front();
      EXPECT_TRUE(session.report.clean()) << name << " on " << multiprocessors << "\n" << session.report.text();
    }
    EXPECT_GE(runs, sizes.size() - 1) << name;
  }
}

TEST_P(Operators, EverySynchronisationCallIsNeeded) {
  std::list<Prepared> prepared = prepare_cases(GetParam());
  const std::vector<Mutant> mutants = mutants_of(GetParam(), prepared);
  const auto calls = std::count_if(mutants.begin(), mutants.end(), [](const Mutant& one) { return one.arrivals == 0; });
  ASSERT_GE(size_t(calls), GetParam().calls);
  for (const Mutant& mutant : mutants) {
    if (mutant.arrivals <= 0 && arch::test::is_kept(mutant.where)) continue;
    const auto verdict = arch::test::in_child([&] { return is_noticed(GetParam(), mutant); });
    EXPECT_TRUE(verdict.noticed) << mutant.name << ": unnoticed";
    if (!verdict.how.empty()) std::printf("%s: noticed by %s\n", mutant.name.c_str(), verdict.how.c_str());
  }
}

// A backend that supports fewer or more cases than recorded fails the cases.
TEST(Refusals, AreThoseThatAreRecorded) {
  const std::string backend = "emu:sm80";
  const cases::Suite forward = cases::sparse_mla_forward();
  cases::Case refused = forward.case_named("odd_widths"), taken = forward.case_named("topk_127");
  EXPECT_TRUE(cases::run(refused, backend, 1).unsupported);
  EXPECT_TRUE(cases::run(taken, backend, 1).failures.empty());
  std::swap(refused.name, taken.name);
  const cases::Report narrower = cases::run(refused, backend, 1), wider = cases::run(taken, backend, 1);
  EXPECT_FALSE(narrower.unsupported || wider.unsupported);
  EXPECT_EQ(narrower.failures.size(), 1U);
  ASSERT_FALSE(wider.failures.empty());
  EXPECT_NE(wider.failures.front().find("runs, although its suite records"), std::string::npos);
}

// A key with an infinity has score −inf with every head, and NaN with the zeros of padding heads. If the lse is +inf,
// as without a valid entry, the result is 0 for any score.
TEST(AttentionDistributionSm80, InfiniteKeysCountForTheHeadsThatExist) {
  constexpr int kHeads = 5, kColumns = 64;
  constexpr bfloat16 kMinusOne{0xbf80}, kHalf{0x3f00}, kInfinity{0x7f80};
  std::vector<bfloat16> q(kHeads * kColumns, kHalf), kv(2 * kColumns, kHalf);
  for (size_t head = 0; head < kHeads; ++head) q[head * kColumns] = kMinusOne;
  kv[0] = kInfinity;
  std::vector<int32_t> indices{0, 1};
  std::vector<float> lse(kHeads), out(2, -1.0F);
  const auto run = [&](float lse_of_all) {
    std::fill(lse.begin(), lse.end(), lse_of_all);
    const Tensor queries(q.data(), {1, kHeads, kColumns}), keys(kv.data(), {2, kColumns}), rows(indices.data(), {1, 2}),
        sums(lse.data(), {1, kHeads}), attn(out.data(), {1, 2});
    attention_distribution({.q = queries,
                            .kv = keys,
                            .indices = rows,
                            .lse = sums,
                            .sm_scale = 0.125F,
                            .out = attn,
                            .backend = "emu:sm80"});
  };
  run(2);
  EXPECT_EQ(out[0], 0.0F);
  EXPECT_NEAR(out[1], kHeads * std::exp(0.125 * (63 * 0.25 - 0.5) - 2), 1e-5);
  run(std::numeric_limits<float>::infinity());
  EXPECT_EQ(out, std::vector<float>(2, 0.0F));
}

std::vector<Subject> subjects() {
  std::vector<Subject> all;
  for (const cases::Suite& suite : cases::suites())
    for (const cases::Subject& subject : suite.subjects) all.push_back({subject, &suite});
  return all;
}
INSTANTIATE_TEST_SUITE_P(All, Operators, testing::ValuesIn(subjects()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace hopwell
