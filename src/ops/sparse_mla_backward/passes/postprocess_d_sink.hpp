// sparse_mla_backward on GPUs, postprocess: d_sink, the sum over queries in a fixed order.
#pragma once

#include "ops/sparse_mla_backward/passes/pass.hpp"

namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET {

struct SinkParams {
  const float* parts;  // [s_q, h_q]
  float* d_sink;       // [h_q]
  int64_t s_q, stride;
  int h_q;
};
constexpr int kSinkWarps = 32;

// One CTA per 32 heads, one head per lane: every warp sums its queries, then warp 0 sums the warps.
__global__ void __launch_bounds__(32 * kSinkWarps) sparse_mla_bwd_sum_d_sink(const __grid_constant__ SinkParams p) {
  auto& warp_sums = arch::dynamic_smem<float[kSinkWarps][32]>();
  const int lane = arch::lane_index(), warp = arch::warp_index(), head = 32 * arch::block_index() + lane;
  float sum = 0;
  for (int64_t query = warp; query < p.s_q && head < p.h_q; query += kSinkWarps) sum += p.parts[query * p.h_q + head];
  warp_sums[warp][lane] = sum;
  arch::syncthreads();
  if (warp != 0 || head >= p.h_q) return;
  for (int other = 1; other < kSinkWarps; ++other) sum += warp_sums[other][lane];
  p.d_sink[head * p.stride] = sum;
}

inline void postprocess_d_sink(const Problem& problem, const Plan& plan, void* workspace, Stream stream) {
  if (!problem.d_sink) return;
  const SinkParams p{runtime::at_offset<float>(workspace, plan.workspace.sink_parts), problem.d_sink.as<float>(),
                     problem.s_q, problem.d_sink.stride[0], static_cast<int>(problem.h_q)};
  runtime::launch(kName, sparse_mla_bwd_sum_d_sink,
                  shape_of_ctas((problem.h_q + 31) / 32, 32 * kSinkWarps, sizeof(float[kSinkWarps][32])), stream, p);
}

}  // namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET
