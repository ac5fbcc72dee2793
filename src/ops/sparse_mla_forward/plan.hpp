// sparse_mla_forward for Hopper: chooses the kernel and the work tiles of its CTAs.
#pragma once

#include <cstdint>

#include "ops/common/query_groups.hpp"
#include "ops/sparse_mla_forward/op.hpp"
#include "ops/sparse_mla_forward/trim_plan.hpp"

namespace hopwell::ops::sparse_mla_forward {

// CTA b processes work tiles b, b + ctas, b + 2 ctas, … A work tile is a query and a tile of its heads. The work tiles
// of one query are adjacent, so that they share its keys in L2. With query groups, CTAs skip the work tiles of the
// other kernel.
struct Plan {
  int tile_heads;       // 16 or 32: all heads of a query, kernel for few heads; 64: kernel for many
  int head_tiles;       // head tiles per query
  int queries_at_once;  // per CTA: 2 in the kernel for few heads if s_q > SMs, otherwise 1. With s_q <= SMs no CTA has
                        // a second query
  std::uint32_t work_tiles, ctas;
  QueryGroups groups;  // processed by the kernel for many heads; this plan has the ungrouped queries
  MergedRowsPlace merged_rows;
  TrimmedRows trimmed;
  std::size_t workspace_bytes;
};
Plan plan_of(const Problem& problem);
// The plan of the groups, each processed as one query.
Plan plan_of_groups(const Problem& problem, const Plan& plan);

}  // namespace hopwell::ops::sparse_mla_forward
