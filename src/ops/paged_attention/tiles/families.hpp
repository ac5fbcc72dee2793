// paged_attention on GPUs: which warp tile runs which problems (plan.cpp decides on the kind).
//
//     layout     type, d           queries a KV head   a warp's lanes have         in
//     nhd, hnd   16 bit            2 and more          fragments of mma            mma.hpp, 8 a pass; up to 16 heads
//                                                                                  where plan.cpp's mma_blocks is 2;
//                                                                                  d > 128 and q not exact: 3 and more
//     vllm       16 bit, d ≤ 128   any                 fragments of mma            mma.hpp
//     nhd, hnd   any other, or r   any, one a pass     rows of keys and values     key_major.hpp
//     vllm       any other, or r   any, one a pass     columns of keys and values  dimension_major.hpp
//
// A family of tiles is compiled in a translation unit of its own (sm80/*.cu, sm90/*.cu), so that several cores share
// the work. P: Params for the split kernel, ClusterParams for the cluster kernel.
#pragma once

#include "arch/platform.hpp"
#include "ops/paged_attention/plan.hpp"

namespace hopwell::ops::paged_attention::HOPWELL_TARGET {

// Choose the tile of a problem within a family.
template <class P, class T>
TileKernel<P> cuda_core_kernel(const Problem& problem);
template <class P, class T, int kD>  // d <= kD. 256: all d above 128
TileKernel<P> mma_kernel(const Problem& problem);

template <class P, class T>
TileKernel<P> kernel_of_type(const Problem& problem) {
  if constexpr (sizeof(T) == 2) {
    if (tile_kind(problem) == TileKind::mma)
      return problem.d <= 64    ? mma_kernel<P, T, 64>(problem)
             : problem.d <= 128 ? mma_kernel<P, T, 128>(problem)
                                : mma_kernel<P, T, 256>(problem);
  }
  return cuda_core_kernel<P, T>(problem);
}
template <class P>
TileKernel<P> kernel_of(const Problem& problem) {
  if (problem.q.dtype == DType::kFloat32) return kernel_of_type<P, float>(problem);
  if (problem.q.dtype == DType::kFloat16) return kernel_of_type<P, arch::fp16>(problem);
  return kernel_of_type<P, arch::bf16>(problem);
}

}  // namespace hopwell::ops::paged_attention::HOPWELL_TARGET
