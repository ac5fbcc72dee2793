#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <hopwell/hopwell.hpp>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string_view>

#include "cases/case.hpp"
#include "commands.hpp"
#include "model.hpp"
#include "table.hpp"

namespace hopwell::cli {
namespace {

// Number of cases per operator and backend with --quick. The basic cases come first.
constexpr int kQuickCases = 2;

// Results of one operator on one backend.
struct Tally {
  int passed = 0, failed = 0, skipped = 0;
  double worst = 0;  // the largest error relative to its bound
  void add(const cases::Report& report) {
    ++(report.unsupported ? skipped : report.failures.empty() ? passed : failed);
    for (const cases::Comparison& comparison : report.comparisons) worst = std::max(worst, comparison.worst);
  }
};

nlohmann::json record(const cases::Case& c, const std::string& backend, std::uint64_t seed, const cases::Report& report,
                      double seconds) {
  nlohmann::json outputs = nlohmann::json::array();
  for (const cases::Comparison& comparison : report.comparisons)
    outputs.push_back(
        {{"output", comparison.output}, {"norm_error", comparison.norm_error}, {"share_of_bound", comparison.worst}});
  const char* result = report.unsupported ? "skipped" : report.failures.empty() ? "passed" : "failed";
  return {{"operator", c.op},   {"case", c.name},
          {"backend", backend}, {"seed", seed},
          {"result", result},   {"messages", report.failures},
          {"outputs", outputs}, {"processor_seconds", seconds}};
}

// `names`: all case names.
std::string nothing_to_run(const CheckOptions& options, const std::vector<std::string>& names) {
  return "no case" + (options.cases.empty() ? "" : " '" + options.cases + "'") +
         (options.operators.empty() ? "" : " of " + joined(options.operators)) +
         (options.backend.empty() ? "" : " runs on " + options.backend) +
         (names.empty() ? ""
                        : "; nearest of " + std::to_string(names.size()) + " cases: " + nearest(names, options.cases));
}

// Distinct remarks about runs, in the order of their first occurrence.
class Remarks {
 public:
  void add(const std::string& text) {
    const auto at = std::find_if(said_.begin(), said_.end(), [&](const auto& entry) { return entry.first == text; });
    at == said_.end() ? static_cast<void>(said_.emplace_back(text, 1)) : static_cast<void>(++at->second);
  }
  [[nodiscard]] const std::vector<std::pair<std::string, int>>& said() const { return said_; }

