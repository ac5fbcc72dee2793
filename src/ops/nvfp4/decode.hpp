// nvfp4_matmul by nvfp4_linear's kernels: one side is decoded into the workspace and becomes x.
#pragma once

#include "ops/nvfp4/plan.hpp"
#include "ops/nvfp4_quantize/dequantize.hpp"

namespace hopwell::ops::nvfp4::HOPWELL_TARGET {

// Internal linkage: each kernel file has a copy of its own. See runtime::launch.
namespace {

// Workspace bytes of decoded x, rounded up to 256: the workspace of nvfp4_linear follows and is aligned as well.
std::size_t decoded_bytes(const MatmulProblem& p) {
  const LinearProblem linear = as_linear(p, decodes_b(p)).linear;
  return static_cast<std::size_t>(tile::ceil_div(linear.n * p.k * size_of(linear.x.dtype), 256) * 256);
}

// Plan of nvfp4_matmul: the plan of nvfp4_linear with decoded x. The workspace is x, then nvfp4_linear's workspace.
struct DecodedPlan {
  Plan linear;
  std::size_t workspace_bytes = 0;
};
DecodedPlan with_decoded_x(const MatmulProblem& p, const Plan& linear) {
  return {linear, decoded_bytes(p) + linear.workspace_bytes};
}

// Decodes x into the beginning of the workspace. Returns the nvfp4_linear problem with this x.
LinearProblem decode(const MatmulProblem& p, void* workspace, Stream stream) {
  auto [codes, scales, linear] = as_linear(p, decodes_b(p));
  linear.x.data = workspace;
  nvfp4_quantize::HOPWELL_TARGET::dequantize(
      linear.op, {.codes = codes, .x = linear.x, .scales = scales, .rows = linear.n, .k = p.k, .device = p.device},
      stream);
  return linear;
}

}  // namespace
}  // namespace hopwell::ops::nvfp4::HOPWELL_TARGET
