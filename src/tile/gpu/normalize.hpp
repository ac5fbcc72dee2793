// Divides a row by its sum, executed by a warp. An all-zero row stays zero.
#pragma once

#include <cmath>

#include "tile/gpu/warp.hpp"

namespace hopwell::tile {

/// `total`: this lane's part of the sum. Each lane processes every 32nd number, several per iteration. `to` may be
/// `from`.
HOPWELL_DEVICE void normalize(const float* from, float* to, int size, float total) {
  constexpr int kUnroll = 16;
  total = sum_of_warp(total);
  total = total == 0 ? 1 : total;
  HOPWELL_NO_UNROLL
  for (int first = arch::lane_index(); first < size; first += 32 * kUnroll) {
    float values[kUnroll];
    HOPWELL_UNROLL
    for (int i = 0; i < kUnroll; ++i) values[i] = first + 32 * i < size ? from[first + 32 * i] : 0;
    HOPWELL_UNROLL
    for (int i = 0; i < kUnroll; ++i)
      if (first + 32 * i < size) to[first + 32 * i] = values[i] / total;
  }
}

}  // namespace hopwell::tile
