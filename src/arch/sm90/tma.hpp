// Tensor copies by the copy engine (TMA): boxes of tensors of rank 1 to 5. Coordinates give the box's first
// element, innermost dimension first; the innermost coordinate is a multiple of 16 bytes. A box may extend beyond the
// tensor: loads fill zeros there, stores skip these elements but may not start at a negative coordinate. Shared
// addresses are 128-byte aligned. "PTX:" anchors are sections of
// https://docs.nvidia.com/cuda/parallel-thread-execution/
#pragma once

#include "bulk_copy.hpp"
#include "tensor_map.hpp"

namespace hopwell::arch {

/// cp.async.bulk.tensor.shared::cluster.global.tile: copies a box to this CTA's shared memory; all its bytes are
/// counted on the mbarrier. PTX: #data-movement-and-conversion-instructions-cp-async-bulk-tensor
template <int kRank>
HOPWELL_DEVICE void tma_load(uint32_t destination, const TensorMap& map, const int (&c)[kRank], mbarrier& b,
                             [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  if constexpr (kRank == 1)
    asm volatile(
        "cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2}], [%3];" ::
            "r"(destination),
        "l"(&map), "r"(c[0]), "r"(shared_address(&b))
        : "memory");
  else if constexpr (kRank == 2)
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
        "[%4];" ::"r"(destination),
        "l"(&map), "r"(c[0]), "r"(c[1]), "r"(shared_address(&b))
        : "memory");
  else if constexpr (kRank == 3)
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
        "[%5];" ::"r"(destination),
        "l"(&map), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(shared_address(&b))
        : "memory");
  else if constexpr (kRank == 4)
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, "
        "%5}], [%6];" ::"r"(destination),
        "l"(&map), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]), "r"(shared_address(&b))
        : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, "
        "%6}], [%7];" ::"r"(destination),
        "l"(&map), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]), "r"(c[4]), "r"(shared_address(&b))
        : "memory");
#else
  emu::tma_load(destination, map, c, kRank, emu::shared_address(&b), emu::TmaMode::tile, 1, -1, site);
#endif
}

/// The same with an L2 policy.
template <int kRank>
HOPWELL_DEVICE void tma_load_cached(uint32_t destination, const TensorMap& map, const int (&c)[kRank], mbarrier& b,
                                    [[maybe_unused]] CachePolicy policy, [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  if constexpr (kRank == 1)
    asm volatile(
        "cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, "
        "{%2}], [%3], %4;" ::"r"(destination),
        "l"(&map), "r"(c[0]), "r"(shared_address(&b)), "l"(policy.bits)
        : "memory");
  else if constexpr (kRank == 2)
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, "
        "{%2, %3}], [%4], %5;" ::"r"(destination),
        "l"(&map), "r"(c[0]), "r"(c[1]), "r"(shared_address(&b)), "l"(policy.bits)
        : "memory");
  else if constexpr (kRank == 3)
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, "
        "{%2, %3, %4}], [%5], %6;" ::"r"(destination),
        "l"(&map), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(shared_address(&b)), "l"(policy.bits)
        : "memory");
  else if constexpr (kRank == 4)
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, "
        "{%2, %3, %4, %5}], [%6], %7;" ::"r"(destination),
        "l"(&map), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]), "r"(shared_address(&b)), "l"(policy.bits)
        : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, "
        "{%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(destination),
        "l"(&map), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]), "r"(c[4]), "r"(shared_address(&b)), "l"(policy.bits)
        : "memory");
#else
  emu::tma_load(destination, map, c, kRank, emu::shared_address(&b), emu::TmaMode::tile, 1, -1, site);
#endif
}

