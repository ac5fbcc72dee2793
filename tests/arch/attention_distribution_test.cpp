// attention_distribution on emu:sm90, through the public interface: right and without findings under many schedules, and no
// synchronisation call of the kernel can be left out unnoticed.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>

#include "arch/emu/launch.hpp"
#include "cases/suites.hpp"
#include "harness.hpp"

namespace hopwell {
namespace {

using arch::emu::Session;

// Two passes of heads, tiles that go round the ring, many queries a CTA, warpgroups that take turns at tiles round the
// ring, and rows that are not aligned.
constexpr const char* kCases[] = {"h_q_256", "production_l1", "lengths", "topk_2048", "strided"};

const cases::Case& case_named(const std::string& name) {
  static const cases::Suite suite = cases::attention_distribution();
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

TEST(AttentionDistributionSm90, RightAndCleanUnderManySchedules) {
  for (const char* name : kCases) {
    for (uint64_t seed = 0; seed < 9; ++seed) {
      Session session(arch::test::options_for(seed));
      const cases::Report report = cases::run(case_named(name), "emu:sm90", seed);
      ASSERT_FALSE(report.unsupported);
      ASSERT_TRUE(report.failures.empty()) << name << ", seed " << seed << ": " << report.failures.front();
      ASSERT_TRUE(session.report.clean()) << name << ", seed " << seed << "\n" << session.report.text();
    }
  }
}

TEST(AttentionDistributionSm90, EverySynchronisationCallIsNeeded) {
  std::vector<arch::emu::SynchronisationSite> sites;
  for (const char* name : kCases) {
    Session session(arch::test::options_for(0));
    cases::run(case_named(name), "emu:sm90", 1);
    for (const auto& site : session.report.synchronisation) {
      const auto same = [&](const auto& other) { return other.where == site.where; };
      if (std::none_of(sites.begin(), sites.end(), same)) sites.push_back(site);
    }
  }
  ASSERT_GE(sites.size(), 12u);
  for (const auto& site : sites) {
    bool noticed = kept(site.where);
    for (uint64_t seed = 0; seed < 6 && !noticed; ++seed) {
      for (const char* name : kCases) {
        if (noticed) break;
        arch::emu::Options options = arch::test::options_for(seed);
        options.leave_out = site.where;
        options.max_switches = 5'000'000;  // without a wait or an arrival, threads may poll for ever
        Session session(options);
        noticed = !cases::run(case_named(name), "emu:sm90", 1).failures.empty() || !session.report.clean();
      }
    }
    EXPECT_TRUE(noticed) << site.instruction << " at " << arch::emu::to_string(site.where);
  }
}

}  // namespace
}  // namespace hopwell
