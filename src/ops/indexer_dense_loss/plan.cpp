#include "ops/indexer_dense_loss/plan.hpp"

#include <algorithm>

#include "runtime/workspace.hpp"
#include "tile/ceil_div.hpp"

namespace hopwell::ops::indexer_dense_loss {
namespace {

using tile::ceil_div;

View rows_at(void* data, DType dtype, std::int64_t rows, std::int64_t columns) {
  View view;
  view.data = data;
  view.dtype = dtype, view.ndim = 2, view.present = true;
  view.shape = {rows, columns}, view.stride = {columns, 1};
  return view;
}

View from_row(View view, std::int64_t first, std::int64_t rows) {
  view.data = view.as<std::byte>() + first * view.stride[0] * static_cast<std::int64_t>(size_of(view.dtype));
  view.shape[0] = rows;
  return view;
}

attention_distribution::Problem targets_of(const Problem& p, void* workspace, std::int64_t first,
                                           std::int64_t queries) {
  attention_distribution::Problem d;
  d.q = from_row(p.attention_q, first, queries), d.kv = p.attention_kv, d.lse = from_row(p.lse, first, queries);
  d.attn_sink = p.attn_sink;
  d.attn = rows_at(workspace, DType::kFloat32, queries, p.s_kv);
  d.sm_scale = p.sm_scale;
  d.normalize_l1 = p.normalize_l1;
  d.s_q = queries, d.s_kv = d.topk = p.s_kv, d.h_q = p.attention_q.shape[1], d.d_qk = p.attention_q.shape[2];
  d.selection = {.visibility = p.visibility.from(first), .s_q = queries, .s_kv = p.s_kv, .topk = p.s_kv};
  d.device = p.device;
  return d;
}

lightning_indexer_backward::PassProblem gradients_of(const Problem& p, const Plan& plan, void* workspace,
                                                     std::int64_t first) {
  lightning_indexer_backward::PassProblem g;
  static_cast<IndexOperands&>(g) = p;
  static_cast<IndexGradients&>(g) = p;
  g.topk = p.s_kv;
  g.first_query = first, g.pass_queries = plan.queries_at_a_time;
  g.target = rows_at(workspace, DType::kFloat32, g.pass_queries, p.s_kv);
  g.losses = rows_at(runtime::at_offset<double>(workspace, plan.losses), DType::kOther, p.s_q, 1);
  g.target_scale = p.normalize_l1 ? 1 : 1 / static_cast<float>(p.attention_q.shape[1]);
  g.visibility = p.visibility;
  g.device = p.device;
  return g;
}

// Calls run(first query, number of queries, whether it is the last pass) for each pass: at least once, because without
// queries the outputs must be zeros.
template <class Run>
void for_each_pass(const Problem& p, const Plan& plan, const Run& run) {
  const std::int64_t together = std::max<std::int64_t>(plan.queries_at_a_time, 1);
  std::int64_t first = 0;
  do {
    run(first, std::min(together, p.s_q - first), first + together >= p.s_q);
    first += together;
  } while (first < p.s_q);
}

// Adds the plan of a pass. Returns the reason why the backend does not support it; "" if it does.
std::string add_pass(Plan& plan, const char* backend, const Problem& p, std::int64_t first, std::int64_t queries) {
  using runtime::Unsupported;
  auto targets = runtime::plan_on(backend, targets_of(p, nullptr, first, queries));
  if (auto* unsupported = std::get_if<Unsupported>(&targets)) return "attention_distribution: " + unsupported->reason;
  auto gradients = runtime::plan_on(backend, gradients_of(p, plan, nullptr, first));
  if (auto* unsupported = std::get_if<Unsupported>(&gradients))
    return lightning_indexer_backward::kName + (": " + unsupported->reason);
  plan.passes.push_back({std::get<0>(std::move(targets)), std::get<0>(std::move(gradients))});
  return "";
}

}  // namespace

std::int64_t queries_at_a_time(const Problem& p) {
  const bool is_host = p.device.capability == 0;  // the CPU, or the emulator's own profile
  // Size of the targets: on GPUs 128 MiB. On the CPU they should stay in the cache, and the emulator gains nothing from
  // fewer passes.
  const std::int64_t fitting = (is_host ? 1 << 16 : 1 << 25) / std::max<std::int64_t>(p.s_kv, 1);
  // attention_distribution has one query per SM at a time, so the queries of a pass should be a multiple of the SMs. On
  // the CPU the threads share the queries of a pass.
  const std::int64_t round = is_host ? 16 : p.device.sms;
  const std::int64_t most = std::max<std::int64_t>(1, (fitting + round / 2) / round) * round;
  const std::int64_t passes = std::max<std::int64_t>(ceil_div(p.s_q, most), 1);  // of about equal length
  return std::min(p.s_q, ceil_div(ceil_div(p.s_q, passes), round) * round);
}

runtime::PlanOr<Plan> plan_on(const char* backend, const Problem& p) {
  Plan plan;
  plan.queries_at_a_time = queries_at_a_time(p);
  runtime::WorkspaceLayout layout;
  layout.reserve(4 * plan.queries_at_a_time * p.s_kv);
  plan.losses = layout.reserve(8 * p.s_q);
  plan.gradients = layout.bytes;
  std::string reason;
  for_each_pass(p, plan, [&](std::int64_t first, std::int64_t queries, bool last) {
    const bool is_new = first == 0 || (last && queries < plan.queries_at_a_time);
    if (is_new && reason.empty()) reason = add_pass(plan, backend, p, first, queries);
  });
  if (!reason.empty()) return runtime::Unsupported{std::move(reason)};
  plan.workspace_bytes = plan.gradients + plan.passes.front().gradients.workspace_bytes();
  return plan;
}

void launch(const Problem& p, const Plan& plan, void* workspace, Stream stream) {
  for_each_pass(p, plan, [&](std::int64_t first, std::int64_t queries, bool last) {
    const PassPlan& pass = last ? plan.passes.back() : plan.passes.front();
    pass.targets.launch(targets_of(p, workspace, first, queries), nullptr, stream);
    pass.gradients.launch(gradients_of(p, plan, workspace, first),
                          runtime::at_offset<std::byte>(workspace, plan.gradients), stream);
  });
}

}  // namespace hopwell::ops::indexer_dense_loss
