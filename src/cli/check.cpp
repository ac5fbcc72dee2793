#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <hopwell/hopwell.hpp>
#include <nlohmann/json.hpp>
#include <regex>

#include "cases/case.hpp"
#include "commands.hpp"
#include "table.hpp"

namespace hopwell::cli {
namespace {

// What the runs of one operator on one backend came to.
struct Tally {
  int passed = 0, failed = 0, skipped = 0;
  double worst = 0;  // the largest error as a share of its bound
};

nlohmann::json record(const cases::Case& c, const std::string& backend, std::uint64_t seed,
                      const cases::Report& report) {
  nlohmann::json outputs = nlohmann::json::array();
  for (const cases::Comparison& comparison : report.comparisons)
    outputs.push_back(
        {{"output", comparison.output}, {"norm_error", comparison.norm_error}, {"share_of_bound", comparison.worst}});
  const char* result = report.unsupported ? "skipped" : report.failures.empty() ? "passed" : "failed";
  return {{"operator", c.op},  {"case", c.name},   {"backend", backend},
          {"seed", seed},      {"result", result}, {"messages", report.failures},
          {"outputs", outputs}};
}

}  // namespace

int check(const CheckOptions& options) {
  if (options.device != 0) cases::cuda::use_device(options.device);
  if (!options.checker) setenv("HOPWELL_EMULATOR_CHECKER", "off", 1);
  const auto wanted = [&](const std::string& op) {
    return options.operators.empty() ||
           std::find(options.operators.begin(), options.operators.end(), op) != options.operators.end();
  };
  const std::regex names(options.cases.empty() ? ".*" : options.cases);
  nlohmann::json records = nlohmann::json::array();
  Table table({"operator", "backend", "passed", "failed", "skipped", "largest error / bound"});
  std::vector<std::string> messages;
  Tally total;
  {
    Progress progress;
    for (const cases::Suite& suite : cases::suites()) {
      if (!wanted(suite.op)) continue;
      for (const std::string& backend : backends(suite.op)) {  // those with a kernel for it
        if (!options.backend.empty() && backend != options.backend) continue;
        Tally tally;
        for (const cases::Case& c : suite.cases) {
          if (!c.suits(backend) || !std::regex_match(c.name, names)) continue;
          for (std::uint64_t seed = 1; seed <= options.seeds; ++seed) {
            progress.show(suite.op + " on " + backend + ": " + c.name);
            if (backend.starts_with("emu:")) setenv("HOPWELL_EMULATOR_SEED", std::to_string(seed).c_str(), 1);
            const cases::Report report = cases::run(c, backend, seed);
            ++(report.unsupported ? tally.skipped : report.failures.empty() ? tally.passed : tally.failed);
            for (const cases::Comparison& comparison : report.comparisons)
              tally.worst = std::max(tally.worst, comparison.worst);
            for (const std::string& failure : report.failures) {
              messages.push_back(std::string(report.unsupported ? "skipped " : "FAILED  ") + c.op + "/" + c.name +
                                 " on " + backend + ", seed " + std::to_string(seed) + ": " + failure);
            }
            records.push_back(record(c, backend, seed, report));
          }
        }
        table.add({suite.op, backend, std::to_string(tally.passed), std::to_string(tally.failed),
                   std::to_string(tally.skipped), format("%.3f", tally.worst)});
        total.passed += tally.passed, total.failed += tally.failed, total.skipped += tally.skipped;
      }
    }
  }
  for (const std::string& message : messages) std::puts(message.c_str());
  std::fputs(table.text().c_str(), stdout);
  std::printf("%d passed, %d failed, %d skipped\n", total.passed, total.failed, total.skipped);
  if (!options.json.empty()) {
    write_file(options.json,
               nlohmann::json{{"version", version()}, {"date", today()}, {"results", records}}.dump(1) + "\n");
  }
  return total.failed == 0 && total.passed > 0 ? 0 : 1;
}

}  // namespace hopwell::cli
