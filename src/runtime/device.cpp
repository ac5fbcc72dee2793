#include "runtime/device.hpp"

#include <dlfcn.h>

namespace hopwell::runtime {
namespace {

// The handful of driver entry points that a device query needs (CUDA Driver API, "Device Management"). CUresult 0 is
// success.
struct Driver {
  int (*init)(unsigned flags);
  int (*device_count)(int* count);
  int (*device_get)(int* device, int ordinal);
  int (*device_name)(char* name, int length, int device);
  int (*device_attribute)(int* value, int attribute, int device);
  int (*device_memory)(std::size_t* bytes, int device);
};
constexpr int kComputeCapabilityMajor = 75, kComputeCapabilityMinor = 76;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*

template <class Function>
bool look_up(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

std::vector<DeviceInfo> query() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);  // stays loaded: other code of the process uses it too
  Driver driver{};
  if (library == nullptr || !look_up(library, "cuInit", driver.init) ||
      !look_up(library, "cuDeviceGetCount", driver.device_count) ||
      !look_up(library, "cuDeviceGet", driver.device_get) || !look_up(library, "cuDeviceGetName", driver.device_name) ||
      !look_up(library, "cuDeviceGetAttribute", driver.device_attribute) ||
      !look_up(library, "cuDeviceTotalMem_v2", driver.device_memory)) {
    return {};
  }
  int count = 0;
  if (driver.init(0) != 0 || driver.device_count(&count) != 0) return {};
  std::vector<DeviceInfo> devices;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    int device = 0, major = 0, minor = 0;
    char name[256] = {};
    DeviceInfo info{};
    if (driver.device_get(&device, ordinal) != 0 || driver.device_name(name, sizeof name, device) != 0 ||
        driver.device_attribute(&major, kComputeCapabilityMajor, device) != 0 ||
        driver.device_attribute(&minor, kComputeCapabilityMinor, device) != 0 ||
        driver.device_memory(&info.memory_bytes, device) != 0) {
      return {};
    }
    info.name = name;
    info.compute_capability = 10 * major + minor;
    devices.push_back(info);
  }
  return devices;
}

}  // namespace

const std::vector<DeviceInfo>& cuda_devices() {
  static const std::vector<DeviceInfo> devices = query();
  return devices;
}

}  // namespace hopwell::runtime
