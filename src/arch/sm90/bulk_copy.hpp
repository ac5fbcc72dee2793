// Bulk copies of contiguous bytes by the copy engine, bulk reductions, and st.async. Sizes and addresses are multiples
// of 16 bytes. "PTX:" anchors are sections of https://docs.nvidia.com/cuda/parallel-thread-execution/
#pragma once

#include "cluster.hpp"

namespace hopwell::arch {

/// cp.async.bulk.shared::cluster.global: copies global memory to this CTA's shared memory; `bytes` are counted on the
/// mbarrier.
/// PTX: #data-movement-and-conversion-instructions-cp-async-bulk
HOPWELL_DEVICE void bulk_load(uint32_t destination, const void* source, uint32_t bytes, mbarrier& b,
                              [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
      "l"(source), "r"(bytes), "r"(shared_address(&b))
      : "memory");
#else
  emu::bulk_load(destination, source, bytes, emu::shared_address(&b), -1, site);
#endif
}

/// The same to the same offset in every CTA of `cta_mask`, each counting on its own mbarrier. PTX:
/// #data-movement-and-conversion-instructions-cp-async-bulk
HOPWELL_DEVICE void bulk_load_multicast(uint32_t destination, const void* source, uint32_t bytes, mbarrier& b,
                                        uint16_t cta_mask, [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], "
      "%4;" ::"r"(destination),
      "l"(source), "r"(bytes), "r"(shared_address(&b)), "h"(cta_mask)
      : "memory");
#else
  emu::bulk_load(destination, source, bytes, emu::shared_address(&b), cta_mask, site);
#endif
}

/// cp.async.bulk.shared::cluster.shared::cta: copies this CTA's shared memory to another CTA's, counted on an mbarrier
/// there.
/// PTX: #data-movement-and-conversion-instructions-cp-async-bulk
HOPWELL_DEVICE void bulk_copy_to_cta(uint32_t cluster_destination, uint32_t source, uint32_t bytes,
                                     uint32_t cluster_mbarrier, [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   cluster_destination),
               "r"(source), "r"(bytes), "r"(cluster_mbarrier)
               : "memory");
#else
  emu::bulk_copy_to_cta(cluster_destination, source, bytes, cluster_mbarrier, site);
#endif
}

/// cp.async.bulk.global.shared::cta: copies shared to global memory, in the thread's bulk group. PTX:
/// #data-movement-and-conversion-instructions-cp-async-bulk
HOPWELL_DEVICE void bulk_store(void* destination, uint32_t source, uint32_t bytes,
                               [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(destination), "r"(source), "r"(bytes)
               : "memory");
#else
  emu::bulk_store(destination, source, bytes, site);
#endif
}

/// cp.reduce.async.bulk.add: adds shared to global memory, element by element, each atomically. bf16 sums round to
/// nearest (.noftz). PTX: #data-movement-and-conversion-instructions-cp-reduce-async-bulk
HOPWELL_DEVICE void bulk_reduce_add(float* destination, uint32_t source, uint32_t bytes,
                                    [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(destination),
               "r"(source), "r"(bytes)
               : "memory");
#else
  emu::bulk_reduce(destination, source, bytes, emu::ReduceType::f32, site);
#endif
}
HOPWELL_DEVICE void bulk_reduce_add(bf16* destination, uint32_t source, uint32_t bytes,
                                    [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.bf16 [%0], [%1], %2;" ::"l"(destination),
               "r"(source), "r"(bytes)
               : "memory");
#else
  emu::bulk_reduce(destination, source, bytes, emu::ReduceType::bf16, site);
#endif
}
/// 64-bit integers: two's-complement addition, so the sign does not matter (PTX has .add for .u64 only).
HOPWELL_DEVICE void bulk_reduce_add(int64_t* destination, uint32_t source, uint32_t bytes,
                                    [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u64 [%0], [%1], %2;" ::"l"(destination),
               "r"(source), "r"(bytes)
               : "memory");
#else
  emu::bulk_reduce(destination, source, bytes, emu::ReduceType::s64, site);
#endif
}

/// cp.async.bulk.commit_group: closes a group of the stores and reductions since the last one. PTX:
/// #data-movement-and-conversion-instructions-cp-async-bulk-commit-group
HOPWELL_DEVICE void bulk_commit([[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#else
  emu::bulk_commit(site);
#endif
}

/// cp.async.bulk.wait_group: waits until at most the latest kPending groups of this thread are incomplete. .read: waits
/// only until their sources have been read. PTX: #data-movement-and-conversion-instructions-cp-async-bulk-wait-group
template <int kPending>
HOPWELL_DEVICE void bulk_wait([[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
#else
  emu::bulk_wait(kPending, false, site);
#endif
}
template <int kPending>
HOPWELL_DEVICE void bulk_wait_read([[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
#else
  emu::bulk_wait(kPending, true, site);
#endif
}

/// st.async: stores 4 or 16 bytes to the shared memory of any CTA of the cluster, counted on an mbarrier there. PTX:
/// #data-movement-and-conversion-instructions-st-async
HOPWELL_DEVICE void store_async(uint32_t cluster_destination, uint32_t value, uint32_t cluster_mbarrier,
                                [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(cluster_destination),
      "r"(value), "r"(cluster_mbarrier)
      : "memory");
#else
  emu::store_async(cluster_destination, &value, 4, cluster_mbarrier, site);
#endif
}
HOPWELL_DEVICE void store_async_v4(uint32_t cluster_destination, const Words4& v, uint32_t cluster_mbarrier,
                                   [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                   cluster_destination),
               "r"(v.w[0]), "r"(v.w[1]), "r"(v.w[2]), "r"(v.w[3]), "r"(cluster_mbarrier)
               : "memory");
#else
  emu::store_async(cluster_destination, &v, 16, cluster_mbarrier, site);
#endif
}

}  // namespace hopwell::arch
