// The devices of this machine. Found and queried without linking to a driver.
#pragma once

#include <hopwell/library.hpp>

#include <cstddef>
#include <string_view>
#include <vector>

namespace hopwell::runtime {

// The properties of a device that plans use. A plan contains no constant of a particular chip; it reads the device
// instead.
struct Device {
  DLDevice location{kDLCPU, 0};  // of the tensors
  int capability = 0;            // 90 for Hopper; 0: no chip, the emulator's own profile
  int sms = 0;                   // number of SMs: the number of persistent CTAs that run at the same time
  int cluster_sms = 0;           // number of SMs that clusters can fill; the emulator has a different number
  std::size_t shared_bytes = 0;  // maximum dynamic shared memory of a CTA
  std::size_t l2_bytes = 0;
  double memory_bytes_per_ns = 0;  // bandwidth from memory clock and bus width; 0 if the driver does not report them
  bool concurrent_ctas = true;     // CTAs can wait for each other; false: the emulator runs one after the other

  // Whether a kernel may start before the previous kernel ends: LaunchShape::programmatic_dependency.
  [[nodiscard]] bool has_dependent_launches() const { return capability >= 90; }
  // Whether CTAs can form clusters. Hopper added both features.
  [[nodiscard]] bool has_clusters() const { return capability == 0 || capability >= 90; }
};

// The CUDA devices, in the order of their ordinals. Queried once from the driver library, which is looked up at run
// time, so that the library also runs on a machine without a driver.
struct CudaDevice {
  DeviceInfo info;
  Device device;
};
const std::vector<CudaDevice>& cuda_devices();

// Emulated device profile. It has few SMs, so that a CTA has more than one work tile; room for many clusters, so that
// kernels use clusters of all sizes; and a small L2, which does not hold 57 keys of 576 bf16. HOPWELL_EMULATOR_SMS sets
// both numbers of SMs; HOPWELL_EMULATOR_DEVICE takes the profile of a chip instead.
Device host_device(const DLDevice& location);

// Makes a CUDA device the current device of this thread during its lifetime, then restores the previous one. Does
// nothing for host tensors, or if that device is already current.
class DeviceGuard {
 public:
  explicit DeviceGuard(const DLDevice& location);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  bool pushed_ = false;
};

// Ordinal of this thread's current device; −1 if there is no current device.
int current_device();

// Throws unless a stream belongs to the CUDA device that holds the tensors, which must be current. The default streams
// belong to the current device.
void check_stream(std::string_view operator_name, const DLDevice& location, Stream stream);

}  // namespace hopwell::runtime
