// Launching a certification kernel in either world; a failure to launch ends the program.
#pragma once

#include <cstdio>
#include <cstdlib>

#include "arch/launch.hpp"

namespace hopwell::arch::certify {

template <class... Parameters, class... Arguments>
void start(void (*kernel)(Parameters...), const LaunchShape& shape, Arguments... arguments) {
#if HOPWELL_ON_DEVICE
  const cudaError_t error = launch(kernel, shape, nullptr, arguments...);
  if (error != cudaSuccess) {
    std::fprintf(stderr, "launch failed: %s\n", cudaGetErrorString(error));
    std::exit(1);
  }
#else
  launch(kernel, shape, arguments...);
#endif
}

}  // namespace hopwell::arch::certify
