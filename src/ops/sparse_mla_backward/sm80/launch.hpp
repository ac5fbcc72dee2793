// sparse_mla_backward by mma.sync: the choice of a tile.
#pragma once

#include "ops/sparse_mla_backward/sm80/gradients.hpp"

namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET {

template <int kDqk>
using SmallTile = Tile<kDqk, 2, 1>;
template <int kDqk>
using LargeTile = Tile<kDqk, 4, 2>;

inline bool takes_large_tiles(const Problem& problem) {
  const bool has_room = problem.device.capability == 90 || problem.device.capability == 0;  // Hopper, and the emulator
  return problem.h_q > SmallTile<576>::kHeads && has_room;
}

template <class P>
void launch_with(const Problem& problem, const Plan& plan, void* workspace, Stream stream) {
  runtime::with_constant<576, 512>(problem.d_qk, [&]<int kDqk>() {
    takes_large_tiles(problem) ? launch_tile<LargeTile<kDqk>, P>(problem, plan, workspace, stream)
                               : launch_tile<SmallTile<kDqk>, P>(problem, plan, workspace, stream);
  });
}

}  // namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET
