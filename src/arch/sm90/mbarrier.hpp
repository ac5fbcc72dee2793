// mbarriers: barriers in shared memory that count arrivals of threads and bytes of asynchronous copies.
// "PTX:" anchors are sections of https://docs.nvidia.com/cuda/parallel-thread-execution/
#pragma once

#include "../sm80/threads.hpp"
#if !HOPWELL_ON_DEVICE
#include "../emu/sm90.hpp"
#endif

namespace hopwell::arch {

/// Opaque; resides in shared memory and is accessed only by the functions below.
struct alignas(8) mbarrier {
  uint64_t opaque;
};

/// mbarrier.init: phase 0, expecting `count` arrivals per phase. Executed by one thread. Other threads may use it after
/// a barrier; other proxies and CTAs additionally need fence_mbarrier_init. PTX:
/// #parallel-synchronization-and-communication-instructions-mbarrier-init
HOPWELL_DEVICE void mbarrier_init(mbarrier& b, uint32_t count, [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&b)), "r"(count) : "memory");
#else
  emu::mbarrier_init(emu::shared_address(&b), count, site);
#endif
}

/// mbarrier.inval: frees its memory for other uses. PTX:
/// #parallel-synchronization-and-communication-instructions-mbarrier-inval
HOPWELL_DEVICE void mbarrier_invalidate(mbarrier& b, [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(shared_address(&b)) : "memory");
#else
  emu::mbarrier_invalidate(emu::shared_address(&b), site);
#endif
}

/// mbarrier.arrive.release.cta: one arrival. PTX:
/// #parallel-synchronization-and-communication-instructions-mbarrier-arrive
HOPWELL_DEVICE void mbarrier_arrive(mbarrier& b, [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(shared_address(&b)) : "memory");
#else
  emu::mbarrier_arrive(emu::shared_address(&b), 1, false, site);
#endif
}

/// The same with `count` arrivals.
HOPWELL_DEVICE void mbarrier_arrive(mbarrier& b, uint32_t count, [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&b)), "r"(count)
               : "memory");
#else
  emu::mbarrier_arrive(emu::shared_address(&b), count, false, site);
#endif
}

#if HOPWELL_HAS_SM90
/// mbarrier.arrive.expect_tx: one arrival, and the phase also waits for `bytes` more. PTX:
/// #parallel-synchronization-and-communication-instructions-mbarrier-arrive
HOPWELL_DEVICE void mbarrier_arrive_expect_tx(mbarrier& b, uint32_t bytes,
                                              [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&b)),
               "r"(bytes)
               : "memory");
#else
  emu::mbarrier_arrive_expect_tx(emu::shared_address(&b), bytes, false, site);
#endif
}

/// mbarrier.expect_tx: the phase waits for `bytes` more; no arrival. PTX:
/// #parallel-synchronization-and-communication-instructions-mbarrier-expect-tx
HOPWELL_DEVICE void mbarrier_expect_tx(mbarrier& b, uint32_t bytes, [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&b)), "r"(bytes)
               : "memory");
#else
  emu::mbarrier_expect_tx(emu::shared_address(&b), bytes, site);
#endif
}

/// mbarrier.arrive.release.cluster on an mbarrier of any CTA of the cluster, by its shared::cluster address (see
/// map_to_rank). PTX: #parallel-synchronization-and-communication-instructions-mbarrier-arrive
HOPWELL_DEVICE void mbarrier_arrive_cluster(uint32_t cluster_address, [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(cluster_address) : "memory");
#else
  emu::mbarrier_arrive(cluster_address, 1, true, site);
#endif
}

/// mbarrier.arrive.relaxed.cluster: the same without a release. Tells the waiting thread that it may overwrite buffers
/// that this thread has read; the waiting thread learns nothing about their contents. The arrival waits for nothing,
/// not even for this thread's own loads: it was observed to overtake them. So a fence.proxy.async, which waits for the
/// loads, must come between. A release at cluster scope would wait for all accesses of the thread in flight, including
/// additions to global memory. PTX: #parallel-synchronization-and-communication-instructions-mbarrier-arrive
HOPWELL_DEVICE void mbarrier_arrive_cluster_relaxed(uint32_t cluster_address,
                                                    [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(cluster_address) : "memory");
#else
  emu::mbarrier_arrive_relaxed(cluster_address, site);
#endif
}

/// The same with a byte count. PTX: #parallel-synchronization-and-communication-instructions-mbarrier-arrive
HOPWELL_DEVICE void mbarrier_arrive_expect_tx_cluster(uint32_t cluster_address, uint32_t bytes,
                                                      [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile("mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%0], %1;" ::"r"(cluster_address),
               "r"(bytes)
               : "memory");
#else
  emu::mbarrier_arrive_expect_tx(cluster_address, bytes, true, site);
#endif
}

/// mbarrier.try_wait.parity.acquire.cta: returns whether the phase of this parity has ended. May block for a limited
/// time, and may return false spuriously. PTX:
/// #parallel-synchronization-and-communication-instructions-mbarrier-test-wait-try-wait
HOPWELL_DEVICE bool mbarrier_try_wait(mbarrier& b, uint32_t parity, [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  uint32_t done;
  asm volatile(
      "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
      : "=r"(done)
      : "r"(shared_address(&b)), "r"(parity)
      : "memory");
  return done;
#else
  return emu::mbarrier_try_wait(emu::shared_address(&b), parity, emu::WaitScope::cta, true, site);
#endif
}

/// The same at cluster scope: needed to see writes of threads of other CTAs before their arrivals here.
HOPWELL_DEVICE bool mbarrier_try_wait_cluster(mbarrier& b, uint32_t parity,
                                              [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  uint32_t done;
  asm volatile(
      "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
      : "=r"(done)
      : "r"(shared_address(&b)), "r"(parity)
      : "memory");
  return done;
#else
  return emu::mbarrier_try_wait(emu::shared_address(&b), parity, emu::WaitScope::cluster, true, site);
#endif
}

/// mbarrier.test_wait.parity: the same without waiting. PTX:
/// #parallel-synchronization-and-communication-instructions-mbarrier-test-wait-try-wait
HOPWELL_DEVICE bool mbarrier_test_wait(mbarrier& b, uint32_t parity, [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  uint32_t done;
  asm volatile(
      "{ .reg .pred p; mbarrier.test_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
      : "=r"(done)
      : "r"(shared_address(&b)), "r"(parity)
      : "memory");
  return done;
#else
  return emu::mbarrier_try_wait(emu::shared_address(&b), parity, emu::WaitScope::cta, false, site);
#endif
}

/// Waits for the end of the phase of this parity: 0 for the first, third, … phase. A wait for parity 1 on a new
/// mbarrier returns at once.
HOPWELL_DEVICE void mbarrier_wait(mbarrier& b, uint32_t parity, Site site = Site::current()) {
  while (!mbarrier_try_wait(b, parity, site)) {
  }
}
HOPWELL_DEVICE void mbarrier_wait_cluster(mbarrier& b, uint32_t parity, Site site = Site::current()) {
  while (!mbarrier_try_wait_cluster(b, parity, site)) {
  }
}

/// fence.mbarrier_init.release.cluster: makes this thread's inits visible to the async proxy and to the cluster (after
/// a following barrier). PTX: #parallel-synchronization-and-communication-instructions-membar
HOPWELL_DEVICE void fence_mbarrier_init([[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#else
  emu::fence_mbarrier_init(site);
#endif
}

/// fence.proxy.async.shared::cta: makes this thread's writes to shared memory visible to copies, wgmma and tcgen05.
/// PTX: #parallel-synchronization-and-communication-instructions-membar
HOPWELL_DEVICE void fence_proxy_async([[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#else
  emu::fence_proxy_async(site);
#endif
}
#endif

/// cp.async.mbarrier.arrive.noinc: one arrival when all cp.async that this thread has started are complete. The count
/// of the mbarrier includes it. PTX: #parallel-synchronization-and-communication-instructions-cp-async-mbarrier-arrive
HOPWELL_DEVICE void cp_async_mbarrier_arrive_noinc(mbarrier& b, [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(&b)) : "memory");
#else
  emu::cp_async_mbarrier_arrive_noinc(emu::shared_address(&b), site);
#endif
}

}  // namespace hopwell::arch
