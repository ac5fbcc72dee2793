#include "ops/kv_compress/plan.hpp"

#include <algorithm>

#include "tile/ceil_div.hpp"

namespace hopwell::ops::kv_compress {
namespace {

using tile::ceil_div;

constexpr std::int64_t kUnlimited = std::numeric_limits<std::int64_t>::max();

// most_vectors: largest width of a slab, in vectors.
Shape shape_of(const Blocks& blocks, std::int64_t d, bool may_be_exact, std::int64_t most_vectors) {
  const std::int64_t entries = blocks.ratio * (blocks.overlap ? 2 : 1), vectors = ceil_div(d, Config::kColumns);
  Shape shape;
  while (shape.groups < Config::kMaxGroups && shape.groups * Config::kEntries < entries) shape.groups *= 2;
  while (shape.vectors() < std::min(vectors, most_vectors) && shape.vectors() * shape.groups < Config::kThreads)
    ++shape.vector_bits;
  while (shape.keys_at_once() * shape.vectors() * shape.groups < Config::kThreads) ++shape.key_bits;
  shape.batches = static_cast<int>(ceil_div(entries, std::int64_t{shape.groups} * Config::kEntries));
  shape.slabs = ceil_div(vectors, shape.vectors());
  const std::int64_t of_thread = entries / shape.groups;
  const bool known = of_thread == 8 || of_thread == 4 || (of_thread == 2 && !blocks.overlap);
  if (may_be_exact && known && of_thread * shape.groups == entries && (shape.groups == 1 || !blocks.overlap))
    shape.exact_entries = static_cast<int>(of_thread);
  return shape;
}

// At most kCtasOfSm CTAs for each multiprocessor, because a second wave would be nearly empty. most: key tiles.
KeyTiles divide(std::int64_t n, const Shape& shape, const runtime::Device& device, std::int64_t most) {
  const std::int64_t steps = ceil_div(n, shape.keys_at_once());
  if (steps == 0) return {};
  const std::int64_t ctas = std::int64_t{Config::kCtasOfSm} * device.sms;
  const std::int64_t tiles = std::min({steps, std::max<std::int64_t>(ctas / shape.slabs, 1), most});
  KeyTiles key_tiles;
  key_tiles.keys = ceil_div(steps, tiles) * shape.keys_at_once();
  key_tiles.count = ceil_div(n, key_tiles.keys);
  return key_tiles;
}

}  // namespace

ForwardPlan make_plan(const Problem& p, bool may_be_exact) {
  ForwardPlan plan;
  plan.shape = shape_of(p.blocks, p.d, may_be_exact, kUnlimited);
  plan.key_tiles = divide(p.blocks.n, plan.shape, p.device, kUnlimited);
  return plan;
}

BackwardPlan make_plan(const BackwardProblem& p, bool may_be_exact) {
  // Narrow slabs need fewer key tiles for the same number of CTAs, so there are fewer planes.
  //
  //     vectors of a slab    16, 32, 64, 128 (H200, bf16, d 512, ratio 4 with overlap, with d_position_bias)
  //     8 K tokens           1.01, 1, 1.01, 1.04 of the time
  //     64 K tokens          1.10, 1, 1.03, 1.04
  constexpr std::int64_t kMostVectors = 32;
  constexpr std::int64_t kMostPlaneBytes = std::int64_t{32} << 20;
  BackwardPlan plan;
  plan.shape = shape_of(p.blocks, p.d, may_be_exact, kMostVectors);
  // With exact_entries the sums of d_position_bias of a thread are in shared memory, and a CTA writes one plane [ratio,
  // w] of partial sums. Otherwise each key that a CTA processes at a time has a plane of its own.
  const std::int64_t planes = plan.shape.exact_entries > 0 ? 1 : plan.shape.keys_at_once();
  const std::int64_t plane_bytes = static_cast<std::int64_t>(sizeof(float)) * p.blocks.ratio * p.w;
  const std::int64_t most =
      p.d_position_bias ? std::max<std::int64_t>(kMostPlaneBytes / (planes * plane_bytes), 1) : kUnlimited;
  if (p.blocks.most > 0) plan.key_tiles = divide(p.blocks.n, plan.shape, p.device, most);  // else there is no window
  if (p.d_position_bias) plan.planes_of_tile = planes;
  plan.workspace_bytes = static_cast<std::size_t>(plan.key_tiles.count * plan.planes_of_tile * plane_bytes);
  if (p.d_kv || p.d_gate) plan.clearing_columns = ceil_div(p.blocks.s, Config::kThreads * plan.shape.slabs);
  return plan;
}

}  // namespace hopwell::ops::kv_compress
