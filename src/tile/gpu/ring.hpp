// A ring of stages in shared memory, which some warps fill while others read what was filled before. Items are numbered
// from 0 on, for as long as the CTA lives; item i lies in stage i % stages.
//
//     producer   wait_empty │ write, commit; or copy, whose end arrives at full()    of item i, when i − stages is read
//     consumer   wait_full  │ read │ release                                         of item i
#pragma once

#include <type_traits>

#include "arch/sm90/mbarrier.hpp"

namespace hopwell::tile {

/// One arrival for a warp, by all of its lanes: what they read or wrote before comes before it.
HOPWELL_DEVICE void arrive_warp(arch::mbarrier& barrier, arch::Site site = arch::Site::current()) {
  arch::syncwarp();
  if (arch::lane_index() == 0) arch::mbarrier_arrive(barrier, site);
}
/// The same with `count` arrivals.
HOPWELL_DEVICE void arrive_warp(arch::mbarrier& barrier, uint32_t count, arch::Site site = arch::Site::current()) {
  arch::syncwarp();
  if (arch::lane_index() == 0) arch::mbarrier_arrive(barrier, count, site);
}

/// Barriers, or arrays of them, of so many arrivals. By one thread, before a barrier of the CTA.
HOPWELL_DEVICE void init_barriers(uint32_t arrivals, arch::mbarrier& barrier) {
  arch::mbarrier_init(barrier, arrivals);
}
template <int kCount>
HOPWELL_DEVICE void init_barriers(uint32_t arrivals, arch::mbarrier (&barriers)[kCount]) {
  for (arch::mbarrier& barrier : barriers) arch::mbarrier_init(barrier, arrivals);
}
template <class... Barriers>
HOPWELL_DEVICE void init_barriers(uint32_t arrivals, Barriers&... barriers) {
  (init_barriers(arrivals, barriers), ...);
}

/// The barriers of a ring, in shared memory. A stage may be filled in parts, and be emptied in others: each part has a
/// barrier of its own.
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

  /// By one thread, before a barrier. A part is full after `full_arrivals`, and the bytes that they have announced; it
  /// is empty when `readers` warps have released it. The first part may take more arrivals to be full.
  HOPWELL_DEVICE void init(uint32_t full_arrivals, uint32_t readers, uint32_t more_for_first_part = 0) {
    constexpr int kParts = kFullParts > kEmptyParts ? kFullParts : kEmptyParts;
    for (int i = 0; i < kStages * kParts; ++i) {
      const int stage = i / kParts, part = i % kParts;
      if (part < kFullParts)
        arch::mbarrier_init(part_of(full[stage], part), full_arrivals + (part == 0 ? more_for_first_part : 0));
      if (part < kEmptyParts) arch::mbarrier_init(part_of(empty[stage], part), readers);
    }
  }
};

/// A stage of a ring in one of the ring's rounds. Position: a RingItem, or a RingRound. `Site`s let each of its calls
/// count by itself when the emulator leaves one out.
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
  /// By all lanes of a warp that has written the part itself.
  HOPWELL_DEVICE void commit(int part = 0, arch::Site site = arch::Site::current()) const {
    arrive_warp(full(part), site);
  }
  /// By all lanes of a warp that has read the part.
  HOPWELL_DEVICE void release(int part = 0, arch::Site site = arch::Site::current()) const {
    arrive_warp(empty(part), site);
  }
};

/// Where an item lies.
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

/// The same for who counts rounds instead of items: a round's parity is 0 in the first, then 1, 0, … Without waits it
/// does not matter.
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

/// A place in a ring that moves on: stage and parity are carried along, for kernels that would rather not divide.
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
