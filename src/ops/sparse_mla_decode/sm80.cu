// sparse_mla_decode for any NVIDIA GPU from Ampere on: the forward's kernel over rows of bf16 in one paged cache
// without splits, or a split kernel: of up to 32 heads (sm80/split.hpp), or of 64 (sm80/many_heads.hpp).
#include <cmath>

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

// Heads of a tile. For codes and more than 32 heads it is 32 or 64, whichever takes less time. A CTA has a
// multiprocessor for itself:
//
//     heads of a tile    time of a CTA    measured on
//     32                 3                counted for equal splits, not measured
//     64                 5                the same
int heads_of_tile(const Problem& p, std::int64_t splits) {
  if (p.h_q <= 8) return 8;
  if (p.h_q <= 16 || !p.format) return 16;
  if (p.h_q <= 32) return 32;
  const auto waves = [&](std::int64_t heads) {
    const std::int64_t tiles = splits * tile::ceil_div(p.h_q, heads);  // of a query
    return std::ceil(static_cast<double>(p.b * p.q_len) * static_cast<double>(tiles) / p.device.sms);
  };
  return 5 * waves(64) < 3 * waves(32) ? 64 : 32;
}

HeadsOfTile kernel_for(const Problem& p, std::int64_t splits) {
  const int heads = heads_of_tile(p, splits);
  return {heads, with_rows_of(p, [&]<class Rows>(Rows) {
            if constexpr (Rows::kHasCodes)
              if (heads == 64) return many_heads_kernel<Rows>();
            return split_kernel<Rows>(heads);
          })};
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
