// sparse_mla_backward on Hopper: 128 heads of a query on two CTAs, what is left 64 heads a CTA. passes/call.hpp has what else
// runs for a call, plan.hpp the numbers.
#include "ops/sparse_mla_backward/passes/call.hpp"
#include "ops/sparse_mla_backward/sm90/pair.hpp"
#include "ops/sparse_mla_backward/sm90/single.hpp"

namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET {
namespace {

using runtime::kBackend;

// The pair adds the two halves of a score, the kernel for 64 heads sums it as a whole. What deterministic calls give of dq
// must not depend on how many heads there are, so they do not take the pair.
Plan plan_of(const Problem& problem) {
  return make_plan(problem, {.keys = Config::kKeys,
                             .single_heads = Config::kHeads,
                             .pair_heads = PairConfig::kHeads,
                             .pair_adds_fixed_point = false,
                             .merges_rows = true});
}

void launch(const Problem& problem, Stream stream) {
  const Plan plan = plan_of(problem);
  ops::HOPWELL_TARGET::merge_rows<Problem>(kName, problem.device, plan.groups, merge_params_of(problem, plan), stream);
  run_call(problem, plan, kBackend, stream, [&] {
    launch_groups(problem, plan, stream);
    launch_pairs(problem, plan, stream);
    launch_singles(problem, plan, stream);
  });
}

const runtime::Registration<Problem> backend{
    {.name = kBackend,
     .supports = [](const Problem& problem) { return check_plan(problem, plan_of(problem)); },
     .workspace_bytes = [](const Problem& problem) { return plan_of(problem).workspace.bytes; },
     .launch = launch}};

}  // namespace
}  // namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET
