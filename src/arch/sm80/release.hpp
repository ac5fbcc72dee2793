// A store that other CTAs see only after what the thread wrote before it.
// "PTX:" anchors are sections of https://docs.nvidia.com/cuda/parallel-thread-execution/
#pragma once

#include "threads.hpp"

namespace hopwell::arch {

/// st.release.gpu: who reads the word with load_acquire sees what came before it, too. PTX:
/// #data-movement-and-conversion-instructions-st
HOPWELL_DEVICE void store_release(uint32_t* pointer, uint32_t value) {
#if HOPWELL_ON_DEVICE
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(pointer), "r"(value) : "memory");
#else
  *pointer = value;
#endif
}

}  // namespace hopwell::arch
