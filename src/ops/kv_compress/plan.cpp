#include "ops/kv_compress/plan.hpp"

#include <algorithm>

#include "tile/ceil_div.hpp"

namespace hopwell::ops::kv_compress {

using tile::ceil_div;

Shape shape_of(const Blocks& blocks, std::int64_t d, int most_vectors) {
  const std::int64_t entries = blocks.ratio * (blocks.overlap ? 2 : 1), vectors = ceil_div(d, Config::kColumns);
  Shape shape;
  while (shape.groups < Config::kMaxGroups && shape.groups * Config::kEntries < entries) shape.groups *= 2;
  while (shape.vectors() < std::min<std::int64_t>(vectors, most_vectors) &&
         shape.vectors() * shape.groups < Config::kThreads)
    ++shape.vector_bits;
  while (shape.rows() * shape.vectors() * shape.groups < Config::kThreads) ++shape.row_bits;
  shape.batches = static_cast<int>(ceil_div(entries, std::int64_t{shape.groups} * Config::kEntries));
  shape.slabs = ceil_div(vectors, shape.vectors());
  return shape;
}

namespace {

// About kCtasOfSm CTAs for each multiprocessor, but at most `most` key tiles.
KeyTiles divide(std::int64_t n, const Shape& shape, const runtime::Device& device, std::int64_t most) {
  const std::int64_t steps = ceil_div(n, shape.rows());
  if (steps == 0) return {};
  const std::int64_t ctas = std::int64_t{Config::kCtasOfSm} * device.sms;
  const std::int64_t tiles = std::min({steps, ceil_div(ctas, shape.slabs), most});
  KeyTiles key_tiles;
  key_tiles.rows = ceil_div(steps, tiles) * shape.rows();
  key_tiles.count = ceil_div(n, key_tiles.rows);
  return key_tiles;
}

}  // namespace

ForwardPlan make_plan(const Problem& p) {
  ForwardPlan plan;
  plan.shape = shape_of(p.blocks, p.d);
  plan.key_tiles = divide(p.blocks.n, plan.shape, p.device, p.blocks.n);
  return plan;
}

BackwardPlan make_plan(const BackwardProblem& p) {
  constexpr std::int64_t kMostPlaneBytes = std::int64_t{32} << 20;
  BackwardPlan plan;
  // A CTA's partial sums of d_position_bias have the width of its slab. So a narrow slab with many rows writes fewer.
  constexpr int kMostVectors = 32;
  plan.shape = shape_of(p.blocks, p.d, kMostVectors);
  // If a thread has one batch of entries, its sums of d_position_bias are in shared memory, and a CTA writes one plane
  // [ratio, w] of partial sums. Otherwise each row of a CTA has a plane of its own in the workspace.
  const std::int64_t planes = plan.shape.batches == 1 ? 1 : plan.shape.rows();
  const std::int64_t plane_bytes = static_cast<std::int64_t>(sizeof(float)) * p.blocks.ratio * p.w;
  std::int64_t most = p.blocks.n;
  if (p.d_position_bias) most = std::min(most, std::max<std::int64_t>(kMostPlaneBytes / (planes * plane_bytes), 1));
  if (p.blocks.most > 0) plan.key_tiles = divide(p.blocks.n, plan.shape, p.device, most);  // else there is no window
  if (p.d_position_bias) plan.planes = plan.key_tiles.count * planes;
  plan.workspace_bytes = static_cast<std::size_t>(plan.planes * plane_bytes);
  if (p.d_kv || p.d_gate) plan.clearing_ctas = ceil_div(p.blocks.s, Config::kThreads);
  return plan;
}

}  // namespace hopwell::ops::kv_compress
