// Starting a kernel from a backend file: on the CUDA device, or by the emulator when a host compiler compiled the file.
// A library holds both, so each file has functions of its own: of two with one name the linker would drop one.
#pragma once

#include <hopwell/error.hpp>
#include <hopwell/hopwell.hpp>

#include <string>
#include <string_view>

#include "arch/launch.hpp"

namespace hopwell::runtime {
namespace {

// Multiprocessors of a CUDA device: how many persistent CTAs run at a time. The emulator, which runs one after another,
// is given two, so that a CTA has more than one piece of work.
inline int multiprocessors([[maybe_unused]] int device) {
#if HOPWELL_ON_DEVICE
  int count = 0;
  const cudaError_t error = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) throw Error(HOPWELL_DEVICE_ERROR, cudaGetErrorString(error));
  return count;
#else
  return 2;
#endif
}

// Dynamic shared memory that a CTA may have on a device, bytes.
inline std::size_t max_shared_bytes([[maybe_unused]] int device) {
#if HOPWELL_ON_DEVICE
  int bytes = 0;
  const cudaError_t error = cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error != cudaSuccess) throw Error(HOPWELL_DEVICE_ERROR, cudaGetErrorString(error));
  return static_cast<std::size_t>(bytes);
#else
  return std::size_t{227} * 1024;
#endif
}

// Whether a kernel may start before the one ahead of it ends: LaunchShape::programmatic_dependency.
inline bool has_dependent_launches([[maybe_unused]] int device) {
#if HOPWELL_ON_DEVICE
  int major = 0;
  const cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error != cudaSuccess) throw Error(HOPWELL_DEVICE_ERROR, cudaGetErrorString(error));
  return major >= 9;
#else
  return false;
#endif
}

// Whether CTAs can form clusters.
inline bool has_clusters([[maybe_unused]] int device) {
#if HOPWELL_ON_DEVICE
  return has_dependent_launches(device);  // both came with the same generation
#else
  return true;
#endif
}

// How many clusters of `shape.cluster` CTAs of a kernel run at a time. The emulator, which runs one after another, names
// numbers that make kernels choose clusters of all sizes.
template <class... Parameters>
int clusters_at_a_time([[maybe_unused]] void (*kernel)(Parameters...), const arch::LaunchShape& shape) {
#if HOPWELL_ON_DEVICE
  const int clusters = arch::clusters_at_a_time(kernel, shape);
  if (clusters < 0) throw Error(HOPWELL_DEVICE_ERROR, "the device does not say how many clusters it holds");
  return clusters;
#else
  return static_cast<int>(264 / (shape.cluster * shape.cluster));
#endif
}

// Enqueues kernel(arguments...) on the stream; on the emulator, runs it to its end. Throws HOPWELL_DEVICE_ERROR if the
// launch fails, and HOPWELL_INTERNAL with the report if the emulator finds something.
template <class... Parameters, class... Arguments>
void launch(std::string_view operator_name, void (*kernel)(Parameters...), const arch::LaunchShape& shape,
            [[maybe_unused]] Stream stream, const Arguments&... arguments) {
#if HOPWELL_ON_DEVICE
  const cudaError_t error = arch::launch(kernel, shape, static_cast<cudaStream_t>(stream), arguments...);
  if (error != cudaSuccess)
    throw Error(HOPWELL_DEVICE_ERROR, std::string(operator_name).append(": ").append(cudaGetErrorString(error)));
#else
  try {
    arch::launch(kernel, shape, arguments...);
  } catch (const arch::emu::CheckFailed& failed) {
    throw Error(HOPWELL_INTERNAL, std::string(operator_name).append(", emulated: ").append(failed.what()));
  }
#endif
}

}  // namespace
}  // namespace hopwell::runtime
