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

// The SMs lie in groups of 16 or so, and a cluster lies in one of them: of an H200's 132 SMs 66 clusters of 2 find
// room, 39 of 3, 30 of 4, 22 of 5, 17 of 6, 15 of 7 or 8.
int clusters_that_fit(int size, const runtime::Device& device) {
  using Tile = KeyMajorTile<bf16, 1, 8, false>;
  return runtime::clusters_that_fit<paged_attention_cluster<Tile>>(
      device, {.threads = kMaxThreads,
               .cluster = static_cast<std::uint32_t>(size),
               .shared_bytes = kClusterBytes<Tile>.with(kMaxWarps)});
}

}  // namespace hopwell::ops::paged_attention::HOPWELL_TARGET
