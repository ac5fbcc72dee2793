// sparse_mla_decode for Hopper: the forward's kernels over rows of bf16 in one paged cache without splits; else kernels
// for tiles of 8, 16 (sm90/few_heads.hpp) or 64 heads (sm90/many_heads.hpp).
#include "ops/sparse_mla_decode/gpu/launch.hpp"
#include "ops/sparse_mla_decode/paged.hpp"
#include "ops/sparse_mla_forward/sm90/kernel.hpp"

namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET {
namespace {

struct ForwardPlan {
  forward::Problem problem;
  forward::Plan plan;
};
struct Plan {
  std::optional<ForwardPlan> forward;  // else the plan of splits
  SplitPlan splits;
  std::size_t workspace_bytes = 0;
};

std::optional<ForwardPlan> plan_forward(const Problem& p) {
  runtime::PlanOr<forward::Problem> f = forward_problem(p);
  const auto* problem = std::get_if<forward::Problem>(&f);
  if (problem == nullptr) return std::nullopt;
  return ForwardPlan{*problem, forward::plan_of(*problem)};
}

HeadsOfTile kernel_for(const Problem& p) {
  const int heads = p.h_q <= 8 ? 8 : p.h_q <= 16 ? 16 : 64;
  return {heads, with_rows_of(p, [&]<class Rows>(Rows) {
            return heads == 64 ? many_heads_kernel<Rows>() : few_heads_kernel<Rows>(heads);
          })};
}

runtime::PlanOr<Plan> plan(const Problem& p) {
  if (std::optional<ForwardPlan> f = plan_forward(p)) return Plan{std::move(f), {}};
  runtime::PlanOr<SplitPlan> splits = plan_splits(p, kernel_for);
  if (const auto* reason = std::get_if<runtime::Unsupported>(&splits)) return *reason;
  const auto& plan = std::get<SplitPlan>(splits);
  return Plan{std::nullopt, plan, plan.workspace_bytes};
}

// Whether all rows of the cache lie within 64 GiB after the first, at offsets of whole 16-byte chunks.
bool has_chunk_offsets(const mla_cache::Blocks& cache, std::int64_t d_qk) {
  const std::int64_t last = (cache.blocks - 1) * (cache.stride / 16) + cache.block * (d_qk / 8);
  return cache.blocks <= 1 || (cache.stride >= 0 && last < 0xffffffff);
}

void launch(const Problem& problem, const Plan& plan, void* workspace, Stream stream) {
  if (problem.b == 0) return;
  if (!plan.forward) return launch_splits(problem, plan.splits, workspace, stream);
  const auto& [f, forward_plan] = *plan.forward;
  for (const forward::LaunchPlan& of_heads : forward_plan.launches) {
    const forward::Problem of_launch = forward::heads_of_launch(f, of_heads);
    PagedParams p = params_of(problem, of_launch);
    p.aligned = p.aligned && has_chunk_offsets(problem.keys.cache, problem.d_qk);
    runtime::with_constant<576, 512>(problem.d_qk, [&]<int kDqk>() {
      forward::HOPWELL_TARGET::launch_for_heads<kDqk>(of_launch, of_heads, p, stream);
    });
  }
}

const runtime::Registration backend{runtime::kBackend, plan, launch};

}  // namespace
}  // namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET
