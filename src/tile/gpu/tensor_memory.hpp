// Tensor memory of a CTA: allocates and frees columns, waits for their contents and loads them.
#pragma once

#include "arch/sm100/tcgen05.hpp"
#include "arch/sm90/mbarrier.hpp"

namespace hopwell::tile {

/// Resides in shared memory, where the hardware writes the columns' address; converts to that address. kCtas 2: one
/// object in each CTA of a pair, and both CTAs execute every call.
template <uint32_t kColumns, int kCtas = 1>
struct TensorMemory {
  uint32_t address;

  HOPWELL_DEVICE operator uint32_t() const { return address; }

#if HOPWELL_HAS_SM100A
  /// Executed by one warp. Other warps have the address after a barrier. Gives up further allocations, so that the next
  /// CTA may allocate.
  HOPWELL_DEVICE void allocate() {
    arch::tmem_allocate<kCtas>(address, kColumns);
    arch::tmem_relinquish<kCtas>();
  }
  /// Executed by the same warp, after a barrier that follows the last use.
  HOPWELL_DEVICE void free() const {
    arch::tcgen05_fence_after_thread_sync();  // kept: PTX's examples do without
    arch::tmem_deallocate<kCtas>(address, kColumns);
  }
#endif
};

#if HOPWELL_HAS_SM100A

/// Waits for the end of a barrier's phase. Then earlier accesses to tensor memory are ordered before this thread and
/// its products.
HOPWELL_DEVICE void wait_tensor_memory(arch::mbarrier& barrier, uint32_t parity,
                                       arch::Site site = arch::Site::current()) {
  arch::mbarrier_wait(barrier, parity, site);
  arch::tcgen05_fence_after_thread_sync(site);
}

/// Loads a warp's part of some columns. The registers are valid when this returns.
template <arch::TmemShape kShape = arch::TmemShape::b32x32, int kCount>
HOPWELL_DEVICE void load_tensor_memory(uint32_t (&x)[kCount], uint32_t address,
                                       arch::Site site = arch::Site::current()) {
  arch::tmem_load<kShape>(x, address, site);
  arch::tmem_wait_load(x, site);
}

#endif

}  // namespace hopwell::tile
