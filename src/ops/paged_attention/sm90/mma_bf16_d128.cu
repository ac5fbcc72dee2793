#include "ops/paged_attention/cluster_kernel.hpp"

namespace hopwell::ops::paged_attention::HOPWELL_TARGET {

// Hopper gives a CTA 227 KiB; a GPU that gives less gets fewer warps.
static_assert(kClusterBytes<MmaTile<bf16, 128, 0>>.with(kMaxWarps) <= 227 * 1024);

template TileKernel<ClusterParams> mma_kernel<ClusterParams, bf16, 128>(const Problem&);

}  // namespace hopwell::ops::paged_attention::HOPWELL_TARGET
