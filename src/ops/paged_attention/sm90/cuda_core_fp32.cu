#include "ops/paged_attention/cluster_kernel.hpp"

namespace hopwell::ops::paged_attention::HOPWELL_TARGET {

template TileKernel<ClusterParams> cuda_core_kernel<ClusterParams, float>(const Problem&);

}  // namespace hopwell::ops::paged_attention::HOPWELL_TARGET
