// One line of text about CUDA on this machine.
#pragma once

#include <string>

namespace hopwell::runtime {

// "driver of CUDA 13.0, 1 device", or the reason why no driver can be used: no driver, a driver that does not start, or
// one that is older than the CUDA version with which this library was built.
std::string cuda_status();

}  // namespace hopwell::runtime
