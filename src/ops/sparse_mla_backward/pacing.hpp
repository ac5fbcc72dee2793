// sparse_mla_backward on GPUs: CTAs at one pace. With keys in ascending order all CTAs that are at the same step add to
// the same range of rows of dkv, which is then still in L2. So no CTA begins a step before the average CTA of its wave
// is within p.pace_slack steps.
//
// It is a hint and nothing that results depend on. Nothing promises that CTAs start in the order of their numbers, nor
// that the whole wave runs: another stream's kernel may have some of the SMs. So the wave is what the occupancy API
// says that can run, a wait has an end, and one that came to its end was the last of the call: no CTA waits any more.
#pragma once

#include "arch/sm80/memory.hpp"
#include "arch/sm80/reduce.hpp"
#include "arch/sm80/threads.hpp"
#include "ops/sparse_mla_backward/params.hpp"

namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET {

// More than all steps of a call: see plan_order.
constexpr uint32_t kNoPace = uint32_t{1} << 31;

// Before a step, by a warpgroup. ctas: the first of the grid, which have whole tiles; those with slices keep no pace.
// `seen`: of p.progress, what was read last; 0 at first.
template <int kKeys>
HOPWELL_DEVICE void keep_pace(const Params& p, int ctas, uint32_t& seen, int step) {
  constexpr int kMostPolls = 16384;
  const int steps_of_row = (p.selection.topk + kKeys - 1) / kKeys;
  const int before = arch::block_index() / p.wave * p.wave, rest = ctas - before;
  const int peers = rest < p.wave ? rest : p.wave;
  const uint32_t target =
      uint32_t(before) * uint32_t(steps_of_row) + uint32_t(peers * (step > p.pace_slack ? step - p.pace_slack : 0));
  for (int poll = 0; seen < target && poll < kMostPolls; ++poll) seen = arch::load_relaxed(p.progress);
  if (seen < target) arch::red_max(p.progress, kNoPace);
  if (arch::thread_index() % 128 == 0) arch::red_add(p.progress, 1u);
  seen = arch::load_relaxed(p.progress);  // for the next step
}

// After the last of `steps`: rows with fewer steps than others count as having made them all.
template <int kKeys>
HOPWELL_DEVICE void count_missing_steps(const Params& p, bool paced, int steps, int t) {
  const int missing = (p.selection.topk + kKeys - 1) / kKeys - steps;
  if (paced && t == 0 && missing > 0) arch::red_add(p.progress, uint32_t(missing));
}

}  // namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET
