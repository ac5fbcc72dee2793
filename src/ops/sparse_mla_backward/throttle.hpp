// sparse_mla_backward on GPUs: throttles CTAs, so that the rows of dkv_accum that they add to stay in L2. CTAs with
// splits are not throttled.
#pragma once

#include "ops/sparse_mla_backward/params.hpp"
#include "tile/gpu/throttle.hpp"

namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET {

// Entries of the longest list.
HOPWELL_DEVICE int most_entries(const Params& p) { return p.selection.topk; }
HOPWELL_DEVICE int most_entries(const WindowParams& p) { return p.most_entries; }

template <int kKeys, class P>
HOPWELL_DEVICE tile::Throttle throttle_of(const P& p, int ctas) {
  return {p.progress, p.wave, p.max_lead, ctas, (most_entries(p) + kKeys - 1) / kKeys};
}

// Called before a step, by a warpgroup. ctas: the first CTAs of the grid, which have whole tiles.
template <int kKeys, class P>
HOPWELL_DEVICE void throttle_step(const P& p, int ctas, uint32_t& seen, int step) {
  throttle_of<kKeys>(p, ctas).before_step(arch::block_index(), seen, step);
}

template <int kKeys, class P>
HOPWELL_DEVICE void count_missing_steps(const P& p, bool throttled, int steps, int t) {
  if (throttled && t == 0) throttle_of<kKeys>(p, 0).count_missing(steps);
}

}  // namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET
