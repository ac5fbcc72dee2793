// Throttling (here `pace`). With keys in ascending order, all CTAs at the same step read, or add to, the same range of
// rows, which are then still in L2. So no CTA begins a step before the average CTA of its wave is within max_lead (here
// `slack`) steps.
//
// Throttling is a hint; results do not depend on it. CTAs may start in any order, and a wave may not be fully resident,
// because a kernel of another stream may occupy some SMs. So the wave size comes from the occupancy API, and every wait
// has a limit. After a wait that reaches the limit, no CTA waits again in this call.
#pragma once

#include "arch/sm80/memory.hpp"
#include "arch/sm80/reduce.hpp"
#include "arch/sm80/threads.hpp"

namespace hopwell::tile {

/// Larger than the number of steps of any call; the plan checks this.
inline constexpr uint32_t kNoPace = uint32_t{1} << 31;

struct Pace {
  uint32_t* progress;  // sum of the steps of all items; null: no throttling
  int wave, slack;     // items processed at the same time; max_lead in steps
  int items;           // number of throttled items; these come first
  int steps;           // steps of the longest item

  /// Whether an item is throttled.
  HOPWELL_DEVICE bool has(int item) const { return progress && item < items; }

  /// Called before a step of a throttled item, by a warpgroup or its first warp. `seen`: the progress read last;
  /// initially 0.
  HOPWELL_DEVICE void keep(int item, uint32_t& seen, int step) const {
    constexpr int kMostPolls = 16384;
    const int before = item / wave * wave, rest = items - before;
    const int peers = rest < wave ? rest : wave;
    const uint32_t target = uint32_t(before) * uint32_t(steps) + uint32_t(peers * (step > slack ? step - slack : 0));
    for (int poll = 0; seen < target && poll < kMostPolls; ++poll) seen = arch::load_relaxed(progress);
    if (seen < target) arch::red_max(progress, kNoPace);
    if (arch::thread_index() % 128 == 0) arch::red_add(progress, 1u);
    seen = arch::load_relaxed(progress);  // for the next step
  }

  /// Called by one thread after the last step of a throttled item: an item with fewer steps than the longest counts as
  /// having done all.
  HOPWELL_DEVICE void count_missing(int made) const {
    if (made < steps) arch::red_add(progress, uint32_t(steps - made));
  }
};

}  // namespace hopwell::tile
