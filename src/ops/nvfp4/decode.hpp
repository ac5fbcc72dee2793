// nvfp4_matmul as nvfp4_linear: the side that is x, decoded to the workspace.
#pragma once

#include "ops/nvfp4/plan.hpp"
#include "ops/nvfp4_quantize/dequantize.hpp"

namespace hopwell::ops::nvfp4::HOPWELL_TARGET {

// Each kernel file has its own: see runtime::launch.
namespace {

// Bytes of a workspace that decoded codes take, so that what follows them is as aligned as they are.
std::size_t decoded_bytes(const MatmulProblem& p) {
  const LinearProblem linear = as_linear(p, decodes_b(p)).linear;
  return static_cast<std::size_t>(tile::ceil_div(linear.n * p.k * size_of(linear.x.dtype), 256) * 256);
}

// The plan of nvfp4_matmul: that of nvfp4_linear with decoded x, whose workspace follows x.
struct DecodedPlan {
  Plan linear;
  std::size_t workspace_bytes = 0;
};
DecodedPlan with_decoded_x(const MatmulProblem& p, const Plan& linear) {
  return {linear, decoded_bytes(p) + linear.workspace_bytes};
}

// Decodes x to the beginning of the workspace. Returns the problem of nvfp4_linear that remains.
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
