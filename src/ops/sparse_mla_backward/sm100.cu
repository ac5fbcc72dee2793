// sparse_mla_backward on Blackwell: two CTAs process 128 heads of a query, one CTA 64 remaining heads. passes/call.hpp
// lists the other kernels of a call, plan.hpp has the numbers.
#include "ops/sparse_mla_backward/passes/call.hpp"
#include "ops/sparse_mla_backward/sm100/pair.hpp"
#include "ops/sparse_mla_backward/sm100/single.hpp"

namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET {
namespace {

Plan plan_of(const Problem& problem) {
  return make_plan(problem, {.keys = Config::kKeys,
                             .single_heads = SingleConfig::kHeads,
                             .pair_heads = PairConfig::kHeads,
                             .deterministic_pairs = true});
}

runtime::Support supports(const Problem& problem) {
  if (problem.s_kv > 1 && problem.kv.stride[0] < 1)
    return runtime::Support::no("rows of kv must lie in ascending order");
  return check_plan(problem, plan_of(problem));
}

template <int kDqk>
void launch_with_width(const Problem& problem, const Plan& plan, Stream stream) {
  launch_variant<pair_kernel<kDqk, true, false>, pair_kernel<kDqk, false, true>, pair_kernel<kDqk, false, false>>(
      problem, plan, plan.pairs, sizeof(PairStorage<kDqk>), stream);
  launch_variant<single_kernel<kDqk, true, false>, single_kernel<kDqk, false, true>, single_kernel<kDqk, false, false>>(
      problem, plan, plan.singles, sizeof(SingleStorage<kDqk>), stream);
}

void launch(const Problem& problem, Stream stream) {
  const Plan plan = plan_of(problem);
  run_call(problem, plan, runtime::kBackend, stream, [&] {
    problem.d_qk == 576 ? launch_with_width<576>(problem, plan, stream) : launch_with_width<512>(problem, plan, stream);
  });
}

const runtime::Registration<Problem> backend{
    {.name = runtime::kBackend,
     .supports = supports,
     .workspace_bytes = [](const Problem& problem) { return plan_of(problem).workspace.bytes; },
     .launch = launch}};

}  // namespace
}  // namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET
