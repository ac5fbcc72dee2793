// mbarriers: barriers in shared memory that count arrivals of threads and bytes of asynchronous copies.
// "PTX:" anchors are sections of https://docs.nvidia.com/cuda/parallel-thread-execution/
#pragma once

#include "../sm80/threads.hpp"
#if !HOPWELL_ON_DEVICE
#include "../emu/sm90.hpp"
#endif

namespace hopwell::arch {

/// Opaque; lives in shared memory and is touched only by the functions below.
struct alignas(8) mbarrier {
  uint64_t opaque;
};

/// mbarrier.init: phase 0, expecting `count` arrivals a phase. By one thread; others may use it after a barrier, and
/// other proxies and CTAs after fence_mbarrier_init as well. PTX:
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

/// The same with `count` arrivals at once.
HOPWELL_DEVICE void mbarrier_arrive(mbarrier& b, uint32_t count, [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&b)), "r"(count)
               : "memory");
#else
  emu::mbarrier_arrive(emu::shared_address(&b), count, false, site);
#endif
}

#if HOPWELL_HAS_SM90
/// mbarrier.arrive.expect_tx: one arrival, and `bytes` more to come before the phase can end. PTX:
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

/// mbarrier.expect_tx: `bytes` more to come, no arrival. PTX:
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

/// mbarrier.arrive.relaxed.cluster: the same without a release. For buffers that this thread has used up: whoever waits
/// may overwrite them, and learns nothing of what they or others hold. It waits for nothing, not even for the thread's
/// own loads, which it was seen to overtake: a fence.proxy.async, which does, must come between. A release at cluster
/// scope waits for all that the thread has under way, additions to global memory too. PTX:
/// #parallel-synchronization-and-communication-instructions-mbarrier-arrive
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

/// mbarrier.try_wait.parity.acquire.cta: whether the phase of this parity has ended; may wait a while and may fail
/// without a reason. PTX: #parallel-synchronization-and-communication-instructions-mbarrier-test-wait-try-wait
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

/// The same at cluster scope: needed to see what threads of other CTAs wrote before they arrived here.
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

/// Waits for the end of the phase of this parity: 0 for the first, third, … phase. A new mbarrier counts as past a
/// phase of parity 1.
HOPWELL_DEVICE void mbarrier_wait(mbarrier& b, uint32_t parity, Site site = Site::current()) {
  while (!mbarrier_try_wait(b, parity, site)) {
  }
}
HOPWELL_DEVICE void mbarrier_wait_cluster(mbarrier& b, uint32_t parity, Site site = Site::current()) {
  while (!mbarrier_try_wait_cluster(b, parity, site)) {
  }
}

/// fence.mbarrier_init.release.cluster: this thread's inits become visible to the async proxy and to the cluster (a
/// barrier follows). PTX: #parallel-synchronization-and-communication-instructions-membar
HOPWELL_DEVICE void fence_mbarrier_init([[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#else
  emu::fence_mbarrier_init(site);
#endif
}

/// fence.proxy.async.shared::cta: what this thread wrote to shared memory becomes visible to copies, wgmma and tcgen05.
/// PTX: #parallel-synchronization-and-communication-instructions-membar
HOPWELL_DEVICE void fence_proxy_async([[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#else
  emu::fence_proxy_async(site);
#endif
}
#endif

/// cp.async.mbarrier.arrive.noinc: one arrival once all cp.async that this thread has started are complete; the count
/// of the mbarrier includes it. PTX: #parallel-synchronization-and-communication-instructions-cp-async-mbarrier-arrive
HOPWELL_DEVICE void cp_async_mbarrier_arrive_noinc(mbarrier& b, [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(&b)) : "memory");
#else
  emu::cp_async_mbarrier_arrive_noinc(emu::shared_address(&b), site);
#endif
}

}  // namespace hopwell::arch
