// Throttling. With keys in ascending order, all CTAs at the same step read, or add to, the same range of rows, which
// are then still in L2. So no CTA begins a step before the average CTA of its wave is within `max_lead` steps.
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
inline constexpr uint32_t kNoThrottle = uint32_t{1} << 31;

struct Throttle {
  uint32_t* progress;  // sum of the steps of all items; null: no throttling
  int wave, max_lead;  // items processed at the same time; steps that an item may lead the average
  int items;           // number of throttled items; these come first
  int steps;           // steps of the longest item

  /// Whether an item is throttled.
  HOPWELL_DEVICE bool has(int item) const { return progress && item < items; }

  /// Called before a step of a throttled item, by a warpgroup or its first warp. `seen`: the progress read last;
  /// initially 0.
  HOPWELL_DEVICE void before_step(int item, uint32_t& seen, int step) const {
    constexpr int kMostPolls = 16384;
    const int before = item / wave * wave, rest = items - before;
    const int peers = rest < wave ? rest : wave;
    const uint32_t target =
        uint32_t(before) * uint32_t(steps) + uint32_t(peers * (step > max_lead ? step - max_lead : 0));
    for (int poll = 0; seen < target && poll < kMostPolls; ++poll) seen = arch::load_relaxed(progress);
    if (seen < target) arch::red_max(progress, kNoThrottle);
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
