// CTAs at one pace. With keys in ascending order all CTAs that are at the same step read, or add to, the same range of
// rows, which are then still in L2. So no CTA begins a step before the average CTA of its wave is within a few steps.
//
// It is a hint and nothing that results depend on. Nothing promises that CTAs start in the order of their numbers, nor
// that the whole wave runs: another stream's kernel may have some of the SMs. So the wave is what the occupancy API
// says that can run, a wait has an end, and one that came to its end was the last of the call: no CTA waits any more.
#pragma once

#include "arch/sm80/memory.hpp"
#include "arch/sm80/reduce.hpp"
#include "arch/sm80/threads.hpp"

namespace hopwell::tile {

/// More than all steps of a call: its plan sees to that.
inline constexpr uint32_t kNoPace = uint32_t{1} << 31;

struct Pace {
  uint32_t* progress;  // steps that all items have made; or null: there is no common pace
  int wave, slack;     // items that are worked on at a time, and by how many steps one may be ahead
  int items;           // the first ones, which keep pace
  int steps;           // of the longest item

  /// Whether an item keeps pace.
  HOPWELL_DEVICE bool has(int item) const { return progress && item < items; }

  /// Before a step of an item that keeps pace, by a warpgroup or its first warp. `seen`: of the progress, what was read
  /// last; 0 at first.
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

  /// After the last step of an item that keeps pace, by one thread: one with fewer steps than others counts as having made
  /// them all.
  HOPWELL_DEVICE void count_missing(int made) const {
    if (made < steps) arch::red_add(progress, uint32_t(steps - made));
  }
};

}  // namespace hopwell::tile
