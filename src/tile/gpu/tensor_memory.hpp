// A CTA's columns of tensor memory: asked for, found and given back; and what is in them, waited for and loaded.
#pragma once

#include "arch/sm100/tcgen05.hpp"
#include "arch/sm90/mbarrier.hpp"

namespace hopwell::tile {

/// Lies in shared memory, where the hardware writes the columns' address; used as that address. kCtas 2: in each CTA of a
/// pair, whose CTAs do all of this together.
template <uint32_t kColumns, int kCtas = 1>
struct TensorMemory {
  uint32_t address;

  HOPWELL_DEVICE operator uint32_t() const { return address; }

#if HOPWELL_HAS_SM100A
  /// By one warp. Others have the address after a barrier. Nothing more is asked for, so that the next CTA may ask.
  HOPWELL_DEVICE void allocate() {
    arch::tmem_allocate<kCtas>(address, kColumns);
    arch::tmem_relinquish<kCtas>();
  }
  /// By the same warp, after a barrier behind the last use.
  HOPWELL_DEVICE void free() const {
    arch::tcgen05_fence_after_thread_sync();  // kept: PTX's examples do without
    arch::tmem_deallocate<kCtas>(address, kColumns);
  }
#endif
};

#if HOPWELL_HAS_SM100A

/// Until a phase of a barrier ends: then this thread, and the products it starts, see what was done to tensor memory before.
HOPWELL_DEVICE void wait_tensor_memory(arch::mbarrier& barrier, uint32_t parity,
                                       arch::Site site = arch::Site::current()) {
  arch::mbarrier_wait(barrier, parity, site);
  arch::tcgen05_fence_after_thread_sync(site);
}

/// A warp's part of some columns, in registers when this returns.
template <arch::TmemShape kShape = arch::TmemShape::b32x32, int kCount>
HOPWELL_DEVICE void load_tensor_memory(uint32_t (&x)[kCount], uint32_t address,
                                       arch::Site site = arch::Site::current()) {
  arch::tmem_load<kShape>(x, address, site);
  arch::tmem_wait_load(x, site);
}

#endif

}  // namespace hopwell::tile
