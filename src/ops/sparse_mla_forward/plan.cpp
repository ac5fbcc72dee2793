#include "ops/sparse_mla_forward/plan.hpp"

#include <algorithm>

#include "tile/ceil_div.hpp"

namespace hopwell::ops::sparse_mla_forward {
namespace {

constexpr int kManyHeads = 64;

}  // namespace

Plan plan_of(const Problem& problem) {
  const int tile_heads = problem.h_q <= 16 ? 16 : problem.h_q <= 32 ? 32 : kManyHeads;
  const auto head_tiles = tile::ceil_div(problem.h_q, tile_heads), work_tiles = problem.s_q * head_tiles;
  Plan plan{.tile_heads = tile_heads,
            .head_tiles = static_cast<int>(head_tiles),
            .queries_at_once = tile_heads < kManyHeads && problem.s_q > problem.device.sms ? 2 : 1,
            .work_tiles = static_cast<std::uint32_t>(work_tiles),
            .ctas = static_cast<std::uint32_t>(std::min<std::int64_t>(work_tiles, problem.device.sms)),
            .groups = query_groups(problem, kManyHeads, {problem.q, problem.out, problem.max_logits, problem.lse}),
            .merged_rows = {},
            .trimmed = {},
            .workspace_bytes = 0};
  runtime::WorkspaceLayout layout;
  plan.merged_rows = place_merged_rows(plan.groups, problem.topk, layout);
  plan.trimmed = place_trimmed_rows(problem, layout);
  plan.workspace_bytes = layout.bytes;
  return plan;
}

Plan plan_of_groups(const Problem& problem, const Plan& plan) {
  Plan of_groups = plan;
  of_groups.tile_heads = kManyHeads, of_groups.head_tiles = of_groups.queries_at_once = 1;
  of_groups.work_tiles = static_cast<std::uint32_t>(plan.groups.count);
  of_groups.ctas = static_cast<std::uint32_t>(std::min<std::int64_t>(plan.groups.count, problem.device.sms));
  return of_groups;
}

}  // namespace hopwell::ops::sparse_mla_forward
