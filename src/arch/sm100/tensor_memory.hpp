// Tensor memory: 128 lanes × 512 columns of 32 bits in every SM. Addresses: lane in bits 16-31, column in bits 0-15.
//
// A kernel uses either kCtaGroup 1 or 2 in all tcgen05 instructions. Warp w of a warpgroup can access lanes 32 w to 32
// w + 31, and its addresses must name these lanes. "PTX:" anchors are sections of
// https://docs.nvidia.com/cuda/parallel-thread-execution/
#pragma once

#include "../sm90/cluster.hpp"
#if !HOPWELL_ON_DEVICE
#include "../emu/sm100.hpp"
#endif

namespace hopwell::arch {

#if HOPWELL_ON_DEVICE
/// Mapping of a warp's registers to lanes and columns; emu/geometry.hpp has the formulas.
enum class TmemShape : uint8_t { b32x32, b16x64, b16x128, b16x256, b16x32x2 };
}  // namespace hopwell::arch
#include "tmem_registers.inl"
namespace hopwell::arch {
#else
using emu::TmemShape;
#endif

#if HOPWELL_HAS_SM100A

/// Address of a lane and column relative to an allocated one.
HOPWELL_DEVICE uint32_t tmem_address(uint32_t base, int lane, int column) {
  return base + (uint32_t(lane) << 16) + uint32_t(column);
}

/// tcgen05.alloc: allocates `columns` columns (a power of two from 32 to 512) and writes their address to shared
/// memory. Executed by a whole warp; waits until the columns are free. With kCtaGroup 2 one warp of each CTA of the
/// pair executes it, and both CTAs get the same columns. PTX:
/// #tcgen05-instructions-tcgen05-alloc-dealloc-relinquish-alloc-permit
template <int kCtaGroup>
HOPWELL_DEVICE void tmem_allocate(uint32_t& address, uint32_t columns, [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  if constexpr (kCtaGroup == 1)
    asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(shared_address(&address)),
                 "r"(columns)
                 : "memory");
  else
    asm volatile("tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(shared_address(&address)),
                 "r"(columns)
                 : "memory");
#else
  emu::tmem_allocate(kCtaGroup, emu::shared_address(&address), columns, site);
#endif
}

/// tcgen05.dealloc: frees an allocation. All allocations must be freed before the kernel ends. Executed by a whole warp
/// (of each CTA of a pair). PTX: #tcgen05-instructions-tcgen05-alloc-dealloc-relinquish-alloc-permit
template <int kCtaGroup>
HOPWELL_DEVICE void tmem_deallocate(uint32_t address, uint32_t columns, [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  if constexpr (kCtaGroup == 1)
    asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(address), "r"(columns) : "memory");
  else
    asm volatile("tcgen05.dealloc.cta_group::2.sync.aligned.b32 %0, %1;" ::"r"(address), "r"(columns) : "memory");
#else
  emu::tmem_deallocate(kCtaGroup, address, columns, site);
#endif
}

/// tcgen05.relinquish_alloc_permit: this CTA will not allocate again. PTX:
/// #tcgen05-instructions-tcgen05-alloc-dealloc-relinquish-alloc-permit
template <int kCtaGroup>
HOPWELL_DEVICE void tmem_relinquish([[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  if constexpr (kCtaGroup == 1)
    asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" ::: "memory");
  else
    asm volatile("tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;" ::: "memory");
#else
  emu::tmem_relinquish(kCtaGroup, site);
#endif
}

/// tcgen05.ld: loads a warp's registers from tensor memory; valid after tmem_wait_load. kSplit: immHalfSplitoff of
/// 16x32bx2, the column distance between the halves that lanes 0-15 and lanes 16-31 load. PTX:
/// #tcgen05-instructions-tcgen05-ld
template <TmemShape kShape, int kSplit = 0, int kRegisters>
HOPWELL_DEVICE void tmem_load(uint32_t (&r)[kRegisters], uint32_t address,
                              [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  using Name = detail::TmemName<kShape, kRegisters>;
  if constexpr (kShape == TmemShape::b16x32x2)
    detail::TmemRegisters<kRegisters>::template load_split<Name, kSplit>(r, address);
  else
    detail::TmemRegisters<kRegisters>::template load<Name>(r, address);
#else
  emu::tmem_load(kShape, r, kRegisters, address, kSplit, site);
#endif
}

/// tcgen05.st: stores a warp's registers to tensor memory. PTX: #tcgen05-instructions-tcgen05-st
template <TmemShape kShape, int kSplit = 0, int kRegisters>
HOPWELL_DEVICE void tmem_store(uint32_t address, const uint32_t (&r)[kRegisters],
                               [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  using Name = detail::TmemName<kShape, kRegisters>;
  if constexpr (kShape == TmemShape::b16x32x2)
    detail::TmemRegisters<kRegisters>::template store_split<Name, kSplit>(address, r);
  else
    detail::TmemRegisters<kRegisters>::template store<Name>(address, r);
#else
  emu::tmem_store(kShape, r, kRegisters, address, kSplit, site);
#endif
}

/// Keeps the compiler from using loaded registers before the wait.
template <int kSize>
HOPWELL_DEVICE void pin_registers([[maybe_unused]] uint32_t (&r)[kSize]) {
#if HOPWELL_ON_DEVICE
  HOPWELL_UNROLL
  for (int i = 0; i < kSize; ++i) asm volatile("" : "+r"(r[i])::"memory");
#endif
}

/// tcgen05.wait::ld: waits until this warp's loads are complete. `r`: the registers that become valid. PTX:
/// #tcgen05-instructions-tcgen05-wait
HOPWELL_DEVICE void tmem_wait_load([[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
#else
  emu::tmem_wait_load(site);
#endif
}
template <int kSize>
HOPWELL_DEVICE void tmem_wait_load(uint32_t (&r)[kSize], Site site = Site::current()) {
  tmem_wait_load(site);
  pin_registers(r);
}

/// tcgen05.wait::st: waits until this warp's stores are complete. PTX: #tcgen05-instructions-tcgen05-wait
HOPWELL_DEVICE void tmem_wait_store([[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory");
#else
  emu::tmem_wait_store(site);
#endif
}

/// tcgen05.fence::before_thread_sync / after_thread_sync: order tcgen05 operations before a barrier, and after one,
/// with tcgen05 operations of other threads. PTX: #tcgen05-special-sync-operations-fence
HOPWELL_DEVICE void tcgen05_fence_before_thread_sync([[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
#else
  emu::tcgen05_fence_before(site);
#endif
}
HOPWELL_DEVICE void tcgen05_fence_after_thread_sync([[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
#else
  emu::tcgen05_fence_after(site);
#endif
}

#endif

}  // namespace hopwell::arch
