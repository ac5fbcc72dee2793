// cp.async: copies from global to shared memory that a thread starts and later waits for.
// "PTX:" anchors are sections of https://docs.nvidia.com/cuda/parallel-thread-execution/
#pragma once

#include "memory.hpp"
#include "threads.hpp"

namespace hopwell::arch {

/// cp.async.cg / .ca .shared.global: copies `source_bytes` (0 to kBytes) and fills the rest with zeros; with 0 bytes
/// the source is never read. 16 bytes bypass L1 (.cg); 4 and 8 go through it (.ca). Both addresses kBytes-aligned. PTX:
/// #data-movement-and-conversion-instructions-cp-async
template <int kBytes = 16>
HOPWELL_DEVICE void cp_async(uint32_t destination, const void* source, int source_bytes = kBytes,
                             [[maybe_unused]] Site site = Site::current()) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
#if HOPWELL_ON_DEVICE
  if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(source_bytes)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(destination), "l"(source), "n"(kBytes),
                 "r"(source_bytes)
                 : "memory");
#else
  emu::cp_async(destination, source, kBytes, uint32_t(source_bytes), site);
#endif
}

/// The same, 16 bytes, with an L2 policy from createpolicy. PTX: #data-movement-and-conversion-instructions-cp-async
HOPWELL_DEVICE void cp_async_cached(uint32_t destination, const void* source, int source_bytes,
                                    [[maybe_unused]] CachePolicy policy, [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(destination), "l"(source),
               "r"(source_bytes), "l"(policy.bits)
               : "memory");
#else
  emu::cp_async(destination, source, 16, uint32_t(source_bytes), site);
#endif
}

/// The same, 16 bytes, and L2 fetches the whole line of 128 bytes around them, which will be asked for soon. PTX:
/// #data-movement-and-conversion-instructions-cp-async
HOPWELL_DEVICE void cp_async_of_line(uint32_t destination, const void* source, int source_bytes,
                                     [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(destination), "l"(source),
               "r"(source_bytes)
               : "memory");
#else
  emu::cp_async(destination, source, 16, uint32_t(source_bytes), site);
#endif
}

/// cp.async.commit_group: closes a group of the copies started since the last one. PTX:
/// #data-movement-and-conversion-instructions-cp-async-commit-group
HOPWELL_DEVICE void cp_async_commit([[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile("cp.async.commit_group;" ::: "memory");
#else
  emu::cp_async_commit(site);
#endif
}

/// cp.async.wait_group: waits until at most the latest kPending groups of this thread are incomplete. Other threads see
/// the data after a barrier that follows. PTX: #data-movement-and-conversion-instructions-cp-async-wait-group
template <int kPending>
HOPWELL_DEVICE void cp_async_wait([[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#else
  emu::cp_async_wait(kPending, site);
#endif
}

/// cp.async.wait_all: waits for all copies of this thread. PTX:
/// #data-movement-and-conversion-instructions-cp-async-wait-all
HOPWELL_DEVICE void cp_async_wait_all([[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile("cp.async.wait_all;" ::: "memory");
#else
  emu::cp_async_wait(-1, site);
#endif
}

}  // namespace hopwell::arch
