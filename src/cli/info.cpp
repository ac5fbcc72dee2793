#include <cstdio>
#include <fstream>
#include <hopwell/hopwell.hpp>
#include <nlohmann/json.hpp>
#include <regex>
#include <sstream>

#include "commands.hpp"
#include "table.hpp"

namespace hopwell::cli {
namespace {

// Version of the NVIDIA driver, such as "580.95.05"; "" without a driver.
std::string driver_version() {
  std::ifstream file("/proc/driver/nvidia/version");
  std::string line;
  std::getline(file, line);
  std::smatch found;
  return std::regex_search(line, found, std::regex(R"(\s(\d+\.\d+(\.\d+)?)\s)")) ? found.str(1) : "";
}

// The facts of build_info(), whose lines are a word and its value.
nlohmann::json build_facts() {
  nlohmann::json facts;
  std::istringstream lines(build_info());
  for (std::string name, value; lines >> name >> std::ws && std::getline(lines, value);) facts[name] = value;
  return facts;
}

nlohmann::json facts() {
  nlohmann::json result{
      {"hopwell", version()},       {"commit", HOPWELL_COMMIT},           {"architectures", HOPWELL_ARCHITECTURES},
      {"driver", driver_version()}, {"devices", nlohmann::json::array()}, {"backends", nlohmann::json::array()}};
  result.update(build_facts());
  for (const DeviceInfo& device : cuda_devices())
    result["devices"].push_back({{"name", device.name},
                                 {"compute_capability", device.compute_capability},
                                 {"memory_bytes", device.memory_bytes}});
  for (const BackendInfo& backend : backend_info())
    result["backends"].push_back({{"name", backend.name}, {"missing", backend.missing}, {"needs", backend.needs}});
  return result;
}

}  // namespace

int info(bool json) {
  if (json) {
    std::printf("%s\n", facts().dump(1).c_str());
    return 0;
  }
  const std::string driver = driver_version();
  std::printf("hopwell %s\n\n%s\ndriver   %s\ncode for %s\ncommit   %s\n\n", version().c_str(), build_info().c_str(),
              driver.empty() ? "none" : driver.c_str(), HOPWELL_ARCHITECTURES, HOPWELL_COMMIT);

  const auto devices = cuda_devices();
  for (const DeviceInfo& device : devices) {
    std::printf("CUDA device: %s, compute capability %d.%d, %.1f GiB\n", device.name.c_str(),
                device.compute_capability / 10, device.compute_capability % 10,
                static_cast<double>(device.memory_bytes) / (1 << 30));
  }
  if (!devices.empty()) std::puts("");

  Table table({"backend", "state", "needs"});
  for (const BackendInfo& backend : backend_info())
    table.add({backend.name, backend.missing.empty() ? "ready" : backend.missing, backend.needs});
  std::fputs(table.text().c_str(), stdout);
  return 0;
}

}  // namespace hopwell::cli
