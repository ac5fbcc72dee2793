// Reductions of integers in global memory, whose results do not depend on the order.
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

}  // namespace hopwell::arch
