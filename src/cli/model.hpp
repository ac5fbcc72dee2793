// What a call of an operator asks of the units of an SM: the emulator's model of time (docs/emulator.md).
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "table.hpp"

namespace hopwell::cli {

// Counts the launches of an emulated backend while it lives: emu:sm90 as an H200, emu:sm100 as a B200.
class LaunchCounts {
 public:
  explicit LaunchCounts(const std::string& backend);
  ~LaunchCounts();
  LaunchCounts(const LaunchCounts&) = delete;
  LaunchCounts& operator=(const LaunchCounts&) = delete;

  // What was launched since the last time, in order: for each its kernel, CTAs, operations and cycles a CTA by unit.
  nlohmann::json take();

 private:
  std::string path_;
};

// Adds to each launch of one call the unit that binds, and the share of the matmul rate that it allows: the operator's
// operations (`flops`, without what is padded or done twice) over those that the tensor pipe could do meanwhile.
void judge(nlohmann::json& launches, double flops);

// One row a launch of the records of a check.
Table model_table(const nlohmann::json& records);

}  // namespace hopwell::cli
