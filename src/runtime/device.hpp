// What runs where: the devices of this machine, found and asked without linking to a driver.
#pragma once

#include <hopwell/hopwell.hpp>

#include <cstddef>
#include <string_view>
#include <vector>

namespace hopwell::runtime {

// A device as plans see it. Nothing in a plan is a number of one chip: it asks here.
struct Device {
  DLDevice location{kDLCPU, 0};  // of the tensors
  int capability = 0;            // 90 for Hopper; 0: the host, where the emulator runs
  int sms = 0;                   // multiprocessors: how many persistent CTAs run at a time
  int cluster_sms = 0;           // as many of them as clusters may fill: on the emulator it is another number
  std::size_t shared_bytes = 0;  // dynamic shared memory that a CTA may have
  std::size_t l2_bytes = 0;
  double memory_bytes_per_ns = 0;  // its bandwidth by clock and width; 0 where the driver does not tell

  [[nodiscard]] bool emulated() const { return location.device_type == kDLCPU; }
  // Whether a kernel may start before the one ahead of it ends: LaunchShape::programmatic_dependency.
  [[nodiscard]] bool has_dependent_launches() const { return capability >= 90; }
  // Whether CTAs can form clusters. They came with the same generation.
  [[nodiscard]] bool has_clusters() const { return emulated() || capability >= 90; }
};

// The CUDA devices, asked for once from the driver library (looked up at run time, so that a machine without one needs
// nothing), in the order of their ordinals.
struct CudaDevice {
  DeviceInfo info;
  Device device;
};
const std::vector<CudaDevice>& cuda_devices();

// What the emulator poses as. It has few multiprocessors, so that a CTA has more than one piece of work; room for many
// clusters, so that kernels choose clusters of all sizes; and little L2, so that 57 keys of 576 bf16 do not fit; HOPWELL_EMULATOR_SMS names another number for both.
Device host_device(const DLDevice& location);

// Makes a CUDA device the current one of this thread while it lives, and then the one that was before. Does nothing for
// tensors of the host, or where that device is current already.
class DeviceGuard {
 public:
  explicit DeviceGuard(const DLDevice& location);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  bool pushed_ = false;
};

// The ordinal of this thread's current device, −1 without one.
int current_device();

// Throws unless a stream belongs to the CUDA device that the tensors are on, which must be current. The default streams
// belong to whichever device is current.
void check_stream(std::string_view operator_name, const DLDevice& location, Stream stream);

}  // namespace hopwell::runtime
