// A ring of stages in shared memory. Producer warps fill stages while consumer warps read stages filled before. Items
// are numbered from 0 during the lifetime of the CTA. Item i uses stage i % stages.
//
//     producer   wait_empty │ write, commit; or copy, which completes on full()    of item i, after i − stages was read
//     consumer   wait_full  │ read │ release                                       of item i
#pragma once

#include <type_traits>

#include "arch/sm90/mbarrier.hpp"

namespace hopwell::tile {

/// One arrival for a warp, executed by all of its lanes. Their earlier reads and writes are ordered before it.
HOPWELL_DEVICE void arrive_warp(arch::mbarrier& barrier, arch::Site site = arch::Site::current()) {
  arch::syncwarp();
  if (arch::lane_index() == 0) arch::mbarrier_arrive(barrier, site);
}
/// The same with `count` arrivals.
HOPWELL_DEVICE void arrive_warp(arch::mbarrier& barrier, uint32_t count, arch::Site site = arch::Site::current()) {
  arch::syncwarp();
  if (arch::lane_index() == 0) arch::mbarrier_arrive(barrier, count, site);
}

/// The arrival count of barriers. It keeps the place of the call for the emulator.
struct Arrivals {
  HOPWELL_DEVICE Arrivals(uint32_t arrivals, arch::Site call = arch::Site::current()) : count(arrivals), site(call) {}
  uint32_t count;
  [[no_unique_address]] arch::Site site;
};

/// Initialises barriers, or arrays of them, with `arrivals` arrivals. Executed by one thread, before a barrier of the
/// CTA.
HOPWELL_DEVICE void init_barriers(Arrivals arrivals, arch::mbarrier& barrier) {
  arch::mbarrier_init(barrier, arrivals.count, arrivals.site);
}
template <int kCount>
HOPWELL_DEVICE void init_barriers(Arrivals arrivals, arch::mbarrier (&barriers)[kCount]) {
  for (arch::mbarrier& barrier : barriers) init_barriers(arrivals, barrier);
}
template <class... Barriers>
HOPWELL_DEVICE void init_barriers(Arrivals arrivals, Barriers&... barriers) {
  (init_barriers(arrivals, barriers), ...);
}

/// The barriers of a ring, in shared memory. A stage may be filled in several parts and emptied in several parts; each
/// part has its own barrier.
template <int kTheStages, int kFullParts = 1, int kEmptyParts = 1>
struct RingBarriers {
  static constexpr int kStages = kTheStages;
  template <int kParts>
  using OfStage = std::conditional_t<kParts == 1, arch::mbarrier, arch::mbarrier[kParts]>;
  OfStage<kFullParts> full[kStages];
  OfStage<kEmptyParts> empty[kStages];

  static HOPWELL_DEVICE arch::mbarrier& part_of(arch::mbarrier& stage, int) { return stage; }
  template <int kParts>
  static HOPWELL_DEVICE arch::mbarrier& part_of(arch::mbarrier (&stage)[kParts], int part) {
    return stage[part];
  }

  /// Executed by one thread, before a barrier of the CTA. A part is full after `full_arrivals` arrivals and their
  /// announced bytes. It is empty after `readers` warps have released it. The first part may need more arrivals to be
  /// full.
  HOPWELL_DEVICE void init(uint32_t full_arrivals, uint32_t readers, uint32_t more_for_first_part = 0,
                           arch::Site site = arch::Site::current()) {
    constexpr int kParts = kFullParts > kEmptyParts ? kFullParts : kEmptyParts;
    for (int i = 0; i < kStages * kParts; ++i) {
      const int stage = i / kParts, part = i % kParts;
      if (part < kFullParts)
        arch::mbarrier_init(part_of(full[stage], part), full_arrivals + (part == 0 ? more_for_first_part : 0), site);
      if (part < kEmptyParts) arch::mbarrier_init(part_of(empty[stage], part), readers, site);
    }
  }
};

/// A stage of a ring in one round. Position: a RingItem or a RingRound. The `Site` arguments let the emulator's
/// mutation tests leave out each call separately.
template <class Barriers, class Position>
struct RingUse {
  Barriers& barriers;
  Position position;

  HOPWELL_DEVICE int stage() const { return position.stage(); }
  HOPWELL_DEVICE uint32_t parity() const { return position.parity(); }
  HOPWELL_DEVICE arch::mbarrier& full(int part = 0) const { return Barriers::part_of(barriers.full[stage()], part); }
  HOPWELL_DEVICE arch::mbarrier& empty(int part = 0) const { return Barriers::part_of(barriers.empty[stage()], part); }

  HOPWELL_DEVICE void wait_full(int part = 0, arch::Site site = arch::Site::current()) const {
    arch::mbarrier_wait(full(part), parity(), site);
  }
  /// The first items find their stages empty.
  HOPWELL_DEVICE void wait_empty(int part = 0, arch::Site site = arch::Site::current()) const {
    arch::mbarrier_wait(empty(part), parity() ^ 1, site);
  }
  /// Executed by all lanes of a warp that has written the part with ordinary stores.
  HOPWELL_DEVICE void commit(int part = 0, arch::Site site = arch::Site::current()) const {
    arrive_warp(full(part), site);
  }
  /// Executed by all lanes of a warp that has read the part.
  HOPWELL_DEVICE void release(int part = 0, arch::Site site = arch::Site::current()) const {
    arrive_warp(empty(part), site);
  }
};

/// Stage and parity of an item.
template <int kStages>
struct RingItem {
  int item;
  HOPWELL_DEVICE int stage() const { return item % kStages; }
  HOPWELL_DEVICE uint32_t parity() const { return uint32_t(item / kStages & 1); }
};
template <int kStages, int kFullParts = 1, int kEmptyParts = 1>
struct RingSlot : RingUse<RingBarriers<kStages, kFullParts, kEmptyParts>, RingItem<kStages>> {
  HOPWELL_DEVICE RingSlot(RingBarriers<kStages, kFullParts, kEmptyParts>& barriers, int item)
      : RingUse<RingBarriers<kStages, kFullParts, kEmptyParts>, RingItem<kStages>>{barriers, {item}} {}
};

/// The same for a caller that counts rounds instead of items: parity is 0 in round 0, then 1, 0, … Without waits the
/// round does not matter.
struct RingRound {
  int stage_of_round;
  uint32_t parity_of_round;
  HOPWELL_DEVICE int stage() const { return stage_of_round; }
  HOPWELL_DEVICE uint32_t parity() const { return parity_of_round; }
};
template <class Barriers>
HOPWELL_DEVICE RingUse<Barriers, RingRound> ring_stage(Barriers& barriers, int stage, uint32_t parity = 0) {
  return {barriers, {stage, parity}};
}

/// A cursor that advances through a ring. It carries stage and parity along, for kernels that avoid a division.
template <int kStages>
struct RingCursor : RingUse<RingBarriers<kStages>, RingRound> {
  HOPWELL_DEVICE explicit RingCursor(RingBarriers<kStages>& barriers, int stage = 0)
      : RingUse<RingBarriers<kStages>, RingRound>{barriers, {stage, 0}} {}

  HOPWELL_DEVICE void advance(int count) {
    RingRound& at = this->position;
    at.stage_of_round += count;
    if (at.stage_of_round >= kStages) at.stage_of_round -= kStages, at.parity_of_round ^= 1;
  }
};

}  // namespace hopwell::tile
