// Launches a kernel: on the device through the CUDA runtime, elsewhere on the emulator.
#pragma once

#include <cstddef>

#include "platform.hpp"
#if HOPWELL_ON_DEVICE
#include <cuda_runtime.h>
#else
#include "emu/launch.hpp"
#endif

namespace hopwell::arch {

struct GridShape {
  uint32_t x = 1, y = 1, z = 1;
};

/// Grid in CTAs (a multiple of the cluster), threads per CTA, CTAs per cluster along x, dynamic shared memory per CTA
/// in bytes.
struct LaunchShape {
  GridShape grid = {};
  uint32_t threads = 1;
  uint32_t cluster = 1;
  size_t shared_bytes = 0;
  bool programmatic_dependency = false;  // may start before the previous kernel ends: see griddepcontrol_wait
  // All CTAs run at the same time, so that they may wait for each other; otherwise the launch fails. The emulator runs
  // CTAs one after another, so there a CTA may wait only for CTAs with lower indices.
  bool cooperative = false;
};

#if HOPWELL_ON_DEVICE
/// Maximum number of clusters of this shape that the current device runs at the same time.
template <class... Parameters>
cudaError_t clusters_that_fit(void (*kernel)(Parameters...), const LaunchShape& shape, int* clusters) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shape.shared_bytes));
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {shape.cluster, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(shape.cluster);
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = shape.shared_bytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaOccupancyMaxActiveClusters(clusters, kernel, &config);
}

/// Enqueues kernel(arguments...). Returns the CUDA error; cudaSuccess if it was enqueued.
template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), const LaunchShape& shape, cudaStream_t stream,
                   Arguments&&... arguments) {
  if (shape.shared_bytes > 48 * 1024) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shape.shared_bytes));
    if (error != cudaSuccess) return error;
  }
  cudaLaunchAttribute attributes[3] = {};
  unsigned count = 0;
  if (shape.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {shape.cluster, 1, 1};
  }
  if (shape.programmatic_dependency) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cooperative) {
    attributes[count].id = cudaLaunchAttributeCooperative;
    attributes[count++].val.cooperative = 1;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(shape.grid.x, shape.grid.y, shape.grid.z);
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Arguments&&>(arguments)...);
}
#else
/// Runs kernel(arguments...) to its end on the emulator, with the options of the innermost emu::Session of this host
/// thread; findings go to that session. Without one, the environment gives the options (HOPWELL_EMULATOR_SEED,
/// HOPWELL_EMULATOR_CHECKER), and any finding is thrown as emu::CheckFailed.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), const LaunchShape& shape, const Arguments&... arguments) {
  emu::launch_in_session(
      {{shape.grid.x, shape.grid.y, shape.grid.z}, {shape.threads, 1, 1}, {shape.cluster, 1, 1}, shape.shared_bytes},
      [&] { kernel(arguments...); });
}
#endif

}  // namespace hopwell::arch
