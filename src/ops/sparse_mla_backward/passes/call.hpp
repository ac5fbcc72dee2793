// sparse_mla_backward on GPUs: the kernels of a call, in order. plan.hpp has the numbers.
//
//     attention_distribution, the units of fixed-point sums    deterministic calls only
//     zeros, sorted rows                                       preprocess
//     the main kernels                                         of the backend
//     dkv, attn and d_sink in their final form                 postprocess
#pragma once

#include "ops/sparse_mla_backward/passes/clear_accumulators.hpp"
#include "ops/sparse_mla_backward/passes/fixed_point_units.hpp"
#include "ops/sparse_mla_backward/passes/order_rows.hpp"
#include "ops/sparse_mla_backward/passes/postprocess_d_sink.hpp"
#include "ops/sparse_mla_backward/passes/postprocess_dkv.hpp"

namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET {

template <class LaunchMainKernels>
void run_call(const Problem& problem, const Plan& plan, void* workspace, Stream stream,
              const LaunchMainKernels& launch_main_kernels) {
  distribute_attention(problem, plan, workspace, stream);
  choose_fixed_point_units(problem, plan, workspace, stream);
  clear_accumulators(problem, plan, workspace, stream);
  order_rows(problem, plan, workspace, stream);
  launch_main_kernels();
  postprocess_dkv(problem, plan, workspace, stream);
  restore_attn(problem, plan, workspace, stream);
  postprocess_d_sink(problem, plan, workspace, stream);
}

}  // namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET
