// sparse_mla_forward for Hopper: which kernel runs a problem, and what its CTAs work on.
#pragma once

#include <cstdint>

#include "ops/common/query_groups.hpp"
#include "ops/sparse_mla_forward/op.hpp"

namespace hopwell::ops::sparse_mla_forward {

// CTA b takes work tiles b, b + ctas, b + 2 ctas, … A work tile is a query and a tile of its heads; those of one query
// are neighbours, so that they share its keys in L2. Where queries are taken in groups, CTAs pass over those that are not
// their kernel's.
struct Plan {
  int tile_heads;       // 16 or 32: all of a query's, in the kernel for few heads; 64: in the one for many
  int head_tiles;       // of a query
  int queries_at_once;  // that a CTA has. The kernel for few heads: two, if there are more than SMs. One
                        // only where no CTA has another after it, whose Q would find no place
  std::uint32_t work_tiles, ctas;
  QueryGroups groups;  // whose keys are merged, for the kernel for many heads; what is left is this plan's
  MergedRowsPlace merged_rows;
  std::size_t workspace_bytes;
};
Plan plan_of(const Problem& problem);
// The same for the groups, each as one query.
Plan plan_of_groups(const Problem& problem, const Plan& plan);

}  // namespace hopwell::ops::sparse_mla_forward
