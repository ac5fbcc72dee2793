#include "ops/sparse_mla_forward/plan.hpp"

#include <algorithm>
#include <cstddef>

#include "tile/ceil_div.hpp"
#include "tile/gpu/views.hpp"

namespace hopwell::ops::sparse_mla_forward {
namespace {

constexpr int kManyHeads = 64;

LaunchPlan plan_launch(const Problem& problem, std::int64_t first_head, std::int64_t heads) {
  const int tile_heads = heads <= 16 ? 16 : heads <= 32 ? 32 : kManyHeads;
  const auto head_tiles = tile::ceil_div(heads, tile_heads), work_tiles = problem.s_q * head_tiles;
  return {.first_head = first_head,
          .heads = heads,
          .tile_heads = tile_heads,
          .head_tiles = static_cast<int>(head_tiles),
          .queries_at_once = tile_heads < kManyHeads && problem.s_q > problem.device.sms ? 2 : 1,
          .work_tiles = static_cast<std::uint32_t>(work_tiles),
          .ctas = static_cast<std::uint32_t>(std::min<std::int64_t>(work_tiles, problem.device.sms))};
}

// True if the heads after the last whole tile of 64 have a launch of their own, by the kernel for few heads.
//
//     heads    time of a query / time of a work tile of 64 heads    measured on
//     1–16     0.80                                                 H200, s_q 200 to 4,096, topk 2,048, d_qk 576, 8 K
//     17–32    0.92                                                 the same
//
// A launch takes whole waves of CTAs. With more queries than SMs, a CTA of the kernel for few heads takes two queries
// at once, and an odd last query, which runs alone, counts as two. With fewer, two launches are never predicted to pay.
// Selected keys must fit in L2: in one launch the work tiles of a query meet there, and a second launch reads the keys
// from memory again. Without indices, all CTAs read the same keys in turn. Rows must be 16-byte aligned: the kernel for
// few heads computes the addresses of other rows for each panel group again. The emulator's own profile (capability 0)
// always has the second launch.
bool divides_heads(const Problem& p) {
  const std::int64_t tiles = p.h_q / kManyHeads, rest = p.h_q % kManyHeads;
  if (tiles == 0 || rest == 0 || rest > 32) return false;
  if (p.device.capability == 0) return true;
  if (!tile::rows_aligned(p.q, 2) || !tile::rows_aligned(p.kv, 1) || !tile::rows_aligned(p.window_kv, 1)) return false;
  if (p.selection.indices != nullptr && static_cast<std::size_t>(p.s_kv * p.d_qk * 2) > p.device.l2_bytes) return false;
  const auto waves = [&p](std::int64_t work_tiles) {
    return static_cast<double>(tile::ceil_div(work_tiles, p.device.sms));
  };
  const double pair_of_queries = 2 * (rest <= 16 ? 0.80 : 0.92);
  return waves(p.s_q * tiles) + pair_of_queries * waves(tile::ceil_div(p.s_q, 2)) < waves(p.s_q * (tiles + 1));
}

std::vector<LaunchPlan> plan_launches(const Problem& problem) {
  if (!divides_heads(problem)) return {plan_launch(problem, 0, problem.h_q)};
  const std::int64_t rest = problem.h_q % kManyHeads, whole = problem.h_q - rest;
  return {plan_launch(problem, 0, whole), plan_launch(problem, whole, rest)};
}

}  // namespace

Plan plan_of(const Problem& problem) {
  Plan plan{.launches = plan_launches(problem),
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

LaunchPlan plan_of_groups(const Problem& problem, const Plan& plan) {
  LaunchPlan of_groups = plan.launches.front();
  of_groups.tile_heads = kManyHeads, of_groups.head_tiles = of_groups.queries_at_once = 1;
  of_groups.work_tiles = static_cast<std::uint32_t>(plan.groups.count);
  of_groups.ctas = static_cast<std::uint32_t>(std::min<std::int64_t>(plan.groups.count, problem.device.sms));
  return of_groups;
}

Problem heads_of_launch(const Problem& problem, const LaunchPlan& plan) {
  Problem p = problem;
  const auto restrict_heads = [&plan](View& view, std::size_t dim) {
    if (!view) return;
    const std::int64_t bytes = view.stride[dim] * static_cast<std::int64_t>(size_of(view.dtype));
    view.data = view.as<std::byte>() + plan.first_head * bytes;
    view.shape[dim] = plan.heads;
  };
  for (View* view : {&p.q, &p.out, &p.max_logits, &p.lse}) restrict_heads(*view, 1);
  restrict_heads(p.attn_sink, 0);
  p.h_q = plan.heads;
  return p;
}

}  // namespace hopwell::ops::sparse_mla_forward
