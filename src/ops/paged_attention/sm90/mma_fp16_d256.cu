#include "ops/paged_attention/cluster_kernel.hpp"

namespace hopwell::ops::paged_attention::HOPWELL_TARGET {

template TileKernel<ClusterParams> mma_kernel<ClusterParams, fp16, 256>(const Problem&);

}  // namespace hopwell::ops::paged_attention::HOPWELL_TARGET
