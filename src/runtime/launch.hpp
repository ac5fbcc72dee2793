// Launches a kernel from a backend file: on the CUDA device, or on the emulator if a host compiler compiled the file.
// The functions have internal linkage, because a library contains both versions and the linker would merge functions of
// one name.
#pragma once

#include <hopwell/error.hpp>
#include <hopwell/interrupt.hpp>
#include <hopwell/library.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <initializer_list>
#include <string>
#include <string_view>

#include "arch/launch.hpp"
#include "runtime/device.hpp"
#include "runtime/with_constant.hpp"

#define HOPWELL_TEXT(x) HOPWELL_TEXT_OF(x)
#define HOPWELL_TEXT_OF(x) #x

namespace hopwell::runtime {
namespace {

// Name of the backend in this file: HOPWELL_TARGET is "sm90", or "emu_sm90" for the emulator.
constexpr auto kTarget = [] {
  auto name = std::to_array(HOPWELL_TEXT(HOPWELL_TARGET));
  std::replace(name.begin(), name.end(), '_', ':');
  return name;
}();
[[maybe_unused]] constexpr const char* kBackend = kTarget.data();

// A one-dimensional grid of `ctas` CTAs without clusters.
[[maybe_unused]] arch::LaunchShape shape_of_ctas(std::int64_t ctas, std::int64_t threads,
                                                 std::size_t shared_bytes = 0) {
  return {.grid = {static_cast<std::uint32_t>(ctas)},
          .threads = static_cast<std::uint32_t>(threads),
          .shared_bytes = shared_bytes};
}

// Whether kernels may store all of these sizes in ints and index up to 1,024 beyond them.
[[maybe_unused]] bool fit_in_ints(std::initializer_list<std::int64_t> sizes) {
  return std::max(sizes) < (std::int64_t{1} << 31) - 1024;
}

// Number of clusters of `shape.cluster` CTAs of a kernel that run at the same time on the current device: fewer than
// its number of SMs would allow. Queried once per device and cluster size, so the kernel's other launch sizes must not
// change.
template <auto kKernel>
int clusters_that_fit(const Device& device, const arch::LaunchShape& shape) {
#if HOPWELL_ON_DEVICE
  constexpr std::size_t kSizes = 17;                                                   // up to 16 CTAs
  static std::deque<std::array<std::atomic<int>, kSizes>> fit(cuda_devices().size());  // plus 1; 0: not queried yet
  std::atomic<int>& clusters = fit.at(static_cast<std::size_t>(device.location.device_id)).at(shape.cluster);
  if (clusters == 0) {
    int answer = 0;
    const cudaError_t error = arch::clusters_that_fit(kKernel, shape, &answer);
    if (error != cudaSuccess)
      throw Error(HOPWELL_DEVICE_ERROR,
                  std::string("asking how many clusters fit: ").append(cudaGetErrorString(error)));
    clusters = answer + 1;
  }
  return clusters - 1;
#else
  return 2 * device.cluster_sms / static_cast<int>(shape.cluster * shape.cluster);
#endif
}

// Enqueues kernel(arguments...) on the stream; on the emulator, runs it to its end. Throws HOPWELL_DEVICE_ERROR if the
// launch fails, and HOPWELL_INTERNAL with the report if the emulator has findings.
template <class... Parameters, class... Arguments>
void launch(std::string_view operator_name, void (*kernel)(Parameters...), const arch::LaunchShape& shape,
            [[maybe_unused]] Stream stream, const Arguments&... arguments) {
#if HOPWELL_ON_DEVICE
  const cudaError_t error = arch::launch(kernel, shape, static_cast<cudaStream_t>(stream), arguments...);
  if (error != cudaSuccess)
    throw Error(HOPWELL_DEVICE_ERROR, std::string(operator_name).append(": ").append(cudaGetErrorString(error)));
#else
  try {
    if (const std::size_t most = host_device({}).shared_bytes; shape.shared_bytes > most)
      throw Error(HOPWELL_DEVICE_ERROR, std::string(operator_name) +
                                            ", emulated: " + std::to_string(shape.shared_bytes) +
                                            " bytes of shared memory; at most " + std::to_string(most));
    arch::emu::poll = InterruptCheck::poll;
    arch::launch(kernel, shape, arguments...);
  } catch (const arch::emu::CheckFailed& failed) {
    throw Error(HOPWELL_INTERNAL, std::string(operator_name).append(", emulated: ").append(failed.what()));
  }
#endif
}

}  // namespace
}  // namespace hopwell::runtime
