// State of wgmma operations in flight.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "../descriptor.hpp"
#include "geometry.hpp"

namespace hopwell::arch::emu {

struct WgmmaOperation {
  uint64_t group;
  int n;
  WgmmaType type;
  bool a_in_registers, accumulate, negate_a, negate_b;
  Major a_major, b_major;
  MatrixDescriptor a, b;
  std::array<float*, 128> d;  // accumulators of every thread; poison until the wait
  std::array<std::array<uint32_t, 4>, 128> a_registers;
  std::vector<float> sums;  // [64][n]: values of the accumulators before the operation
};

}  // namespace hopwell::arch::emu
