#include "runtime/device.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <iterator>
#include <mutex>
#include <stdexcept>
#include <string>

#include "runtime/check.hpp"
#include "runtime/driver_status.hpp"

namespace hopwell::runtime {
namespace {

// Driver entry points for device queries and for the current device (CUDA Driver API, "Device Management", "Primary
// Context Management", "Context Management", "Stream Management"). CUresult 0 is success.
struct Driver {
  int (*init)(unsigned flags);
  int (*version)(int* version);  // of CUDA, 1000 major + 10 minor
  int (*device_count)(int* count);
  int (*device_get)(int* device, int ordinal);
  int (*device_name)(char* name, int length, int device);
  int (*device_attribute)(int* value, int attribute, int device);
  int (*device_memory)(std::size_t* bytes, int device);
  int (*retain_primary_context)(void** context, int device);
  int (*context_device)(int* device);  // of the current context
  int (*push_context)(void* context);
  int (*pop_context)(void** context);
  int (*stream_context)(void* stream, void** context);
  int (*error_string)(int error, const char** text);
};
// CU_DEVICE_ATTRIBUTE_*
constexpr int kMultiprocessors = 16, kMemoryKilohertz = 36, kMemoryBits = 37, kL2Bytes = 38,
              kComputeCapabilityMajor = 75, kComputeCapabilityMinor = 76, kSharedBytesOptin = 97;

template <class Function>
bool look_up(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

bool look_up_all(void* library, Driver& d) {
  return look_up(library, "cuInit", d.init) && look_up(library, "cuDriverGetVersion", d.version) &&
         look_up(library, "cuDeviceGetCount", d.device_count) && look_up(library, "cuDeviceGet", d.device_get) &&
         look_up(library, "cuDeviceGetName", d.device_name) &&
         look_up(library, "cuDeviceGetAttribute", d.device_attribute) &&
         look_up(library, "cuDeviceTotalMem_v2", d.device_memory) &&
         look_up(library, "cuDevicePrimaryCtxRetain", d.retain_primary_context) &&
         look_up(library, "cuCtxGetDevice", d.context_device) &&
         look_up(library, "cuCtxPushCurrent_v2", d.push_context) &&
         look_up(library, "cuCtxPopCurrent_v2", d.pop_context) &&
         look_up(library, "cuStreamGetCtx", d.stream_context) && look_up(library, "cuGetErrorString", d.error_string);
}

std::string error_text(const Driver& d, int error) {
  const char* text = nullptr;
  return d.error_string(error, &text) == 0 && text != nullptr ? text : "unknown error " + std::to_string(error);
}

std::string cuda_version(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

#ifdef HOPWELL_CUDA_MAJOR
constexpr int kBuiltWith = HOPWELL_CUDA_MAJOR;
#else
constexpr int kBuiltWith = 0;  // built without CUDA
#endif

// Loads and initialises the driver. Returns "", or the reason why it cannot be used.
std::string load(Driver& d) {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);  // stays loaded: other libraries use it too
  if (library == nullptr) return "no NVIDIA driver (libcuda.so.1 is not found)";
  if (!look_up_all(library, d)) return "the NVIDIA driver is too old for any CUDA build of Hopwell";
  if (const int error = d.init(0); error != 0) return "the NVIDIA driver does not start: " + error_text(d, error);
  int version = 0;
  if (d.version(&version) != 0 || version / 1000 < kBuiltWith)
    return "the NVIDIA driver supports CUDA " + cuda_version(version) + ", and this build needs a driver for CUDA " +
           std::to_string(kBuiltWith) + ".0 or later";
  return "";
}

struct LoadedDriver {
  Driver driver{};
  std::string problem = load(driver);
};

const LoadedDriver& loaded_driver() {
  static const LoadedDriver loaded;
  return loaded;
}

// The initialised driver; null on a machine without a usable driver.
const Driver* driver() { return loaded_driver().problem.empty() ? &loaded_driver().driver : nullptr; }

std::vector<CudaDevice> query() {
  const Driver* const d = driver();
  int count = 0;
  if (d == nullptr || d->device_count(&count) != 0) return {};
  std::vector<CudaDevice> devices;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    int handle = 0, major = 0, minor = 0, shared_bytes = 0, l2_bytes = 0, kilohertz = 0, bits = 0;
    char name[256] = {};
    CudaDevice found{};
    if (d->device_get(&handle, ordinal) != 0 || d->device_name(name, sizeof name, handle) != 0 ||
        d->device_attribute(&major, kComputeCapabilityMajor, handle) != 0 ||
        d->device_attribute(&minor, kComputeCapabilityMinor, handle) != 0 ||
        d->device_attribute(&found.device.sms, kMultiprocessors, handle) != 0 ||
        d->device_attribute(&shared_bytes, kSharedBytesOptin, handle) != 0 ||
        d->device_attribute(&l2_bytes, kL2Bytes, handle) != 0 ||
        d->device_attribute(&kilohertz, kMemoryKilohertz, handle) != 0 ||
        d->device_attribute(&bits, kMemoryBits, handle) != 0 ||
        d->device_memory(&found.info.memory_bytes, handle) != 0) {
      return {};
    }
    found.info.name = name;
    found.info.compute_capability = found.device.capability = 10 * major + minor;
    found.device.location = {kDLCUDA, ordinal};
    found.device.cluster_sms = found.device.sms;
    found.device.shared_bytes = static_cast<std::size_t>(shared_bytes);
    found.device.l2_bytes = static_cast<std::size_t>(l2_bytes);
    found.device.memory_bytes_per_ns = 2e-6 * kilohertz * (bits / 8);  // two transfers per clock
    devices.push_back(found);
  }
  return devices;
}

void require(int result, const std::string& what) {
  if (result == 0) return;
  throw Error(HOPWELL_DEVICE_ERROR, what + ": " + error_text(*driver(), result));
}

// The primary context of a device, which the CUDA runtime uses too. Retained until the process ends.
void* primary_context(int ordinal) {
  struct Slot {
    std::once_flag once;
    void* context = nullptr;
  };
  static std::deque<Slot> slots(cuda_devices().size());
  Slot& slot = slots.at(static_cast<std::size_t>(ordinal));
  std::call_once(slot.once, [&] {
    int handle = 0;
    require(driver()->device_get(&handle, ordinal), "cuDeviceGet");
    require(driver()->retain_primary_context(&slot.context, handle), "cuDevicePrimaryCtxRetain");
  });
  return slot.context;
}

bool is_cuda_device(const DLDevice& device) {
  return device.device_type == kDLCUDA && device.device_id >= 0 &&
         static_cast<std::size_t>(device.device_id) < cuda_devices().size();
}

// Profiles of chips that the emulator can take instead of its own, as the driver reports them.
struct Profile {
  const char* name;
  int capability, sms, shared_kib, l2_mib;
  double memory_bytes_per_ns;
};
constexpr Profile kProfiles[] = {
    {"a100", 80, 108, 163, 40, 1555},    {"h100", 90, 132, 227, 50, 3352},
    {"h200", 90, 132, 227, 60, 4917},    {"b200", 100, 148, 227, 126, 7672},
    {"rtx-4090", 89, 128, 99, 72, 1008}, {"h100-mig", 90, 16, 227, 6, 419}};  // 1g.10gb, its smallest slice

}  // namespace

const std::vector<CudaDevice>& cuda_devices() {
  static const std::vector<CudaDevice> devices = query();
  return devices;
}

std::string cuda_status() {
  if (!loaded_driver().problem.empty()) return loaded_driver().problem;
  int version = 0;
  driver()->version(&version);
  const auto count = cuda_devices().size();
  return "driver of CUDA " + cuda_version(version) + ", " +
         (count == 0 ? "which reports no device" : std::to_string(count) + (count == 1 ? " device" : " devices"));
}

Device host_device(const DLDevice& location) {
  Device device{.location = location,
                .sms = 4,
                .cluster_sms = 132,
                .shared_bytes = std::size_t{227} * 1024,
                .l2_bytes = std::size_t{1} << 16,
                .concurrent_ctas = false};
  if (const char* name = std::getenv("HOPWELL_EMULATOR_DEVICE")) {
    const auto* profile = std::find_if(std::begin(kProfiles), std::end(kProfiles),
                                       [name](const Profile& p) { return std::string_view(name) == p.name; });
    if (profile == std::end(kProfiles))
      throw std::invalid_argument(
          std::string("HOPWELL_EMULATOR_DEVICE must be a100, h100, h200, b200, rtx-4090 or h100-mig; got ") + name);
    device.capability = profile->capability, device.sms = device.cluster_sms = profile->sms;
    device.shared_bytes = static_cast<std::size_t>(profile->shared_kib) << 10;
    device.l2_bytes = static_cast<std::size_t>(profile->l2_mib) << 20;
    device.memory_bytes_per_ns = profile->memory_bytes_per_ns;
  }
  if (const char* sms = std::getenv("HOPWELL_EMULATOR_SMS")) {
    const char* end = sms + std::strlen(sms);
    const auto [rest, error] = std::from_chars(sms, end, device.sms);
    if (error != std::errc() || rest != end || device.sms < 1)
      throw std::invalid_argument(std::string("HOPWELL_EMULATOR_SMS must be a number from 1 to 2147483647; got ") +
                                  sms);
    device.cluster_sms = device.sms;
  }
  return device;
}

int current_device() {
  int handle = -1;  // a CUdevice, which is the ordinal
  return driver() != nullptr && driver()->context_device(&handle) == 0 ? handle : -1;
}

DeviceGuard::DeviceGuard(const DLDevice& location) {
  // A device that does not exist has no backend. The caller reports that error.
  if (!is_cuda_device(location) || current_device() == location.device_id) return;
  require(driver()->push_context(primary_context(location.device_id)), "cuCtxPushCurrent");
  pushed_ = true;
}

DeviceGuard::~DeviceGuard() {
  void* popped = nullptr;
  if (pushed_) static_cast<void>(driver()->pop_context(&popped));
}

void check_stream(std::string_view operator_name, const DLDevice& location, Stream stream) {
  // CU_STREAM_LEGACY and CU_STREAM_PER_THREAD are 1 and 2.
  if (!is_cuda_device(location) || reinterpret_cast<std::uintptr_t>(stream) <= 2) return;
  void *context = nullptr, *popped = nullptr;
  require(driver()->stream_context(stream, &context), std::string(operator_name) + ": stream: cuStreamGetCtx");
  if (context == primary_context(location.device_id)) return;
  require(driver()->push_context(context), "cuCtxPushCurrent");
  const int owner = current_device();
  require(driver()->pop_context(&popped), "cuCtxPopCurrent");
  if (owner == location.device_id) return;
  throw Error(HOPWELL_INVALID_ARGUMENT,
              std::string(operator_name) + ": stream must be on " + to_string(location) +
                  ", the device of the tensors; got a stream of cuda:" + std::to_string(owner));
}

}  // namespace hopwell::runtime
