// What runs where: the devices of this machine, found without linking to a driver.
#pragma once

#include <hopwell/hopwell.hpp>

#include <vector>

namespace hopwell::runtime {

// The CUDA devices, asked for once from the driver library (looked up at run time, so that a machine without one needs
// nothing).
const std::vector<DeviceInfo>& cuda_devices();

}  // namespace hopwell::runtime
