// Clusters, distributed shared memory, register budgets, dependent launches, and stmatrix.
// "PTX:" anchors are sections of https://docs.nvidia.com/cuda/parallel-thread-execution/
#pragma once

#include "../sm80/matrix.hpp"
#include "../sm80/memory.hpp"
#include "mbarrier.hpp"

namespace hopwell::arch {

namespace sm90 {
/// Maximum dynamic shared memory of a CTA: of the 228 KiB of an SM the system reserves 1 KiB per CTA.
inline constexpr int kMaxSharedBytes = 227 * 1024;
}  // namespace sm90

/// %cluster_ctarank and %cluster_nctarank. PTX: #special-registers-cluster-ctarank
HOPWELL_DEVICE uint32_t cluster_rank() {
#if HOPWELL_ON_DEVICE
  uint32_t r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
#else
  return emu::cluster_rank();
#endif
}
HOPWELL_DEVICE uint32_t cluster_size() {
#if HOPWELL_ON_DEVICE
  uint32_t r;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(r));
  return r;
#else
  return emu::cluster_size();
#endif
}

/// mapa: the shared::cluster address of the same object in another CTA. PTX:
/// #data-movement-and-conversion-instructions-mapa
HOPWELL_DEVICE uint32_t map_to_rank(uint32_t shared_address_here, uint32_t rank) {
#if HOPWELL_ON_DEVICE
  uint32_t r;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(shared_address_here), "r"(rank));
  return r;
#else
  return rank << 24 | (shared_address_here & 0xffffff);
#endif
}

/// ld.shared::cluster / st.shared::cluster: a word, or four aligned ones, of any CTA of the cluster. PTX:
/// #data-movement-and-conversion-instructions-ld
HOPWELL_DEVICE uint32_t load_cluster(uint32_t cluster_address, [[maybe_unused]] Site site = Site::current()) {
  uint32_t v;
#if HOPWELL_ON_DEVICE
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(cluster_address) : "memory");
#else
  emu::read_shared(cluster_address, 4, &v, site);
#endif
  return v;
}
HOPWELL_DEVICE Words4 load_cluster_v4(uint32_t cluster_address, [[maybe_unused]] Site site = Site::current()) {
  Words4 v;
#if HOPWELL_ON_DEVICE
  asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
               : "r"(cluster_address)
               : "memory");
#else
  emu::read_shared(cluster_address, 16, &v, site);
#endif
  return v;
}
HOPWELL_DEVICE void store_cluster(uint32_t cluster_address, uint32_t value,
                                  [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(cluster_address), "r"(value) : "memory");
#else
  emu::write_shared(cluster_address, 4, &value, site);
#endif
}

/// barrier.cluster.arrive.release, .relaxed, and .wait.acquire: every thread of the cluster arrives, then waits.
/// PTX: #parallel-synchronization-and-communication-instructions-barrier-cluster
HOPWELL_DEVICE void cluster_arrive([[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#else
  emu::cluster_arrive(true, site);
#endif
}
/// Orders no memory accesses. For "every thread has arrived here", such as before an exit.
HOPWELL_DEVICE void cluster_arrive_relaxed([[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#else
  emu::cluster_arrive(false, site);
#endif
}
HOPWELL_DEVICE void cluster_wait([[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  emu::cluster_wait(site);
#endif
}
HOPWELL_DEVICE void cluster_sync(Site site = Site::current()) {
  cluster_arrive(site);
  cluster_wait(site);
}

/// elect.sync over the whole warp: true in one lane, which is the same every time. PTX:
/// #parallel-synchronization-and-communication-instructions-elect-sync
HOPWELL_DEVICE bool elect_one([[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  uint32_t chosen;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(chosen));
  return chosen;
#else
  return emu::elect(site);
#endif
}

#if HOPWELL_HAS_SM90A || HOPWELL_HAS_SM100A
/// setmaxnreg: sets the registers per thread of this warpgroup, a multiple of 8 from 24 to 256. Executed by whole
/// warpgroups.
/// PTX: #miscellaneous-instructions-setmaxnreg
template <int kRegisters>
HOPWELL_DEVICE void setmaxnreg_inc([[maybe_unused]] Site site = Site::current()) {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
#if HOPWELL_ON_DEVICE
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
#else
  emu::setmaxnreg(kRegisters, true, site);
#endif
}
template <int kRegisters>
HOPWELL_DEVICE void setmaxnreg_dec([[maybe_unused]] Site site = Site::current()) {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
#if HOPWELL_ON_DEVICE
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#else
  emu::setmaxnreg(kRegisters, false, site);
#endif
}
#endif

/// griddepcontrol: lets the next kernel of the stream start; waits for the previous kernel. The emulator runs launches
/// one after another, so both do nothing there. PTX:
/// #parallel-synchronization-and-communication-instructions-griddepcontrol
HOPWELL_DEVICE void griddepcontrol_launch_dependents() {
#if HOPWELL_ON_DEVICE
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
HOPWELL_DEVICE void griddepcontrol_wait() {
#if HOPWELL_ON_DEVICE
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// fence.acq_rel.cluster: orders this thread's generic accesses for the cluster. PTX:
/// #parallel-synchronization-and-communication-instructions-membar. It does nothing in the emulator, where threads see
/// each other's writes at once and a fence alone does not synchronise.
HOPWELL_DEVICE void fence_acq_rel_cluster() {
#if HOPWELL_ON_DEVICE
  asm volatile("fence.acq_rel.cluster;" ::: "memory");
#endif
}

/// stmatrix.m8n8.x1/.x2/.x4: the inverse of ldmatrix. PTX: #warp-level-matrix-instructions-stmatrix
template <Transpose kTranspose = Transpose::no, int kCount>
HOPWELL_DEVICE void stmatrix(uint32_t row_address, const uint32_t (&r)[kCount],
                             [[maybe_unused]] Site site = Site::current()) {
  static_assert(kCount == 1 || kCount == 2 || kCount == 4);
#if HOPWELL_ON_DEVICE
  if constexpr (kTranspose == Transpose::no) {
    if constexpr (kCount == 1)
      asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};" ::"r"(row_address), "r"(r[0]) : "memory");
    else if constexpr (kCount == 2)
      asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(row_address), "r"(r[0]), "r"(r[1])
                   : "memory");
    else
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address), "r"(r[0]),
                   "r"(r[1]), "r"(r[2]), "r"(r[3])
                   : "memory");
  } else {
    if constexpr (kCount == 1)
      asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(row_address), "r"(r[0])
                   : "memory");
    else if constexpr (kCount == 2)
      asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(row_address), "r"(r[0]),
                   "r"(r[1])
                   : "memory");
    else
      asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address),
                   "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                   : "memory");
  }
#else
  emu::stmatrix(r, kCount, kTranspose == Transpose::yes, row_address, site);
#endif
}

}  // namespace hopwell::arch
