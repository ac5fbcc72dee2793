// Every case of every operator on every backend of this machine.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <ctime>

#include "cases/case.hpp"
#include "sanitized.hpp"
#include "tile/cpu/parallel.hpp"

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
  const Report report = run(*c, backend, /*seed=*/1);
  if (report.unsupported) GTEST_SKIP() << report.failures.front();
  for (const std::string& failure : report.failures) ADD_FAILURE() << failure;
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

TEST(Comparison, TakesNoToleranceThatAllowsEverything) {
  Array array("x", DType::kFloat32, {2});
  array.set(0, 1), array.set(1, 2);
  const auto with = [&](const Tolerance& tolerance) { return compare({&array, tolerance, {1, 3}, {}}).failure; };
  EXPECT_THROW(with({}), std::logic_error);
  EXPECT_THROW(with({.relative = 1e-3}), std::logic_error);
  EXPECT_THROW(with({.norm = 1e-3, .relative = 1e-3}), std::logic_error);
  EXPECT_NE(with({.norm = 1e-3}), "");
  EXPECT_NE(with({.absolute = 1e-3}), "");
  EXPECT_NE(with({.exact = true}), "");
  EXPECT_EQ(with({.absolute = 2}), "");
}

// ---- references use all threads, and nothing of their results tells how many there were

const Case& case_of(const std::string& op, const std::string& name) {
  for (const Suite& suite : suites())
    for (const Case& c : suite.cases)
      if (c.op == op && c.name == name) return c;
  throw std::logic_error("no case " + op + "/" + name);
}

// Calls a function with this number of threads.
template <class Function>
void with_threads(int threads, Function function) {
  const int before = cpu::max_threads();
  cpu::set_max_threads(threads);
  function();
  cpu::set_max_threads(before);
}

Instance computed(const Case& c, int threads) {
  Random random(1);
  Instance instance;
  with_threads(threads, [&] {
    instance = c.make(random);
    instance.reference(instance);
  });
  return instance;
}

bool same_bits(const std::vector<double>& a, const std::vector<double>& b) {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(), [](double x, double y) {
           return std::bit_cast<std::uint64_t>(x) == std::bit_cast<std::uint64_t>(y);
         });
}

// Of processor time, by this thread or by all of them.
double seconds_of(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

class References : public testing::TestWithParam<std::pair<const char*, const char*>> {};

TEST_P(References, HaveTheSameBitsForAnyNumberOfThreads) {
  const Case& c = case_of(GetParam().first, GetParam().second);
  const Instance one = computed(c, 1);
  for (const int threads : {2, 5}) {
    const Instance more = computed(c, threads);
    for (std::size_t i = 0; i < one.arrays.size(); ++i) EXPECT_EQ(one.arrays[i].memory(), more.arrays[i].memory());
    for (std::size_t i = 0; i < one.outputs.size(); ++i) {
      EXPECT_TRUE(same_bits(one.outputs[i].expected, more.outputs[i].expected)) << one.outputs[i].array->name();
      EXPECT_TRUE(same_bits(one.outputs[i].magnitude, more.outputs[i].magnitude)) << one.outputs[i].array->name();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Large, References,
                         testing::Values(std::pair{"sparse_mla_forward", "many_tiles_h_q_40"},
                                         std::pair{"sparse_mla_backward", "many_tiles_h_q_40"},
                                         std::pair{"sparse_mla_backward", "accumulate_many_keys"},
                                         std::pair{"attention_distribution", "many_tiles_h_q_40"},
                                         std::pair{"paged_attention", "decoder_fp32_h32_d128"},
                                         std::pair{"nvfp4_linear", "n_17"}),
                         [](const auto& info) { return info.param.first + std::string("_") + info.param.second; });

// The slowest one: two threads halve what this one has to do, but for a little.
TEST(Reference, OfTheBackwardSharesItsWorkAmongThreads) {
  if (test::kSanitized) GTEST_SKIP() << "a sanitizer's own work is in the times";
  Random random(1);
  Instance instance = case_of("sparse_mla_backward", "many_tiles_h_q_40").make(random);
  double share = 1;  // of this thread, half where the machine has time for the other one
  for (int attempt = 0; attempt < 100 && share > 0.9; ++attempt) {
    const double mine = seconds_of(CLOCK_THREAD_CPUTIME_ID), all = seconds_of(CLOCK_PROCESS_CPUTIME_ID);
    with_threads(2, [&] { instance.reference(instance); });
    share = (seconds_of(CLOCK_THREAD_CPUTIME_ID) - mine) / (seconds_of(CLOCK_PROCESS_CPUTIME_ID) - all);
  }
  EXPECT_LT(share, 0.9);
}

INSTANTIATE_TEST_SUITE_P(All, OperatorCase, testing::ValuesIn(parameters()), test_name);

}  // namespace
}  // namespace hopwell::cases
