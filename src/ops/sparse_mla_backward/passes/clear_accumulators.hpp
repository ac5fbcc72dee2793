// sparse_mla_backward on GPUs, preprocess: clears attn and dkv_accum.
#pragma once

#include "ops/sparse_mla_backward/passes/pass.hpp"

namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET {

struct ClearParams {
  uint32_t* data;
  int64_t rows, words, stride;  // in words of 4 bytes
};

__global__ void __launch_bounds__(kPassThreads) sparse_mla_bwd_clear_rows(const __grid_constant__ ClearParams p) {
  for (int64_t row = arch::block_index(); row < p.rows; row += arch::grid_size())
    for (int64_t word = arch::thread_index(); word < p.words; word += kPassThreads) p.data[row * p.stride + word] = 0;
}

inline void clear(const ClearParams& p, const runtime::Device& device, Stream stream) {
  if (p.rows == 0 || p.words == 0) return;
  runtime::launch(kName, sparse_mla_bwd_clear_rows, shape_over_rows(p.rows, device), stream, p);
}

// The rows of dkv_accum to clear; no rows without dkv.
inline ClearParams cleared_dkv_accum(const Problem& problem, const Plan& plan, void* workspace) {
  if (plan.dkv_accum == DkvAccum::none) return {};
  if (plan.dkv_accum == DkvAccum::output)
    return {problem.dkv.as<uint32_t>(), problem.s_kv, problem.d_qk, problem.dkv.stride[0]};
  return {runtime::at_offset<uint32_t>(workspace, plan.workspace.dkv), rows_of_dkv_accum(problem), problem.d_qk,
          problem.d_qk};
}
inline ClearParams cleared_attn(const Problem& problem, const Plan& plan) {
  if (!problem.attn || plan.distribution) return {};
  return {problem.attn.as<uint32_t>(), problem.s_q, problem.topk, problem.attn.stride[0]};
}

// Clears attn and dkv_accum, except for what order_rows clears: attn, and dkv_accum if there are enough queries.
inline void clear_accumulators(const Problem& problem, const Plan& plan, void* workspace, Stream stream) {
  if (plan.throttles)
    clear({runtime::at_offset<uint32_t>(workspace, plan.workspace.progress), 1, 2, 2}, problem.device, stream);
  if (!plan.orders_rows) clear(cleared_attn(problem, plan), problem.device, stream);
  if (!plan.order_clears_dkv_accum) clear(cleared_dkv_accum(problem, plan, workspace), problem.device, stream);
}

}  // namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET
