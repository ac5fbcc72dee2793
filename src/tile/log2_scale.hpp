// The factor of scores in units of log 2, in which GPUs compute exponentials.
#pragma once

#include <algorithm>
#include <limits>

namespace hopwell::tile {

/// scale · log2(e), within the finite numbers: an infinite factor would make NaN of a score of 0.
inline float log2_scale(float scale) {
  constexpr float kLog2E = 1.44269504088896F, kLargest = std::numeric_limits<float>::max();
  return std::clamp(scale * kLog2E, -kLargest, kLargest);
}

}  // namespace hopwell::tile
