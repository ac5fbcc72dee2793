// sparse_mla_forward for Hopper: supported problems, and the kernels' launch.
#include "ops/sparse_mla_forward/sm90/kernel.hpp"
#include "ops/sparse_mla_forward/trim_rows.hpp"

namespace hopwell::ops::sparse_mla_forward::HOPWELL_TARGET {
namespace {

runtime::PlanOr<Plan> plan(const Problem& p) {
  using runtime::Unsupported;
  if (p.q.dtype != DType::kBFloat16) return Unsupported{"needs bfloat16 q and kv"};
  if (p.d_qk != 576 && p.d_qk != 512) return Unsupported{"needs d_qk 576 or 512"};
  if (p.d_v != 512) return Unsupported{"needs d_v 512"};
  const std::int64_t keys = p.s_kv + p.window.s_w, keys_of_query = p.topk + p.window.most_keys();
  if (!runtime::fit_in_ints({p.s_q, keys, keys_of_query, p.h_q, p.s_q * ((p.h_q + 63) / 64)}))
    return Unsupported{"needs s_q, s_kv, topk (both with the window's), h_q and s_q · h_q / 64 below 2^31 - 1024"};
  return plan_of(p);
}

// Merge parameters. A group pays if a step of the kernel for many heads times the length of the union is less than a
// step of the kernel for few heads times the number of all entries.
tile::MergeParams merge_params_of(const Problem& problem, const Plan& plan, void* workspace) {
  const float worth_it = plan.launches.front().tile_heads == 16 ? 0.6F : 0.8F;  // time of 16 or 32 heads relative to 64
  return merge_params(problem, workspace, plan.groups, plan.merged_rows, worth_it);
}

// Adapts the parameters of the kernel for groups (`of_groups`), or of the kernel for ungrouped queries.
void take_groups(GroupedParams& p, const Problem& problem, const Plan& plan, void* workspace, bool of_groups) {
  const tile::MergeParams rows = merge_params_of(problem, plan, workspace);
  p.merged = {rows.lengths, of_groups ? 1 : plan.groups.members, static_cast<int>(plan.groups.count), of_groups};
  if (!of_groups) return;
  p.selection = tile::merged_rows_of(rows), p.member_masks = rows.member_masks;
  p.members = plan.groups.members, p.heads_of_member = p.h_q;
  p.member_fraction = static_cast<uint32_t>((65536 + p.h_q - 1) / p.h_q);
  for (auto [stride_s, stride_h] : {std::pair{&p.q_stride_s, &p.q_stride_h},
                                    {&p.out_stride_s, &p.out_stride_h},
                                    {&p.max_stride_s, &p.max_stride_h},
                                    {&p.lse_stride_s, &p.lse_stride_h}})
    take_as_one(plan.groups, p.h_q, *stride_s, *stride_h);
  p.h_q *= p.members;
}

Params params_without_window(const Problem& problem, const tile::SelectionParams& selection) {
  Params p = params_of(problem, selection);
  p.aligned = p.aligned && tile::can_gather(p.kv, problem.s_kv, p.kv_stride_s);
  return p;
}

// Launches the kernel for groups that pay, then the kernel for the ungrouped queries.
void launch_in_groups(const Problem& problem, const Plan& plan, const tile::SelectionParams& selection, void* workspace,
                      Stream stream) {
  ops::HOPWELL_TARGET::merge_rows<Problem>(kName, problem.device, plan.groups,
                                           merge_params_of(problem, plan, workspace), stream);
  const Params params = params_without_window(problem, selection);
  GroupedParams groups{params}, others{params};
  take_groups(groups, problem, plan, workspace, true);
  take_groups(others, problem, plan, workspace, false);
  runtime::with_constant<576, 512>(problem.d_qk, [&]<int kDqk>() {
    launch_kernel<many_heads::SharedStorage<kDqk, GroupedParams>>(problem, plan_of_groups(problem, plan), groups,
                                                                  stream);
    launch_for_few_heads<kDqk>(problem, plan.launches.front(), others, stream);
  });
}

// Launches one kernel. `problem`: restricted to the heads of the launch.
void launch_heads(const Problem& problem, const LaunchPlan& plan, const tile::SelectionParams& selection,
                  Stream stream) {
  if (launch_with_boxes(problem, plan, selection, stream)) return;
  if (problem.window) return launch_with_window(problem, plan, selection, stream);
  const Params p = params_without_window(problem, selection);
  runtime::with_constant<576, 512>(problem.d_qk, [&]<int kDqk>() { launch_for_heads<kDqk>(problem, plan, p, stream); });
}

void launch(const Problem& problem, const Plan& plan, void* workspace, Stream stream) {
  if (problem.s_q == 0) return;
  trim_rows(problem, plan.trimmed, workspace, stream);
  const auto selection = selection_of(problem, plan.trimmed, workspace);
  if (plan.groups.count > 0) return launch_in_groups(problem, plan, selection, workspace, stream);
  for (const LaunchPlan& of_heads : plan.launches)
    launch_heads(heads_of_launch(problem, of_heads), of_heads, selection, stream);
}

const runtime::Registration backend{runtime::kBackend, plan, launch};

}  // namespace
}  // namespace hopwell::ops::sparse_mla_forward::HOPWELL_TARGET
