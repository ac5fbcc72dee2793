#include "ops/lightning_indexer_backward/plan.hpp"

#include <algorithm>

#include "tile/ceil_div.hpp"

namespace hopwell::ops::lightning_indexer_backward {
namespace {

using tile::ceil_div;

void lay_out(Plan& plan, const PassProblem& p) {
  Workspace& w = plan.workspace;
  runtime::WorkspaceLayout layout;
  w.gradients = layout.reserve(4 * p.pass_queries * p.topk);
  if (!p.losses) w.losses = layout.reserve(8 * p.s_q);
  if (!p.indices) w.ungrouped = layout.reserve(4 * p.pass_queries);
  if (p.deterministic) {
    w.fixed_d_k = layout.reserve(8 * p.s_kv * p.d_index);
    w.largest = layout.reserve(4 * p.s_kv);
    w.count = layout.reserve(4 * p.s_kv);
    w.of_all = layout.reserve(4);
  }
  plan.workspace_bytes = layout.bytes;
}

}  // namespace

Plan plan_of(const PassProblem& p) {
  const std::int64_t most = 8 * std::int64_t{p.device.sms};  // maximum number of CTAs that run at the same time
  const int group_rows = p.indices || p.h_index > 64 ? 0 : p.h_index > 32 ? 64 : p.h_index > 16 ? 32 : 16;
  int group = group_rows == 0 ? 1 : 128 / group_rows;
  while (group > 1 && ceil_div(p.queries(), group) < p.device.sms) group /= 2;  // at least one group per SM
  Plan plan{.pass_ctas = static_cast<std::uint32_t>(std::min(ceil_div(p.s_kv * p.d_index, kPassThreads), most)),
            .head_tiles = static_cast<int>(ceil_div(p.h_index, 64)),
            .column_blocks = static_cast<int>(ceil_div(p.d_index, 32)),
            .group_rows = group_rows,
            .group = group,
            .workspace = {},
            .workspace_bytes = 0};
  lay_out(plan, p);
  return plan;
}

}  // namespace hopwell::ops::lightning_indexer_backward
