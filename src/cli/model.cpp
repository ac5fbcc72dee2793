#include "model.hpp"
#include "commands.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <vector>

namespace hopwell::cli {
namespace {

constexpr const char* kVariable = "HOPWELL_EMULATOR_MODEL";  // the library reads the variable at every launch
constexpr std::array kUnits = {"tensor pipe",   "shared memory", "gather",      "additions",
                               "tensor memory", "exponentials",  "issue slots", "HBM"};

const char* chip_of(const std::string& backend) {
  if (backend == "emu:sm90") return "h200";
  if (backend == "emu:sm100") return "b200";
  throw UsageError("check: --model needs --backend emu:sm90 or emu:sm100; got " + (backend.empty() ? "none" : backend));
}

std::string empty_file() {
  std::string path = (std::filesystem::temp_directory_path() / "hopwell-model-XXXXXX").string();
  const int file = mkstemp(path.data());
  if (file < 0) throw std::runtime_error("cannot write " + path);
  close(file);
  return path;
}

}  // namespace

LaunchCounts::LaunchCounts(const std::string& backend) {
  const std::string chip = chip_of(backend);
  path_ = empty_file();
  setenv(kVariable, (chip + ":" + path_).c_str(), 1);
}

LaunchCounts::~LaunchCounts() {
  unsetenv(kVariable);
  std::error_code ignored;
  std::filesystem::remove(path_, ignored);
}

nlohmann::json LaunchCounts::take() {
  nlohmann::json launches = nlohmann::json::array();
  std::ifstream file(path_);
  for (std::string line; std::getline(file, line);) launches.push_back(nlohmann::json::parse(line));
  std::filesystem::resize_file(path_, 0);
  return launches;
}

void judge(nlohmann::json& launches, double flops) {
  double executed = 0;
  for (const nlohmann::json& launch : launches) executed += launch["flops"].get<double>();
  for (nlohmann::json& launch : launches) {
    const auto cycles = [&](const char* unit) { return launch["cycles"][unit].get<double>(); };
    const char* longest = *std::max_element(kUnits.begin(), kUnits.end() - 1,  // units of an SM, so without HBM
                                            [&](auto a, auto b) { return cycles(a) < cycles(b); });
    launch["binds"] = longest;
    const double useful = executed > 0 ? std::min(1.0, flops / executed) : 0;
    launch["cap"] = cycles(longest) > 0 ? launch["full_rate_cycles"].get<double>() * useful / cycles(longest) : 0;
  }
}

Table model_table(const nlohmann::json& records) {
  std::vector<std::string> header = {"operator", "case", "kernel", "CTAs"};
  header.insert(header.end(), kUnits.begin(), kUnits.end());
  header.insert(header.end(), {"binds", "full rate", "cap"});
  Table table(header);
  for (const nlohmann::json& record : records) {
    if (!record.contains("model")) continue;
    for (const nlohmann::json& launch : record["model"]) {
      const auto kernel = launch["kernel"].get<std::string>();
      std::vector<std::string> row = {record["operator"], record["case"], kernel.empty() ? "unknown" : kernel,
                                      std::to_string(launch["ctas"].get<std::uint64_t>())};
      for (const char* unit : kUnits) row.push_back(format("%.0f", launch["cycles"][unit].get<double>()));
      row.push_back(launch["binds"]);
      row.push_back(format("%.0f", launch["full_rate_cycles"].get<double>()));
      row.push_back(format("%.3f", launch["cap"].get<double>()));
      table.add(row);
    }
  }
  return table;
}

}  // namespace hopwell::cli
