// Every case of every operator on every backend of this machine.
#include <gtest/gtest.h>

#include "cases/case.hpp"

namespace hopwell::cases {
namespace {

struct Parameter {
  const Case* c;
  std::string backend;
};

std::ostream& operator<<(std::ostream& stream, const Parameter& parameter) {
  return stream << parameter.c->op << "/" << parameter.c->name << " on " << parameter.backend;
}

class OperatorCase : public testing::TestWithParam<Parameter> {};

TEST_P(OperatorCase, AgreesWithFloat64) {
  const auto& [c, backend] = GetParam();
  for (const std::uint64_t seed : {1U, 2U}) {
    const Report report = run(*c, backend, seed);
    if (report.unsupported) GTEST_SKIP() << report.failures.front();
    for (const std::string& failure : report.failures) ADD_FAILURE() << "seed " << seed << ": " << failure;
  }
}

std::vector<Parameter> parameters() {
  std::vector<Parameter> all;
  for (const Suite& suite : suites())
    for (const Case& c : suite.cases)
      for (const std::string& backend : backends()) all.push_back({&c, backend});
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