/// .multicast::cluster: to the same offset in every CTA of `cta_mask`, each counting on its own mbarrier.
/// PTX: #data-movement-and-conversion-instructions-cp-async-bulk-tensor
template <int kRank>
HOPWELL_DEVICE void tma_load_multicast(uint32_t destination, const TensorMap& map, const int (&c)[kRank], mbarrier& b,
                                       uint16_t cta_mask, [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  if constexpr (kRank == 1)
    asm volatile(
        "cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%2}], [%3], %4;" ::"r"(destination),
        "l"(&map), "r"(c[0]), "r"(shared_address(&b)), "h"(cta_mask)
        : "memory");
  else if constexpr (kRank == 2)
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%2, %3}], [%4], %5;" ::"r"(destination),
        "l"(&map), "r"(c[0]), "r"(c[1]), "r"(shared_address(&b)), "h"(cta_mask)
        : "memory");
  else if constexpr (kRank == 3)
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%2, %3, %4}], [%5], %6;" ::"r"(destination),
        "l"(&map), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(shared_address(&b)), "h"(cta_mask)
        : "memory");
  else if constexpr (kRank == 4)
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(destination),
        "l"(&map), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]), "r"(shared_address(&b)), "h"(cta_mask)
        : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(destination),
        "l"(&map), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]), "r"(c[4]), "r"(shared_address(&b)), "h"(cta_mask)
        : "memory");
#else
  emu::tma_load(destination, map, c, kRank, emu::shared_address(&b), emu::TmaMode::tile, 1, cta_mask, site);
#endif
}

/// cp.async.bulk.tensor.global.shared::cta.tile: copies a box out of shared memory, in the thread's bulk group (see
/// bulk_commit). PTX: #data-movement-and-conversion-instructions-cp-async-bulk-tensor
template <int kRank>
HOPWELL_DEVICE void tma_store(const TensorMap& map, const int (&c)[kRank], uint32_t source,
                              [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  if constexpr (kRank == 1)
    asm volatile("cp.async.bulk.tensor.1d.global.shared::cta.tile.bulk_group [%0, {%1}], [%2];" ::"l"(&map), "r"(c[0]),
                 "r"(source)
                 : "memory");
  else if constexpr (kRank == 2)
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map),
                 "r"(c[0]), "r"(c[1]), "r"(source)
                 : "memory");
  else if constexpr (kRank == 3)
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(&map),
                 "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(source)
                 : "memory");
  else if constexpr (kRank == 4)
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(&map),
                 "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]), "r"(source)
                 : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4, %5}], [%6];" ::"l"(&map),
        "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]), "r"(c[4]), "r"(source)
        : "memory");
#else
  emu::tma_store(map, c, kRank, source, emu::TmaStore::store, site);
#endif
}

/// cp.reduce.async.bulk.tensor.add: adds a box of f32 to the tensor, each element atomically.
/// PTX: #data-movement-and-conversion-instructions-cp-reduce-async-bulk-tensor
template <int kRank>
HOPWELL_DEVICE void tma_reduce_add(const TensorMap& map, const int (&c)[kRank], uint32_t source,
                                   [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  if constexpr (kRank == 1)
    asm volatile("cp.reduce.async.bulk.tensor.1d.global.shared::cta.add.tile.bulk_group [%0, {%1}], [%2];" ::"l"(&map),
                 "r"(c[0]), "r"(source)
                 : "memory");
  else if constexpr (kRank == 2)
    asm volatile(
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map),
        "r"(c[0]), "r"(c[1]), "r"(source)
        : "memory");
  else if constexpr (kRank == 3)
    asm volatile(
        "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(&map),
        "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(source)
        : "memory");
  else if constexpr (kRank == 4)
    asm volatile(
        "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(
            &map),
        "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]), "r"(source)
        : "memory");
  else
    asm volatile(
        "cp.reduce.async.bulk.tensor.5d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2, %3, %4, %5}], [%6];" ::"l"(
            &map),
        "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]), "r"(c[4]), "r"(source)
        : "memory");
#else
  emu::tma_store(map, c, kRank, source, emu::TmaStore::reduce_add, site);
#endif
}

/// prefetch.tensormap: a hint, for a tensor map that is a kernel parameter. PTX:
/// #data-movement-and-conversion-instructions-prefetch-prefetchu
HOPWELL_DEVICE void prefetch_tensor_map([[maybe_unused]] const TensorMap& map) {
#if HOPWELL_ON_DEVICE
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
#endif
}

}  // namespace hopwell::arch
