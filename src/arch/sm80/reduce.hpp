// Integer reductions in global and shared memory. Their results do not depend on the order.
// "PTX:" anchors are sections of https://docs.nvidia.com/cuda/parallel-thread-execution/
#pragma once

#include "threads.hpp"

namespace hopwell::arch {

/// red.global.add.u64: *pointer += value; two's complement, so the sign does not matter. PTX:
/// #parallel-synchronization-and-communication-instructions-red
HOPWELL_DEVICE void red_add(int64_t* pointer, int64_t value) {
#if HOPWELL_ON_DEVICE
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(pointer), "l"(value) : "memory");
#else
  *pointer = int64_t(uint64_t(*pointer) + uint64_t(value));
#endif
}

/// red.global.max.u32: *pointer = max(*pointer, value). PTX:
/// #parallel-synchronization-and-communication-instructions-red
HOPWELL_DEVICE void red_max(uint32_t* pointer, uint32_t value) {
#if HOPWELL_ON_DEVICE
  asm volatile("red.relaxed.gpu.global.max.u32 [%0], %1;" ::"l"(pointer), "r"(value) : "memory");
#else
  if (*pointer < value) *pointer = value;
#endif
}

/// red.shared.add.u32: if `wanted`, adds `value` to the word at a shared address, atomically. Threads need no barrier
/// between their additions, but one between additions and other accesses. The instruction is predicated, not skipped by
/// a branch. PTX: #parallel-synchronization-and-communication-instructions-red
HOPWELL_DEVICE void red_add_shared(bool wanted, uint32_t address, uint32_t value,
                                   [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile(
      "{ .reg .pred wanted; setp.ne.u32 wanted, %0, 0; @wanted red.relaxed.cta.shared::cta.add.u32 [%1], %2; }" ::"r"(
          uint32_t(wanted)),
      "r"(address), "r"(value)
      : "memory");
#else
  if (wanted) emu::red_add_shared(address, value, site);
#endif
}

/// st.relaxed.cta.shared.u8: if `wanted`, writes 1 to the byte at a shared address. Several threads may mark the same
/// byte without a barrier, but need one between marks and other accesses. PTX:
/// #data-movement-and-conversion-instructions-st
HOPWELL_DEVICE void mark_shared(bool wanted, uint32_t address, [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile("{ .reg .pred wanted; setp.ne.u32 wanted, %0, 0; @wanted st.relaxed.cta.shared::cta.u8 [%1], 1; }" ::"r"(
                   uint32_t(wanted)),
               "r"(address)
               : "memory");
#else
  if (wanted) emu::atomic_or_shared(address / 4 * 4, 1u << 8 * (address % 4), site);
#endif
}

/// atom.shared.or.b32: sets `bits` in the word at a shared address, atomically, and returns the previous value.
/// Barriers: see red_add_shared. PTX: #parallel-synchronization-and-communication-instructions-atom
HOPWELL_DEVICE uint32_t atomic_or_shared(uint32_t address, uint32_t bits,
                                         [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  uint32_t before;
  asm volatile("atom.relaxed.cta.shared::cta.or.b32 %0, [%1], %2;" : "=r"(before) : "r"(address), "r"(bits) : "memory");
  return before;
#else
  return emu::atomic_or_shared(address, bits, site);
#endif
}

}  // namespace hopwell::arch
