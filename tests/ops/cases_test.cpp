// Every case of every operator on every backend of this machine.
#include <gtest/gtest.h>

#include "cases/case.hpp"
#include "sanitized.hpp"

namespace hopwell::cases {
namespace {

struct Parameter {
  const Case* c;
  std::string backend;
};

std::ostream& operator<<(std::ostream& stream, const Parameter& parameter) {
  return stream << parameter.c->op << "/" << parameter.c->name << " on " << parameter.backend;
}

constexpr std::uint64_t kSeeds = test::kSanitized ? 1 : 2;

class OperatorCase : public testing::TestWithParam<Parameter> {};

TEST_P(OperatorCase, AgreesWithFloat64) {
  const auto& [c, backend] = GetParam();
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
    const Report report = run(*c, backend, seed);
    if (report.unsupported) GTEST_SKIP() << report.failures.front();
    for (const std::string& failure : report.failures) ADD_FAILURE() << "seed " << seed << ": " << failure;
  }
}

std::vector<Parameter> parameters() {
  std::vector<Parameter> all;
  for (const Suite& suite : suites())
    for (const Case& c : suite.cases)
      for (const std::string& backend : backends(suite.op))
        if (c.suits(backend)) all.push_back({&c, backend});
  return all;
}

std::string test_name(const testing::TestParamInfo<Parameter>& info) {
  std::string name = info.param.c->op + "_" + info.param.c->name + "_" + info.param.backend;
  for (char& letter : name)
    if (std::isalnum(static_cast<unsigned char>(letter)) == 0) letter = '_';
  return name;
}

INSTANTIATE_TEST_SUITE_P(All, OperatorCase, testing::ValuesIn(parameters()), test_name);

}  // namespace
}  // namespace hopwell::cases
