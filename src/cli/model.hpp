// Demand of an operator call on the units of an SM, by the emulator's time model (docs/emulator.md).
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "table.hpp"

namespace hopwell::cli {

// Counts the launches of an emulated backend during its lifetime: emu:sm90 with the rates of an H200, emu:sm100 of a
// B200.
class LaunchCounts {
 public:
  explicit LaunchCounts(const std::string& backend);
  ~LaunchCounts();
  LaunchCounts(const LaunchCounts&) = delete;
  LaunchCounts& operator=(const LaunchCounts&) = delete;

  // Launches since the last call, in order: kernel, CTAs, operations, and cycles per CTA by unit.
  nlohmann::json take();

 private:
  std::string path_;
};

// Adds to each launch of one call the unit that bounds it and the fraction of the matmul rate that this allows: the
// operator's operations (`flops`, without padding and repeated work) divided by the operations that the tensor pipe
// could do in that time.
void judge(nlohmann::json& launches, double flops);

// A table with one row per launch of a check's records.
Table model_table(const nlohmann::json& records);

}  // namespace hopwell::cli
