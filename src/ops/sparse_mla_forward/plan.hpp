// sparse_mla_forward for Hopper: chooses the kernels, their heads, and the work tiles of their CTAs.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/common/query_groups.hpp"
#include "ops/sparse_mla_forward/op.hpp"
#include "ops/sparse_mla_forward/trim_plan.hpp"

namespace hopwell::ops::sparse_mla_forward {

// The launch of one kernel for heads first_head … first_head + heads − 1 of every query. CTA b processes work tiles b,
// b + ctas, b + 2 ctas, … A work tile is a query and a tile of its heads. The work tiles of one query are adjacent, so
// that they share its keys in L2. With query groups, CTAs skip the work tiles of the other kernel.
struct LaunchPlan {
  std::int64_t first_head, heads;
  int tile_heads;       // 16 or 32: all of these heads, kernel for few heads; 64: kernel for many
  int head_tiles;       // head tiles per query
  int queries_at_once;  // per CTA: 2 in the kernel for few heads if s_q > SMs, otherwise 1. With s_q <= SMs no CTA has
                        // a second query
  std::uint32_t work_tiles, ctas;
};

struct Plan {
  std::vector<LaunchPlan> launches;  // together they have all heads
  QueryGroups groups;                // processed by the kernel for many heads; the launch has the ungrouped queries
  MergedRowsPlace merged_rows;
  TrimmedRows trimmed;
  std::size_t workspace_bytes;
};
Plan plan_of(const Problem& problem);
// The launch for the groups, each processed as one query.
LaunchPlan plan_of_groups(const Problem& problem, const Plan& plan);
// Restricts the problem to the heads of one launch.
Problem heads_of_launch(const Problem& problem, const LaunchPlan& plan);

}  // namespace hopwell::ops::sparse_mla_forward
