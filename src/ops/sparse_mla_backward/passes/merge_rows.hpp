// sparse_mla_backward on GPUs, a pass of backends that take groups of neighbouring queries, before all others: the union
// of the keys of each group.
#pragma once

#include "ops/sparse_mla_backward/passes/pass.hpp"

namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET {

static_assert(kMostMembers <= tile::kMostMembers && kLongestOrderedRow <= tile::kLongestMergedRow);

__global__ void __launch_bounds__(tile::kMergeThreads)
    merge_rows_of_queries(const __grid_constant__ tile::MergeParams p) {
  tile::merge_rows_of_group(p, arch::dynamic_smem<tile::MergeStorage>(), arch::block_index());
}

inline void merge_rows(const Problem& problem, const Plan& plan, Stream stream) {
  if (plan.groups.whole_tiles == 0) return;
  runtime::launch(kName, merge_rows_of_queries,
                  shape_of_ctas(plan.groups.whole_tiles, tile::kMergeThreads, sizeof(tile::MergeStorage)), stream,
                  merge_params_of(problem, plan));
}

}  // namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET
