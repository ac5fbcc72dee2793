// What there is of CUDA on this machine, in a line for people.
#pragma once

#include <string>

namespace hopwell::runtime {

// "driver of CUDA 13.0, 1 device", or why no driver can be used: none there, one that does not start or is older than the
// CUDA that this library was built with.
std::string cuda_status();

}  // namespace hopwell::runtime
