#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <hopwell/hopwell.hpp>
#include <optional>
#include <stdexcept>

#include "cases/case.hpp"
#include "commands.hpp"
#include "table.hpp"

namespace hopwell::cli {
namespace {

constexpr const char* kVariable = "HOPWELL_EMULATOR_REPORT";  // the library reads the variable at every launch

const cases::Case& case_named(const EmulateOptions& options) {
  std::vector<std::string> names;
  for (const cases::Suite& suite : cases::suites()) {
    if (suite.op != options.op) continue;
    for (const cases::Case& c : suite.cases) {
      if (!c.suits(options.backend, true, true)) continue;
      if (c.name == options.name) return c;
      names.push_back(c.name);
    }
  }
  throw UsageError("emulate: no case '" + options.name + "' of " + options.op + " runs on " + options.backend +
                   "; nearest of " + std::to_string(names.size()) + " cases: " + nearest(names, options.name));
}

// Time of the last write of a file; empty if there is no file.
using Stamp = std::optional<std::filesystem::file_time_type>;
Stamp stamp(const std::string& path) {
  std::error_code none;
  const auto time = std::filesystem::last_write_time(path, none);
  return none ? Stamp() : time;
}

}  // namespace

int emulate(const EmulateOptions& options) {
  const std::vector<std::string> there_are = backends(options.op);
  if (std::find(there_are.begin(), there_are.end(), options.backend) == there_are.end())
    throw UsageError("emulate: " + options.op + " has no kernel for " + options.backend +
                     "; backends: " + joined(there_are));
  const cases::Case& c = case_named(options);
  setenv("HOPWELL_EMULATOR_SEED", std::to_string(options.seed).c_str(), 1);
  setenv(kVariable, ((options.backend == "emu:sm100" ? "b200:" : "h200:") + options.report).c_str(), 1);
  cases::Random random(options.seed);
  cases::Instance instance = c.make(random);
  const Stamp before = stamp(options.report);
  instance.call(options.backend.c_str(), nullptr);
  unsetenv(kVariable);
  if (stamp(options.report) == before)
    throw UsageError("emulate: case '" + options.name + "' launches no kernel: there is nothing to report");
  std::printf("%s %s on %s: %s\n", options.op.c_str(), options.name.c_str(), options.backend.c_str(),
              options.report.c_str());
  return 0;
}

}  // namespace hopwell::cli
