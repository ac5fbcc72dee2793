// A ring of stages in shared memory, which some warps fill while others read what was filled before. Items are numbered
// from 0 on, for as long as the CTA lives; item i lies in stage i % stages.
//
//     producer   wait_empty │ copy, whose end arrives at full()        of item i, when item i − stages has been read
//     consumer   wait_full  │ read │ release                           of item i
#pragma once

#include "arch/sm90/mbarrier.hpp"

namespace hopwell::tile {

/// The barriers of a ring, in shared memory.
template <int kTheStages>
struct RingBarriers {
  static constexpr int kStages = kTheStages;
  arch::mbarrier full[kStages], empty[kStages];

  /// By one thread, before a barrier. A stage is full after `full_arrivals`, and the bytes that they have announced; it is
  /// empty when `readers` warps have released it.
  HOPWELL_DEVICE void init(uint32_t full_arrivals, uint32_t readers) {
    for (int i = 0; i < kStages; ++i) {
      arch::mbarrier_init(full[i], full_arrivals);
      arch::mbarrier_init(empty[i], readers);
    }
  }
};

/// An item's place in a ring. `Site`s let each of its calls count by itself when the emulator leaves one out.
template <int kStages>
struct RingSlot {
  RingBarriers<kStages>& barriers;
  int item;

  HOPWELL_DEVICE int stage() const { return item % kStages; }
  HOPWELL_DEVICE uint32_t parity() const { return uint32_t(item / kStages & 1); }
  HOPWELL_DEVICE arch::mbarrier& full() const { return barriers.full[stage()]; }
  HOPWELL_DEVICE arch::mbarrier& empty() const { return barriers.empty[stage()]; }

  HOPWELL_DEVICE void wait_full(arch::Site site = arch::Site::current()) const {
    arch::mbarrier_wait(full(), parity(), site);
  }
  /// The first items find their stages empty.
  HOPWELL_DEVICE void wait_empty(arch::Site site = arch::Site::current()) const {
    arch::mbarrier_wait(empty(), parity() ^ 1, site);
  }
  /// By all lanes of a warp that has read the item.
  HOPWELL_DEVICE void release(arch::Site site = arch::Site::current()) const {
    arch::syncwarp();
    if (arch::lane_index() == 0) arch::mbarrier_arrive(empty(), site);
  }
};

}  // namespace hopwell::tile
