#include "ops/indexer_dense_loss/plan.hpp"

#include <algorithm>

#include "ops/attention_distribution/op.hpp"
#include "ops/lightning_indexer_backward/op.hpp"

namespace hopwell::ops::indexer_dense_loss {
namespace {

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Offsets in bytes.
struct Workspace {
  std::size_t targets = 0;    // fp32 [queries at a time, s_kv]
  std::size_t losses = 0;     // fp64 [s_q]
  std::size_t gradients = 0;  // workspace of lightning_indexer_backward
};
Workspace workspace_of(const Problem& p) {
  const auto aligned = [](std::int64_t bytes) { return (static_cast<std::size_t>(bytes) + 255) / 256 * 256; };
  Workspace w;
  w.losses = aligned(4 * queries_at_a_time(p) * p.s_kv);
  w.gradients = w.losses + aligned(8 * p.s_q);
  return w;
}

// Null if there is no workspace yet: when its size is queried before a call.
void* in_workspace(const Problem& p, std::size_t offset) {
  return p.workspace == nullptr ? nullptr : static_cast<std::byte*>(p.workspace) + offset;
}
View rows_in_workspace(const Problem& p, std::size_t offset, DType dtype, std::int64_t rows, std::int64_t columns) {
  View view;
  view.data = in_workspace(p, offset);
  view.dtype = dtype, view.ndim = 2, view.present = true;
  view.shape = {rows, columns}, view.stride = {columns, 1};
  return view;
}

View from_row(View view, std::int64_t first, std::int64_t rows) {
  view.data = view.as<std::byte>() + first * view.stride[0] * static_cast<std::int64_t>(size_of(view.dtype));
  view.shape[0] = rows;
  return view;
}

attention_distribution::Problem targets_of(const Problem& p, std::int64_t first, std::int64_t queries) {
  attention_distribution::Problem d;
  d.q = from_row(p.attention_q, first, queries), d.kv = p.attention_kv, d.lse = from_row(p.lse, first, queries);
  d.attn = rows_in_workspace(p, workspace_of(p).targets, DType::kFloat32, queries, p.s_kv);
  d.sm_scale = p.sm_scale;
  d.s_q = queries, d.s_kv = d.topk = p.s_kv, d.h_q = p.attention_q.shape[1], d.d_qk = p.attention_q.shape[2];
  d.selection = {.visibility = p.visibility.from(first), .s_q = queries, .s_kv = p.s_kv, .topk = p.s_kv};
  d.device = p.device;
  return d;
}

lightning_indexer_backward::Problem gradients_of(const Problem& p, std::int64_t first) {
  const Workspace workspace = workspace_of(p);
  lightning_indexer_backward::Problem g;
  static_cast<IndexOperands&>(g) = p;
  static_cast<IndexGradients&>(g) = p;
  g.topk = p.s_kv;
  g.first_query = first, g.pass_queries = queries_at_a_time(p);
  g.target = rows_in_workspace(p, workspace.targets, DType::kFloat32, g.pass_queries, p.s_kv);
  g.losses = rows_in_workspace(p, workspace.losses, DType::kOther, p.s_q, 1);
  g.target_scale = 1 / static_cast<float>(p.attention_q.shape[1]);
  g.visibility = p.visibility;
  g.device = p.device;
  g.workspace = in_workspace(p, workspace.gradients);
  g.workspace_bytes = p.workspace_bytes - std::min(p.workspace_bytes, workspace.gradients);
  return g;
}

}  // namespace

std::int64_t queries_at_a_time(const Problem& p) {
  // Size of the targets: on GPUs 128 MiB. On the CPU they should stay in the cache, and the emulator gains nothing from
  // fewer passes.
  const std::int64_t fitting = (p.device.emulated() ? 1 << 16 : 1 << 25) / std::max<std::int64_t>(p.s_kv, 1);
  // Kernels have one CTA per query, so a pass should be whole waves. The threads of a CPU split a pass too.
  const std::int64_t round = p.device.emulated() ? 16 : p.device.sms;
  const std::int64_t most = std::max<std::int64_t>(1, (fitting + round / 2) / round) * round;
  const std::int64_t passes = std::max<std::int64_t>(ceil_div(p.s_q, most), 1);  // of about equal length
  return std::min(p.s_q, ceil_div(ceil_div(p.s_q, passes), round) * round);
}

runtime::Support supports_on(const char* backend, const Problem& p) {
  const auto supported = [&](const char* op, const runtime::Support& support) {
    return support.ok ? support : runtime::Support::no(op + (": " + support.reason));
  };
  const runtime::Support targets =
      supported("attention_distribution", runtime::support_on(backend, targets_of(p, 0, p.s_q)));
  if (!targets.ok) return targets;
  return supported(lightning_indexer_backward::kName, runtime::support_on(backend, gradients_of(p, 0)));
}

std::size_t workspace_bytes_on(const char* backend, const Problem& p) {
  return workspace_of(p).gradients +
         runtime::workspace_bytes(lightning_indexer_backward::kName, gradients_of(p, 0), backend);
}

void launch_on(const char* backend, const Problem& p, Stream stream) {
  const std::int64_t together = std::max<std::int64_t>(queries_at_a_time(p), 1);
  std::int64_t first = 0;
  do {  // at least once: sums over no queries are zeros
    const std::int64_t queries = std::min(together, p.s_q - first);
    runtime::run("attention_distribution", targets_of(p, first, queries), backend, stream);
    runtime::run(lightning_indexer_backward::kName, gradients_of(p, first), backend, stream);
    first += together;
  } while (first < p.s_q);
}

}  // namespace hopwell::ops::indexer_dense_loss
