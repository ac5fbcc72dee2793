#include "ops/kv_compress/plan.hpp"

#include <algorithm>

namespace hopwell::ops::kv_compress {
namespace {

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

}  // namespace

Shape shape_of(const Blocks& blocks, std::int64_t d) {
  const std::int64_t entries = blocks.ratio * (blocks.overlap ? 2 : 1);
  const std::int64_t vectors = ceil_div(d, Config::kColumns);
  Shape shape;
  while (shape.groups < Config::kMaxGroups && shape.groups * Config::kEntries < entries) shape.groups *= 2;
  while (shape.vectors < vectors && shape.vectors * shape.groups < Config::kThreads) shape.vectors *= 2;
  shape.rows = Config::kThreads / (shape.vectors * shape.groups);
  shape.batches = static_cast<int>(ceil_div(entries, std::int64_t{shape.groups} * Config::kEntries));
  shape.slabs = ceil_div(vectors, shape.vectors);
  return shape;
}

BackwardPlan make_plan(const BackwardProblem& p) {
  constexpr std::int64_t kMostPlaneBytes = std::int64_t{32} << 20;
  BackwardPlan plan;
  plan.shape = shape_of(p.blocks, p.d);
  const std::int64_t steps = ceil_div(p.blocks.n, plan.shape.rows);
  plan.strips = steps;
  if (p.d_position_bias) {
    // Threads of other rows have sums of their own where a thread's sums do not fit into shared memory.
    const std::int64_t planes = plan.shape.batches == 1 ? 1 : plan.shape.rows;
    const std::int64_t plane_bytes = static_cast<std::int64_t>(sizeof(float)) * p.blocks.ratio * p.w;
    const std::int64_t fill = ceil_div(std::int64_t{2} * p.device.sms, plan.shape.slabs);
    const std::int64_t most = std::max<std::int64_t>(kMostPlaneBytes / (planes * plane_bytes), 1);
    plan.strips = std::min({steps, fill, most});
    plan.planes = plan.strips * planes;
    plan.workspace_bytes = static_cast<std::size_t>(plan.planes * plane_bytes);
  }
  plan.strip_rows = plan.strips == 0 ? 0 : ceil_div(steps, plan.strips) * plan.shape.rows;
  if (plan.strips > 0) plan.strips = ceil_div(p.blocks.n, plan.strip_rows);
  if (p.d_position_bias && plan.strips > 0) plan.planes = plan.strips * (plan.shape.batches == 1 ? 1 : plan.shape.rows);
  if (p.d_kv || p.d_gate) plan.clearing_ctas = ceil_div(p.blocks.s, Config::kThreads);
  return plan;
}

}  // namespace hopwell::ops::kv_compress
