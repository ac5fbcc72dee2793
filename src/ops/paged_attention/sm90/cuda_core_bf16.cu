#include "ops/paged_attention/cluster_kernel.hpp"
#include "ops/paged_attention/sm90/clusters_that_fit.hpp"
#include "runtime/launch.hpp"

namespace hopwell::ops::paged_attention::HOPWELL_TARGET {

// Hopper gives a CTA 227 KiB; a GPU that gives less gets fewer warps.
static_assert(kClusterBytes<KeyMajorTile<bf16, 2, 4, false>>.with(kMaxWarps) <= 227 * 1024);
static_assert(kClusterBytes<KeyMajorTile<bf16, 3, 4, false>>.with(kMaxWarps - 1) <= 227 * 1024);
static_assert(kClusterBytes<KeyMajorTile<bf16, 5, 2, false>>.with(kMaxWarps) <= 227 * 1024);
static_assert(kClusterBytes<KeyMajorTile<bf16, 1, 8, true>>.with(kMaxWarps) <= 227 * 1024);

template TileKernel<ClusterParams> cuda_core_kernel<ClusterParams, bf16>(const Problem&);

// A cluster lies within a GPC, which has about 16 SMs. On an H200 with 132 SMs the driver fits:
//
//     cluster size   2    3    4    5    6    7    8
//     clusters       66   39   30   22   17   15   15
int clusters_that_fit(int size, const runtime::Device& device) {
  using Tile = KeyMajorTile<bf16, 1, 8, false>;
  return runtime::clusters_that_fit<paged_attention_cluster<Tile>>(
      device, {.threads = kMaxThreads,
               .cluster = static_cast<std::uint32_t>(size),
               .shared_bytes = kClusterBytes<Tile>.with(kMaxWarps)});
}

}  // namespace hopwell::ops::paged_attention::HOPWELL_TARGET
