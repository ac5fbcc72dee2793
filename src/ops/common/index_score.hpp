// Shared by the GPU kernels of the lightning indexer and its backward: score[s,t] = Σ_j w[s,j] · relu(q[s,j,:] ·
// k[t,:]).
#pragma once

#include "ops/common/index_operands.hpp"
#include "tile/gpu/numbers.hpp"

namespace hopwell::tile {

inline constexpr int kHeadTile = 64;  // rows of q in shared memory

/// relu; NaN stays NaN.
HOPWELL_DEVICE float relu(float x) { return x < 0 ? 0 : x; }

/// Converts a sum over the heads to a score: NaN becomes −inf, −0 becomes 0.
HOPWELL_DEVICE float index_score(float sum) { return sum == sum ? sum + 0.F : -INFINITY; }

}  // namespace hopwell::tile
