// The backend table: choice, reasons for unsupported problems, explanation, workspace, and errors in C.
#include "runtime/backend.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <stdexcept>
#include <vector>

#include "runtime/c_interface.hpp"

namespace hopwell::runtime {
namespace {

struct Problem {
  int size = 0;
  runtime::Device device{};
};
struct Plan {
  int doubled;
  std::size_t workspace_bytes;
};
struct Args {
  int size = 0;
  void* workspace = nullptr;
  std::size_t workspace_bytes = 0;
  const char* backend = nullptr;
};

int checks = 0, plans = 0, launched = 0;
void* launched_with = nullptr;

Problem check(const Args& args) {
  ++checks;
  if (args.size == 8) throw std::bad_alloc();
  if (args.size == 9) throw std::invalid_argument("surprise");
  return {.size = args.size};
}
PlanOr<Plan> plan_of(const Problem& p) {
  ++plans;
  if (p.size >= 100) return Unsupported{"needs size < 100"};
  return Plan{2 * p.size, p.size > 50 ? std::size_t{64} : std::size_t{0}};
}
void launch(const Problem& problem, const Plan& plan, void* workspace, Stream) {
  if (problem.size == 7) throw std::bad_alloc();
  launched = plan.doubled, launched_with = workspace;
}
const Registration cpu{"cpu", plan_of, launch};
const Entry entry{"op", check};

void run(const Args& args) { entry.run(args, nullptr); }

std::pair<hopwell_status, std::string> failure(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return {error.status(), error.what()};
  }
  return {HOPWELL_OK, "no error"};
}

TEST(Backend, RunsOnTheBestThatSupportsIt) {
  run({.size = 5});
  EXPECT_EQ(launched, 10);
  run({.size = 6, .backend = "cpu"});
  EXPECT_EQ(launched, 12);
}

TEST(Backend, SaysWhyNoneDoes) {
  const auto [status, text] = failure([] { run({.size = 100}); });
  EXPECT_EQ(status, HOPWELL_UNSUPPORTED);
  EXPECT_NE(text.find("op: no backend runs this ("), std::string::npos) << text;
  EXPECT_NE(text.find("cpu: needs size < 100"), std::string::npos) << text;
}

TEST(Backend, AnUnknownNameNamesTheGoodOnes) {
  const auto [status, text] = failure([] { run({.backend = "sm70"}); });
  EXPECT_EQ(status, HOPWELL_INVALID_ARGUMENT);
  EXPECT_EQ(text, "op: backend must be one of sm100, sm90, sm80, cpu, emu:sm80, emu:sm90, emu:sm100; got sm70");
}

TEST(Backend, ABackendWithoutAKernelSaysSo) {
  const auto [status, text] = failure([] { run({.backend = "emu:sm100"}); });
  EXPECT_EQ(status, HOPWELL_UNSUPPORTED);
  EXPECT_EQ(text, "op: no backend runs this (emu:sm100: no kernel for this operator)");
}

TEST(Backend, Explains) {
  const std::string text = explain(Problem{.size = 1});
  EXPECT_NE(text.find("cpu: chosen"), std::string::npos) << text;
  EXPECT_NE(text.find("emu:sm90: no kernel for this operator"), std::string::npos) << text;
  EXPECT_NE(explain(Problem{.size = 100}).find("cpu: needs size < 100"), std::string::npos);
}

TEST(Backend, ChecksTheWorkspace) {
  const auto [status, text] = failure([] { run({.size = 60}); });
  EXPECT_EQ(status, HOPWELL_INVALID_ARGUMENT);
  EXPECT_EQ(text, "op: workspace must be 64 bytes or more; got 0");
  alignas(16) char scratch[65];
  EXPECT_EQ(failure([&] { run({.size = 60, .workspace = scratch + 1, .workspace_bytes = 64}); }).second,
            "op: workspace must be aligned to 16 bytes; got an address that is not");
  EXPECT_EQ(failure([&] { run({.size = 60, .workspace = scratch, .workspace_bytes = 64}); }).first, HOPWELL_OK);
  EXPECT_EQ(entry.workspace_bytes({.size = 60}), 64U);
}

TEST(Entry, ACallChecksAndPlansOnce) {
  alignas(16) char scratch[64];
  checks = plans = 0;
  run({.size = 60, .workspace = scratch, .workspace_bytes = 64});
  EXPECT_EQ(checks, 1);
  EXPECT_EQ(plans, 1);
  EXPECT_EQ(launched_with, scratch);
}

TEST(Entry, AnAllocatorSuppliesTheWorkspaceBetweenPlanAndLaunch) {
  alignas(16) char scratch[64];
  std::vector<std::size_t> asked;
  auto allocate = [&](std::size_t bytes) -> void* {
    EXPECT_EQ(plans, static_cast<int>(asked.size()) + 1);
    asked.push_back(bytes);
    return bytes == 0 ? nullptr : scratch;
  };
  checks = plans = 0;
  for (const int size : {60, 6}) {
    const WorkspaceAllocator allocator(allocate);
    run({.size = size});
    EXPECT_EQ(launched_with, size > 50 ? scratch : nullptr);
    EXPECT_EQ(failure([] { run({.size = 60}); }).first, HOPWELL_INVALID_ARGUMENT);  // it serves a single call
    --plans;
  }
  EXPECT_EQ(asked, (std::vector<std::size_t>{64, 0}));
}

TEST(Entry, AnExceptionOfTheAllocatorReachesTheCaller) {
  auto allocate = [](std::size_t) -> void* { throw std::runtime_error("of the binding"); };
  const WorkspaceAllocator allocator(allocate);
  EXPECT_THROW(run({.size = 60}), std::runtime_error);
}

void from_c(const char*, const Args& from, Args& to) { to = from; }

TEST(Entry, ThrowsErrorsThatNameTheOperatorAndNothingElse) {
  using Failure = std::pair<hopwell_status, std::string>;
  const Failure no_memory{HOPWELL_OUT_OF_MEMORY, "op: out of memory"}, surprise{HOPWELL_INTERNAL, "op: surprise"};
  EXPECT_EQ(failure([&] { entry.run({.size = 7}, nullptr); }), no_memory);  // thrown by the backend
  EXPECT_EQ(failure([&] { entry.run({.size = 8}, nullptr); }), no_memory);
  EXPECT_EQ(failure([&] { static_cast<void>(entry.workspace_bytes({.size = 8})); }), no_memory);
  EXPECT_EQ(failure([&] { entry.run({.size = 9}, nullptr); }), surprise);
  EXPECT_EQ(failure([&] { static_cast<void>(entry.explain({.size = 9})); }), surprise);
  const Args args{.size = 9};
  EXPECT_EQ(entry.run_from_c(&args, nullptr), HOPWELL_INTERNAL);
  EXPECT_STREQ(hopwell_last_error(), "op: surprise");
}

TEST(CInterface, TurnsExceptionsIntoStatusAndMessage) {
  EXPECT_EQ(guarded([] {}), HOPWELL_OK);
  EXPECT_EQ(guarded([] { throw Error(HOPWELL_UNSUPPORTED, "op: not here"); }), HOPWELL_UNSUPPORTED);
  EXPECT_STREQ(hopwell_last_error(), "op: not here");
  EXPECT_EQ(guarded([] { throw std::runtime_error("surprise"); }), HOPWELL_INTERNAL);
  EXPECT_STREQ(hopwell_last_error(), "surprise");
  EXPECT_EQ(guarded([] { throw std::bad_alloc(); }), HOPWELL_OUT_OF_MEMORY);
}

TEST(CInterface, ZeroMeansTheDefaultAndMinusZeroMeansZero) {
  EXPECT_EQ(or_default(0.0F, 1.0F), 1);
  EXPECT_EQ(or_default(-0.0F, 1.0F), 0);
  EXPECT_EQ(or_default(1e-42F, 1.0F), 1e-42F);
  EXPECT_EQ(or_default(std::int64_t{64}, std::int64_t{512}), 64);
  EXPECT_EQ(or_default(0.0F, std::optional<float>()), std::nullopt);
}

TEST(Library, ListsItsBackends) {
  const auto names = backends();
  EXPECT_NE(std::find(names.begin(), names.end(), "cpu"), names.end());
  EXPECT_EQ(backend_info().size(), known_backends().size());
  EXPECT_STREQ(hopwell_version(), version().c_str());
  EXPECT_GT(time_cpu_matmul(), 0);
  EXPECT_GT(time_cpu_read(1 << 20), 0);
  EXPECT_NE(build_info().find("vectors"), std::string::npos);
}

TEST(Library, ListsTheBackendsOfAnOperator) {
  const auto names = backends("normalize_l1");
  EXPECT_NE(std::find(names.begin(), names.end(), "cpu"), names.end());
  EXPECT_EQ(std::find(names.begin(), names.end(), "sm90"), names.end());  // there is no sm90 kernel for that
  for (const char* unknown : {"no such operator", ""}) {
    try {
      backends(unknown);
      ADD_FAILURE() << "'" << unknown << "' is taken";
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), HOPWELL_INVALID_ARGUMENT);
      EXPECT_TRUE(std::string(error.what()).starts_with("backends: operator must be one of attention_distribution, "));
      EXPECT_TRUE(std::string(error.what()).ends_with(std::string("; got ") + unknown));
    }
  }
}

TEST(Library, UsesAsManyThreadsAsItIsTold) {
  const int unless_set = num_threads();
  EXPECT_GE(unless_set, 1);
  set_num_threads(3);
  EXPECT_EQ(num_threads(), 3);
  EXPECT_EQ(hopwell_set_num_threads(-1), HOPWELL_INVALID_ARGUMENT);
  EXPECT_STREQ(hopwell_last_error(), "set_num_threads: threads must be at least 1, or 0 for the default; got -1");
  EXPECT_EQ(hopwell_num_threads(), 3);
  EXPECT_EQ(hopwell_set_num_threads(0), HOPWELL_OK);
  EXPECT_EQ(num_threads(), unless_set);
}

}  // namespace
}  // namespace hopwell::runtime
