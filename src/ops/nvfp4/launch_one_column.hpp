// Launches the kernel for one column of x, for sm80.cu and sm100.cu.
#pragma once

#include "ops/nvfp4/kernels/one_column.hpp"
#include "ops/nvfp4/launch.hpp"

namespace hopwell::ops::nvfp4::HOPWELL_TARGET {

template <class X, class T>
void launch_one_column(const char* name, const Plan& plan, const ProblemShape& shape, const runtime::Device& device,
                       Stream stream, OneColumnParams<X, T> p) {
  p.rows = static_cast<int>(shape.rows), p.k = static_cast<int>(shape.k);
  p.warps = plan.warps, p.slice = plan.slice, p.larger_warps = plan.larger_warps, p.round_tiles = plan.round_tiles;
  p.tiles_per_cta = plan.tiles_per_cluster(), p.larger_ctas = plan.larger_clusters();
  p.whole_scales = has_whole_scales(p.weight.scales);
  runtime::launch(name, nvfp4_linear_gemv<X, T>, launch_shape(plan, 32 * plan.warps, device, shape.batches), stream, p);
}

}  // namespace hopwell::ops::nvfp4::HOPWELL_TARGET