 private:
  std::vector<std::pair<std::string, int>> said_;
};

// The launches of one call of a case that has passed. Each case is called twice, to compare bits.
nlohmann::json model_of(const cases::Case& c, std::uint64_t seed, nlohmann::json launches) {
  launches.erase(launches.begin() + static_cast<std::ptrdiff_t>(launches.size() / 2), launches.end());
  cases::Random random(seed);
  judge(launches, c.make(random).flops);
  return launches;
}

constexpr const char* kModelUnits =
    "model of time: cycles a CTA by unit of an SM; full rate: its products at the tensor pipe's full rate; cap: the "
    "share of the matmul\nrate that the unit which binds allows the operator. HBM: every sector once, of this call "
    "alone from a cold L2 cache; it does not bind here";

bool wants(const CheckOptions& options, const std::string& op) {
  return options.operators.empty() ||
         std::find(options.operators.begin(), options.operators.end(), op) != options.operators.end();
}

// An operator's cases, and by target and reason the cases that are unsupported there.
nlohmann::json listed(const cases::Suite& suite) {
  nlohmann::json names = nlohmann::json::array(), unsupported = nlohmann::json::array();
  for (const cases::Case& c : suite.cases) names.push_back(c.name);
  for (const char* target : {"sm80", "sm90", "sm100"}) {
    std::vector<std::pair<std::string, nlohmann::json>> reasons;  // in the order of the cases
    for (const cases::Case& c : suite.cases) {
      const std::string reason = cases::reason_of(suite.unsupported, c.name, target);
      if (reason.empty()) continue;
      auto at = std::find_if(reasons.begin(), reasons.end(), [&](const auto& entry) { return entry.first == reason; });
      if (at == reasons.end()) at = reasons.insert(at, {reason, nlohmann::json::array()});
      at->second.push_back(c.name);
    }
    for (const auto& [reason, of_reason] : reasons)
      unsupported.push_back({{"target", target}, {"reason", reason}, {"cases", of_reason}});
  }
  return {{"operator", suite.op}, {"cases", names}, {"unsupported", unsupported}};
}

int list_cases(const CheckOptions& options) {
  nlohmann::json operators = nlohmann::json::array();
  Table table({"operator", "cases", "unsupported on", "cases", "reason"});
  for (const cases::Suite& suite : cases::suites()) {
    if (!wants(options, suite.op)) continue;
    operators.push_back(listed(suite));
    table.add({suite.op, std::to_string(suite.cases.size()), "", "", ""});
    for (const nlohmann::json& row : operators.back()["unsupported"])
      table.add({"", "", row["target"], std::to_string(row["cases"].size()), row["reason"]});
  }
  std::fputs(table.text().c_str(), stdout);
  if (!options.json.empty())
    write_file(options.json, nlohmann::json{{"version", version()}, {"operators", operators}}.dump(1) + "\n");
  return 0;
}

}  // namespace

int check(const CheckOptions& options) {
  if (options.list) return list_cases(options);
  const auto begin = std::chrono::steady_clock::now();
  if (options.device != 0) cases::cuda::use_device(options.device);
  nlohmann::json records = nlohmann::json::array();
  Table table({"operator", "backend", "passed", "failed", "skipped", "largest error / bound"});
  std::vector<std::string> failed, names;
  Remarks skipped;  // the text names the operator and the backend
  Tally total;
  std::optional<LaunchCounts> counts;
  if (options.model) counts.emplace(options.backend);
  {
    Progress progress;
    for (const cases::Suite& suite : cases::suites()) {
      if (!wants(options, suite.op)) continue;
      for (const std::string& backend : backends(suite.op)) {  // backends with a kernel for it
        if (!options.backend.empty() && backend != options.backend) continue;
        Tally tally;
        int cases_left = options.quick ? kQuickCases : std::numeric_limits<int>::max();
        for (const cases::Case& c : suite.cases) {
          if (!c.suits(backend, options.model, options.nightly || !options.cases.empty())) continue;
          if (!cases::matches(c.name, options.cases.empty() ? "*" : options.cases)) {
            if (std::find(names.begin(), names.end(), c.name) == names.end()) names.push_back(c.name);
            continue;
          }
          if (cases_left == 0) break;
          bool taken = true;
          for (std::uint64_t seed = 1; seed <= options.seeds; ++seed) {
            progress.show(suite.op + " on " + backend + ": " + c.name);
            // A case's two calls run under two schedules. The number of the case chooses the first, so that successive
            // cases begin with each of the three asynchronous policies in turn.
            const auto of_case = static_cast<std::uint64_t>(&c - suite.cases.data());
            const auto choose_schedule = [&](std::uint64_t call) {
              if (!backend.starts_with("emu:")) return;
              setenv("HOPWELL_EMULATOR_SEED", std::to_string(2 * seed - 1 + of_case + call).c_str(), 1);
              const bool checked = options.checker && (call == 0 || !options.light);
              if (!options.checker || options.light) setenv("HOPWELL_EMULATOR_CHECKER", checked ? "on" : "off", 1);
            };
            choose_schedule(0);
            const std::clock_t start = std::clock();
            const cases::Report report = cases::run(c, backend, seed, [&] { choose_schedule(1); });
            const double seconds = double(std::clock() - start) / CLOCKS_PER_SEC;
            tally.add(report);
            taken = !report.unsupported;
            const std::string run = c.op + "/" + c.name + " on " + backend + ", seed " + std::to_string(seed) + ": ";
            for (const std::string& failure : report.failures)
              report.unsupported ? skipped.add(failure) : failed.push_back(run + failure);
            records.push_back(record(c, backend, seed, report, seconds));
            if (!counts) continue;
            nlohmann::json launches = counts->take();
            if (report.failures.empty()) records.back()["model"] = model_of(c, seed, std::move(launches));
          }
          cases_left -= taken ? 1 : 0;
        }
        table.add({suite.op, backend, std::to_string(tally.passed), std::to_string(tally.failed),
                   std::to_string(tally.skipped), format("%.3f", tally.worst)});
        total.passed += tally.passed, total.failed += tally.failed, total.skipped += tally.skipped;
      }
    }
  }
  if (records.empty()) throw UsageError(nothing_to_run(options, names));
  for (const auto& [words, times] : skipped.said()) std::printf("skipped %3d  %s\n", times, words.c_str());
  for (const std::string& words : failed) std::printf("FAILED  %s\n", words.c_str());
  std::fputs(table.text().c_str(), stdout);
  if (counts) std::printf("%s%s\n", model_table(records).text().c_str(), kModelUnits);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  std::printf("%d passed, %d failed, %d skipped in %.0f s\n", total.passed, total.failed, total.skipped,
              seconds.count());
  if (!options.json.empty()) {
    write_file(options.json,
               nlohmann::json{{"version", version()}, {"date", today()}, {"results", records}}.dump(1) + "\n");
  }
  return total.failed == 0 && total.passed > 0 ? 0 : 1;
}

}  // namespace hopwell::cli
