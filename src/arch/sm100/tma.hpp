// Tensor copies that Blackwell adds: gathered and scattered rows, and completion in the other CTA of a pair.
// "PTX:" anchors are sections of https://docs.nvidia.com/cuda/parallel-thread-execution/
#pragma once

#include "../sm90/tma.hpp"
#include "cta_group.hpp"
#if !HOPWELL_ON_DEVICE
#include "../emu/sm100.hpp"
#endif

namespace hopwell::arch {

#if HOPWELL_HAS_SM100A

/// The mbarrier at the same offset in the even CTA of the pair. shared::cluster addresses hold the rank from bit 24 on.
HOPWELL_DEVICE uint32_t in_even_cta(uint32_t cluster_address) { return cluster_address & 0xfeffffff; }

/// cp.async.bulk.tensor.2d.tile::gather4: copies four rows of a tensor, from column `column` on, to consecutive rows of
/// shared memory. The tensor map has rank 2 and a box of one row. Rows outside of the tensor are filled with zeros.
/// With kCtaGroup 2 the mbarrier (a shared::cluster address) may be in the other CTA of the pair. `policy`: L2 eviction
/// policy. PTX: #data-movement-and-conversion-instructions-cp-async-bulk-tensor
template <int kCtaGroup>
HOPWELL_DEVICE void tma_gather4(uint32_t destination, const TensorMap& map, int column, const int (&row)[4],
                                uint32_t cluster_mbarrier, [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes.%8 [%0], [%1, {%2, %3, "
      "%4, "
      "%5, %6}], [%7];" ::"r"(destination),
      "l"(&map), "r"(column), "r"(row[0]), "r"(row[1]), "r"(row[2]), "r"(row[3]), "r"(cluster_mbarrier),
      "C"(detail::CtaGroupName<kCtaGroup>::text)
      : "memory");
#else
  const int coordinates[5] = {column, row[0], row[1], row[2], row[3]};
  emu::tma_load(destination, map, coordinates, 5, cluster_mbarrier, emu::TmaMode::gather4, kCtaGroup, -1, site);
#endif
}
template <int kCtaGroup>
HOPWELL_DEVICE void tma_gather4(uint32_t destination, const TensorMap& map, int column, const int (&row)[4],
                                uint32_t cluster_mbarrier, [[maybe_unused]] CachePolicy policy,
                                [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes.%9.L2::cache_hint [%0], "
      "[%1, {%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(destination),
      "l"(&map), "r"(column), "r"(row[0]), "r"(row[1]), "r"(row[2]), "r"(row[3]), "r"(cluster_mbarrier),
      "l"(policy.bits), "C"(detail::CtaGroupName<kCtaGroup>::text)
      : "memory");
#else
  tma_gather4<kCtaGroup>(destination, map, column, row, cluster_mbarrier, site);
#endif
}

/// .multicast::cluster: copies to the same offset in every CTA of `cta_mask`; each CTA counts on its mbarrier at the
/// same offset. With kCtaGroup 2, each pair counts on the mbarrier in its CTA with the parity of the given mbarrier's
/// CTA. PTX: #data-movement-and-conversion-instructions-cp-async-bulk-tensor
template <int kCtaGroup>
HOPWELL_DEVICE void tma_gather4_multicast(uint32_t destination, const TensorMap& map, int column, const int (&row)[4],
                                          uint32_t cluster_mbarrier, uint16_t cta_mask,
                                          [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile::gather4.mbarrier::complete_tx::bytes.multicast::cluster.%9 "
      "[%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(destination),
      "l"(&map), "r"(column), "r"(row[0]), "r"(row[1]), "r"(row[2]), "r"(row[3]), "r"(cluster_mbarrier), "h"(cta_mask),
      "C"(detail::CtaGroupName<kCtaGroup>::text)
      : "memory");
#else
  const int coordinates[5] = {column, row[0], row[1], row[2], row[3]};
  emu::tma_load(destination, map, coordinates, 5, cluster_mbarrier, emu::TmaMode::gather4, kCtaGroup, cta_mask, site);
#endif
}
template <int kCtaGroup>
HOPWELL_DEVICE void tma_gather4_multicast(uint32_t destination, const TensorMap& map, int column, const int (&row)[4],
                                          uint32_t cluster_mbarrier, uint16_t cta_mask,
                                          [[maybe_unused]] CachePolicy policy,
                                          [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile::gather4.mbarrier::complete_tx::bytes.multicast::cluster.%"
      "10."
      "L2::cache_hint [%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8, %9;" ::"r"(destination),
      "l"(&map), "r"(column), "r"(row[0]), "r"(row[1]), "r"(row[2]), "r"(row[3]), "r"(cluster_mbarrier), "h"(cta_mask),
      "l"(policy.bits), "C"(detail::CtaGroupName<kCtaGroup>::text)
      : "memory");
#else
  tma_gather4_multicast<kCtaGroup>(destination, map, column, row, cluster_mbarrier, cta_mask, site);
#endif
}

/// cp.async.bulk.tensor.2d.tile::scatter4: copies four rows out of shared memory, in the thread's bulk group.
/// PTX: #data-movement-and-conversion-instructions-cp-async-bulk-tensor
HOPWELL_DEVICE void tma_scatter4(const TensorMap& map, int column, const int (&row)[4], uint32_t source,
                                 [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group [%0, {%1, %2, %3, %4, %5}], [%6];" ::"l"(
          &map),
      "r"(column), "r"(row[0]), "r"(row[1]), "r"(row[2]), "r"(row[3]), "r"(source)
      : "memory");
#else
  const int coordinates[5] = {column, row[0], row[1], row[2], row[3]};
  emu::tma_store(map, coordinates, 5, source, emu::TmaStore::scatter4, site);
#endif
}

/// cp.async.bulk.tensor.2d with .cta_group::2: copies a box to this CTA, counted on an mbarrier of either CTA of the
/// pair.
/// PTX: #data-movement-and-conversion-instructions-cp-async-bulk-tensor
HOPWELL_DEVICE void tma_load_pair(uint32_t destination, const TensorMap& map, const int (&c)[2],
                                  uint32_t cluster_mbarrier, [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.cta_group::2 [%0], [%1, {%2, "
      "%3}], [%4];" ::"r"(destination),
      "l"(&map), "r"(c[0]), "r"(c[1]), "r"(cluster_mbarrier)
      : "memory");
#else
  emu::tma_load(destination, map, c, 2, cluster_mbarrier, emu::TmaMode::tile, 2, -1, site);
#endif
}

#endif

}  // namespace hopwell::arch
