// sparse_mla_backward on emu:sm90, through the public interface: right and without findings under many schedules, and
// no synchronisation call of the kernel can be left out unnoticed.
#include <gtest/gtest.h>

#include <fstream>

#include "arch/emu/launch.hpp"
#include "cases/suites.hpp"
#include "harness.hpp"

namespace hopwell {
namespace {

const cases::Case& case_named(const std::string& name) {
  static const cases::Suite suite = cases::sparse_mla_backward();
  for (const cases::Case& c : suite.cases)
    if (c.name == name) return c;
  throw std::logic_error("no case " + name);
}

// Two steps of keys, every output, deterministic sums; and three for more heads than one tile has, as they come.
constexpr const char* kCases[] = {"topk_127", "h_q_70_invalid_indices"};

class SparseMlaBackwardSm90 : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Kernels, SparseMlaBackwardSm90, testing::ValuesIn(kCases),
                         [](const auto& info) { return std::string(info.param); });

// Whether the line says why the call stays although nothing here notices its absence.
bool kept(const arch::emu::CallSite& where) {
  std::ifstream file(where.file);
  std::string line;
  for (uint32_t number = 0; number < where.line; ++number) std::getline(file, line);
  return line.find("// kept: ") != std::string::npos;
}

TEST_P(SparseMlaBackwardSm90, RightAndCleanUnderManySchedules) {
  for (uint64_t seed = 0; seed < 12; ++seed) {
    arch::emu::Session session(arch::test::options_for(seed));
    const cases::Report report = cases::run(case_named(GetParam()), "emu:sm90", seed);
    ASSERT_FALSE(report.unsupported);
    ASSERT_TRUE(report.failures.empty()) << "seed " << seed << ": " << report.failures.front();
    ASSERT_TRUE(session.report.clean()) << "seed " << seed << "\n" << session.report.text();
  }
}

TEST_P(SparseMlaBackwardSm90, EverySynchronisationCallIsNeeded) {
  std::vector<arch::emu::SynchronisationSite> sites;
  {
    arch::emu::Session session(arch::test::options_for(0));
    cases::run(case_named(GetParam()), "emu:sm90", 1);
    sites = session.report.synchronisation;
  }
  // Those of attention_distribution, which a deterministic call makes first, have a test of their own.
  std::erase_if(sites, [](const auto& site) {
    return std::string_view(site.where.file).find("ops/sparse_mla_backward/") == std::string_view::npos;
  });
  ASSERT_GE(sites.size(), 20u);
  for (const auto& site : sites) {
    bool noticed = kept(site.where);
    for (uint64_t seed = 0; seed < 6 && !noticed; ++seed) {
      arch::emu::Options options = arch::test::options_for(seed);
      options.leave_out = site.where;
      arch::emu::Session session(options);
      noticed = !cases::run(case_named(GetParam()), "emu:sm90", 1).failures.empty() || !session.report.clean();
    }
    EXPECT_TRUE(noticed) << site.instruction << " at " << arch::emu::to_string(site.where);
  }
}

}  // namespace
}  // namespace hopwell
