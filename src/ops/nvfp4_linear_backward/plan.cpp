#include "ops/nvfp4_linear_backward/plan.hpp"

#include <algorithm>

#include "tile/ceil_div.hpp"

namespace hopwell::ops::nvfp4_linear_backward {

using tile::ceil_div;

// Chunks depend on N alone, so a row of d_x has the same bits for any n and whether or not CTAs share a tile. There are
// at most 16 chunks, which bounds the workspace.
Plan make_plan(const Problem& p) {
  Plan plan;
  plan.blocks = p.n <= 16 ? 1 : p.n <= 32 ? 2 : 4;
  plan.row_tiles = static_cast<int>(ceil_div(p.n, std::int64_t{16} * plan.blocks));
  plan.column_tiles = static_cast<int>(ceil_div(p.k, Config::kColumns));
  const std::int64_t most = std::clamp<std::int64_t>(ceil_div(p.rows, Config::kMinChunkRows), 1, Config::kMaxChunks);
  const std::int64_t stages = std::max<std::int64_t>(ceil_div(ceil_div(p.rows, most), Config::kStageRows), 1);
  plan.chunk = static_cast<int>(stages * Config::kStageRows);
  plan.chunks = static_cast<int>(std::max<std::int64_t>(ceil_div(p.rows, plan.chunk), 1));
  const std::int64_t tiles = std::int64_t{plan.row_tiles} * plan.column_tiles;
  plan.splits = plan.chunks > 1 && 2 * tiles <= p.device.sms;
  plan.ctas = plan.splits ? tiles * plan.chunks : tiles;
  plan.workspace_bytes = plan.splits ? sizeof(float) * static_cast<std::size_t>(plan.chunks * p.n * p.k) : 0;
  return plan;
}

}  // namespace hopwell::ops::nvfp4_linear_backward
