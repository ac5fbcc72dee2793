// sparse_mla_forward's kernels on the emulator, through the public interface: right and without findings under many schedules, and no
// synchronisation call of a kernel can be left out unnoticed.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>

#include "arch/emu/launch.hpp"
#include "cases/suites.hpp"
#include "harness.hpp"

namespace hopwell {
namespace {

using arch::emu::Session;

// A backend and the cases that reach all of its kernel's synchronisation calls again and again.
struct Subject {
  std::string backend;
  std::vector<std::string> cases;
  uint64_t schedules;
};

const cases::Case& case_named(const std::string& name) {
  static const cases::Suite suite = cases::sparse_mla_forward();
  for (const cases::Case& c : suite.cases)
    if (c.name == name) return c;
  throw std::logic_error("no case " + name);
}

// Whether the line says why the call stays although nothing here notices its absence.
bool kept(const arch::emu::CallSite& where) {
  std::ifstream file(where.file);
  std::string line;
  for (uint32_t number = 0; number < where.line; ++number) std::getline(file, line);
  return line.find("// kept: ") != std::string::npos;
}

class SparseMlaForward : public testing::TestWithParam<Subject> {};

TEST_P(SparseMlaForward, RightAndCleanUnderManySchedules) {
  for (const std::string& name : GetParam().cases) {
    for (uint64_t seed = 0; seed < GetParam().schedules; ++seed) {
      Session session(arch::test::options_for(seed));
      const cases::Report report = cases::run(case_named(name), GetParam().backend, seed);
      ASSERT_FALSE(report.unsupported);
      ASSERT_TRUE(report.failures.empty()) << name << ", seed " << seed << ": " << report.failures.front();
      ASSERT_TRUE(session.report.clean()) << name << ", seed " << seed << "\n" << session.report.text();
    }
  }
}

TEST_P(SparseMlaForward, EverySynchronisationCallIsNeeded) {
  std::vector<arch::emu::SynchronisationSite> sites;
  for (const std::string& name : GetParam().cases) {
    Session session(arch::test::options_for(0));
    cases::run(case_named(name), GetParam().backend, 1);
    for (const auto& site : session.report.synchronisation) {
      const auto same = [&](const auto& other) { return other.where == site.where; };
      if (std::none_of(sites.begin(), sites.end(), same)) sites.push_back(site);
    }
  }
  ASSERT_GE(sites.size(), 6u);
  for (const auto& site : sites) {
    bool noticed = kept(site.where);
    for (uint64_t seed = 0; seed < 6 && !noticed; ++seed) {
      for (const std::string& name : GetParam().cases) {
        if (noticed) break;
        arch::emu::Options options = arch::test::options_for(seed);
        options.leave_out = site.where;
        options.max_switches = 5'000'000;  // without a wait or an arrival, threads may poll for ever
        Session session(options);
        noticed = !cases::run(case_named(name), GetParam().backend, 1).failures.empty() || !session.report.clean();
      }
    }
    EXPECT_TRUE(noticed) << site.instruction << " at " << arch::emu::to_string(site.where);
  }
}

INSTANTIATE_TEST_SUITE_P(All, SparseMlaForward,
                         testing::Values(Subject{"emu:sm80", {"topk_127"}, 50},
                                         Subject{"emu:sm90", {"d_qk_512_h_q_100", "masks_h_q_40", "many_tiles"}, 3},
                                         Subject{"emu:sm90", {"d_qk_512_h_q_20", "large_scores_h_q_20", "lengths"}, 3}),
                         [](const testing::TestParamInfo<Subject>& info) {
                           return info.param.backend.substr(4) + '_' + info.param.cases.front();
                         });

}  // namespace
}  // namespace hopwell
