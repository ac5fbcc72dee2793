// sparse_mla_decode for any NVIDIA GPU from Ampere on: the forward's kernel over rows of bf16 in one paged cache
// without splits, or the split kernel (sm80/split.hpp).
#include "ops/sparse_mla_decode/gpu/launch.hpp"
#include "ops/sparse_mla_decode/paged.hpp"
#include "ops/sparse_mla_forward/sm80/attention.hpp"

namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET {
namespace {

struct Plan {
  std::optional<forward::Problem> problem;  // of the forward's kernel; else the plan of splits
  SplitPlan splits;
  std::size_t workspace_bytes = 0;
};

bool forward_supports(const Problem& p) { return tile::rows_aligned(p.q, 3) && p.keys.cache.aligned(16); }

HeadsOfTile kernel_for(const Problem& p) {
  const int heads = p.h_q <= 8 ? 8 : p.h_q <= 16 || !p.format ? 16 : 32;
  return {heads, with_rows_of(p, [&]<class Rows>(Rows) { return split_kernel<Rows>(heads); })};
}

runtime::PlanOr<Plan> plan(const Problem& p) {
  runtime::PlanOr<forward::Problem> f = forward_problem(p);
  if (const auto* problem = std::get_if<forward::Problem>(&f); problem != nullptr && forward_supports(p))
    return Plan{*problem, {}};
  runtime::PlanOr<SplitPlan> splits = plan_splits(p, kernel_for);
  if (const auto* reason = std::get_if<runtime::Unsupported>(&splits)) return *reason;
  const auto& plan = std::get<SplitPlan>(splits);
  return Plan{std::nullopt, plan, plan.workspace_bytes};
}

void launch(const Problem& problem, const Plan& plan, void* workspace, Stream stream) {
  if (problem.b == 0) return;
  if (!plan.problem) return launch_splits(problem, plan.splits, workspace, stream);
  const forward::Problem& f = *plan.problem;
  forward::HOPWELL_TARGET::launch_attention("sparse_mla_decode", f, params_of(problem, f), stream);
}

const runtime::Registration backend{runtime::kBackend, plan, launch};

}  // namespace
}  // namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET
