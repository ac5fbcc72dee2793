// Global memory accesses that Blackwell adds: 32 bytes per lane, a whole sector.
// "PTX:" anchors are sections of https://docs.nvidia.com/cuda/parallel-thread-execution/
#pragma once

#include "../sm80/memory.hpp"

namespace hopwell::arch {

/// Eight 32-bit words, moved by one instruction; 32-byte aligned.
struct alignas(32) Words8 {
  uint32_t w[8];
};

#if HOPWELL_HAS_SM100A

/// st.global.L1::no_allocate.v8: 32 bytes that are not read again soon. PTX:
/// #data-movement-and-conversion-instructions-st
HOPWELL_DEVICE void store_streaming(void* pointer, const Words8& v, [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile("st.global.L1::no_allocate.v8.b32 [%0], {%1, %2, %3, %4, %5, %6, %7, %8};" ::"l"(pointer), "r"(v.w[0]),
               "r"(v.w[1]), "r"(v.w[2]), "r"(v.w[3]), "r"(v.w[4]), "r"(v.w[5]), "r"(v.w[6]), "r"(v.w[7])
               : "memory");
#else
  emu::require_global("st.global.v8", pointer, 32, site);
  *static_cast<Words8*>(pointer) = v;
#endif
}

#endif

}  // namespace hopwell::arch
