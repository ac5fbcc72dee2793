#include <cstdio>
#include <hopwell/hopwell.hpp>

#include "commands.hpp"
#include "table.hpp"

namespace hopwell::cli {

int info() {
  std::printf("hopwell %s\n\n%s\n\n", version().c_str(), build_info().c_str());

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
