// sparse_mla_backward on GPUs, postprocess: dq of split tiles.
#pragma once

#include "ops/sparse_mla_backward/passes/pass.hpp"

namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET {

struct DqSplitsParams {
  tile::MergedRows merged;  // selects the queries of the splits
  const float* splits;      // [tiles, splits, heads of a tile, d_qk]
  bf16* dq;                 // [s_q, h_q, d_qk]
  int64_t stride_s, stride_h;
  int first_tile, first_head, head_blocks, heads;  // head_blocks: tiles of a query, with `heads` heads each
  int count, h_q, d_qk;                            // count: splits of a tile
};

// One CTA per tile and head: the sum over splits, in order. `static`, because several files launch main kernels.
static __global__ void __launch_bounds__(kPassThreads)
    sparse_mla_bwd_sum_dq_splits(const __grid_constant__ DqSplitsParams p) {
  const int at = arch::block_index() / p.heads, row = arch::block_index() % p.heads, tile = p.first_tile + at;
  const int head = p.first_head + tile % p.head_blocks * p.heads + row;
  if (head >= p.h_q || !p.merged.wants(tile / p.head_blocks)) return;
  bf16* target = p.dq + tile / p.head_blocks * p.stride_s + head * p.stride_h;
  for (int column = arch::thread_index(); column < p.d_qk; column += kPassThreads) {
    float sum = 0;
    for (int split = 0; split < p.count; ++split)
      sum += p.splits[((int64_t{at} * p.count + split) * p.heads + row) * p.d_qk + column];
    target[column] = arch::to_bf16(sum);
  }
}

inline void postprocess_dq(const Problem& problem, const Plan& plan, void* workspace, const MainPass& pass,
                           Stream stream) {
  if (!problem.dq || pass.split_tiles == 0) return;
  const DqSplitsParams p{params_of({}, problem, plan, workspace, pass).merged,
                         runtime::at_offset<float>(workspace, plan.workspace.dq_splits),
                         problem.dq.as<bf16>(),
                         problem.dq.stride[0],
                         problem.dq.stride[1],
                         pass.whole_tiles,
                         pass.first_head,
                         pass.head_blocks,
                         pass.heads,
                         pass.splits,
                         static_cast<int>(problem.h_q),
                         static_cast<int>(problem.d_qk)};
  runtime::launch(kName, sparse_mla_bwd_sum_dq_splits,
                  shape_of_ctas(std::int64_t{pass.split_tiles} * pass.heads, kPassThreads), stream, p);
}

}  // namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET
