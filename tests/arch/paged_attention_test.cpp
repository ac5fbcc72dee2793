// paged_attention's kernels on the emulator, through the public interface: right and without findings under many schedules, and no
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

constexpr const char* kBackend = "emu:sm80";

// A kind of kernel and the cases that reach all of its synchronisation calls again and again.
struct Subject {
  std::string name;
  std::vector<std::string> cases;
  uint64_t schedules;
};

const cases::Case& case_named(const std::string& name) {
  static const cases::Suite suite = cases::paged_attention();
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

class PagedAttention : public testing::TestWithParam<Subject> {};

TEST_P(PagedAttention, RightAndCleanUnderManySchedules) {
  for (const std::string& name : GetParam().cases) {
    for (uint64_t seed = 0; seed < GetParam().schedules; ++seed) {
      Session session(arch::test::options_for(seed));
      const cases::Report report = cases::run(case_named(name), kBackend, seed);
      ASSERT_FALSE(report.unsupported);
      ASSERT_TRUE(report.failures.empty()) << name << ", seed " << seed << ": " << report.failures.front();
      ASSERT_TRUE(session.report.clean()) << name << ", seed " << seed << "\n" << session.report.text();
    }
  }
}

TEST_P(PagedAttention, EverySynchronisationCallIsNeeded) {
  std::vector<arch::emu::SynchronisationSite> sites;
  for (const std::string& name : GetParam().cases) {
    Session session(arch::test::options_for(0));
    cases::run(case_named(name), kBackend, 1);
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
        noticed = !cases::run(case_named(name), kBackend, 1).failures.empty() || !session.report.clean();
      }
    }
    EXPECT_TRUE(noticed) << site.instruction << " at " << arch::emu::to_string(site.where);
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, PagedAttention,
    testing::Values(Subject{"rows", {"group_key_h_q_4_h_kv_4_bf16", "lengths_out_of_range"}, 8},
                    Subject{"columns", {"decoder_bf16_h32_h_kv_8_d128_vllm", "bias_hides_keys_vllm"}, 3},
                    Subject{"fragments", {"group_key_h_q_8_h_kv_2_bf16", "group_key_h_q_9_h_kv_1_bf16_hidden"}, 8}),
    [](const testing::TestParamInfo<Subject>& info) { return info.param.name; });

}  // namespace
}  // namespace hopwell
