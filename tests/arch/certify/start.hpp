// Launches a certification kernel on the emulator or on a GPU.
#pragma once

#include <stdexcept>
#include <string>

#include "arch/launch.hpp"

namespace hopwell::arch::certify {

template <class... Parameters, class... Arguments>
void start(void (*kernel)(Parameters...), const LaunchShape& shape, Arguments... arguments) {
#if HOPWELL_ON_DEVICE
  const cudaError_t error = launch(kernel, shape, nullptr, arguments...);
  if (error != cudaSuccess) throw std::runtime_error(std::string("launch failed: ") + cudaGetErrorString(error));
#else
  launch(kernel, shape, arguments...);
#endif
}

}  // namespace hopwell::arch::certify
