// The preprocess kernel of kernels that process query groups: computes the union of the keys of each group.
#pragma once

#include <cstddef>

#include "ops/common/query_groups.hpp"
#include "runtime/launch.hpp"
#include "tile/gpu/dependency.hpp"
#include "tile/gpu/merge_rows.hpp"

namespace hopwell::ops {

static_assert(kMostMembers <= tile::kMostMembers && kLongestMergedRow <= tile::kLongestMergedRow);

// Parameters of the kernel. `most`: largest ratio of union length to sum of row lengths for which merging pays.
template <class Problem>
tile::MergeParams merge_params(const Problem& problem, void* workspace, const QueryGroups& groups,
                               const MergedRowsPlace& place, float most) {
  return {tile::params_of(problem.selection),
          groups.members,
          tile::MergeStorage::words_of(groups.members),
          runtime::at_offset<int>(workspace, place.keys),
          runtime::at_offset<uint8_t>(workspace, place.member_masks),
          runtime::at_offset<int>(workspace, place.lengths),
          most};
}

// The rows of q, out and so on of a group have the layout of one query with the heads of all members. Sets the strides
// accordingly.
inline void take_as_one(const QueryGroups& groups, int h_q, int64_t& stride_s, int64_t& stride_h) {
  if (h_q == 1) stride_h = stride_s;
  stride_s *= groups.members;
}

namespace HOPWELL_TARGET {

// A separate kernel per operator, distinguished by the problem's type.
template <class Problem>
__global__ void __launch_bounds__(tile::kMergeThreads, tile::kMergeCtasOfSm)
    merge_rows_of_queries(const __grid_constant__ tile::MergeParams p) {
  tile::launch_dependents();
  tile::wait_for_prior_kernels();
  tile::merge_rows_of_group(p, arch::dynamic_smem<tile::MergeStorage>(), arch::block_index());
}

template <class Problem>
void merge_rows(const char* op, const runtime::Device& device, const QueryGroups& groups, const tile::MergeParams& p,
                Stream stream) {
  if (groups.count == 0) return;
  arch::LaunchShape shape = runtime::shape_of_ctas(groups.count, tile::kMergeThreads, sizeof(tile::MergeStorage));
  shape.programmatic_dependency = device.has_dependent_launches();
  runtime::launch(op, merge_rows_of_queries<Problem>, shape, stream, p);
}

}  // namespace HOPWELL_TARGET
}  // namespace hopwell::ops
