#include "ops/kv_compress/plan.hpp"

#include <algorithm>

#include "tile/ceil_div.hpp"

namespace hopwell::ops::kv_compress {

using tile::ceil_div;

Shape shape_of(const Blocks& blocks, std::int64_t d) {
  const std::int64_t entries = blocks.ratio * (blocks.overlap ? 2 : 1), vectors = ceil_div(d, Config::kColumns);
  Shape shape;
  while (shape.groups < Config::kMaxGroups && shape.groups * Config::kEntries < entries) shape.groups *= 2;
  while (shape.vectors() < vectors && shape.vectors() * shape.groups < Config::kThreads) ++shape.vector_bits;
  while (shape.rows() * shape.vectors() * shape.groups < Config::kThreads) ++shape.row_bits;
  shape.batches = static_cast<int>(ceil_div(entries, std::int64_t{shape.groups} * Config::kEntries));
  shape.slabs = ceil_div(vectors, shape.vectors());
  return shape;
}

BackwardPlan make_plan(const BackwardProblem& p) {
  constexpr std::int64_t kMostPlaneBytes = std::int64_t{32} << 20;
  BackwardPlan plan;
  plan.shape = shape_of(p.blocks, p.d);
  // If a thread has one batch of entries, its sums of d_position_bias are in shared memory, and a CTA writes one plane
  // [ratio, w] of partial sums. Otherwise each row of a CTA has a plane of its own in the workspace.
  const std::int64_t planes = plan.shape.batches == 1 ? 1 : plan.shape.rows();
  const std::int64_t plane_bytes = static_cast<std::int64_t>(sizeof(float)) * p.blocks.ratio * p.w;
  const std::int64_t steps =
      p.blocks.most == 0 ? 0 : ceil_div(p.blocks.n, plan.shape.rows());  // no whole block: no window
  std::int64_t key_tiles = std::min(steps, ceil_div(std::int64_t{2} * p.device.sms, plan.shape.slabs));
  if (p.d_position_bias)
    key_tiles = std::min(key_tiles, std::max<std::int64_t>(kMostPlaneBytes / (planes * plane_bytes), 1));
  if (steps > 0) {
    plan.key_tile_rows = ceil_div(steps, key_tiles) * plan.shape.rows();
    plan.key_tiles = ceil_div(p.blocks.n, plan.key_tile_rows);
  }
  if (p.d_position_bias) plan.planes = plan.key_tiles * planes;
  plan.workspace_bytes = static_cast<std::size_t>(plan.planes * plane_bytes);
  if (p.d_kv || p.d_gate) plan.clearing_ctas = ceil_div(p.blocks.s, Config::kThreads);
  return plan;
}

}  // namespace hopwell::ops::kv_compress
