// sparse_mla_backward on Blackwell: two CTAs process 128 heads of a query, one CTA 64 remaining heads. passes/call.hpp
// lists the other kernels of a call, plan.hpp has the numbers.
#include "ops/sparse_mla_backward/passes/call.hpp"
#include "ops/sparse_mla_backward/sm100/pair.hpp"
#include "ops/sparse_mla_backward/sm100/single.hpp"

namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET {
namespace {

runtime::PlanOr<Plan> plan(const Problem& problem) {
  if (problem.s_kv > 1 && problem.kv.stride[0] < 1) return runtime::Unsupported{"needs a positive row stride of kv"};
  return plan_on(runtime::kBackend, problem,
                 {.keys = Config::kKeys,
                  .single_heads = SingleConfig::kHeads,
                  .pair_heads = PairConfig::kHeads,
                  .deterministic_pairs = true});
}

template <int kDqk>
void launch_with_width(const Problem& problem, const Plan& plan, void* workspace, Stream stream) {
  launch_variant<sparse_mla_bwd_sm100_pair<kDqk, true, false>, sparse_mla_bwd_sm100_pair<kDqk, false, true>,
                 sparse_mla_bwd_sm100_pair<kDqk, false, false>>(problem, plan, workspace, plan.pairs,
                                                                sizeof(PairStorage<kDqk>), stream);
  launch_variant<sparse_mla_bwd_sm100_single<kDqk, true, false>, sparse_mla_bwd_sm100_single<kDqk, false, true>,
                 sparse_mla_bwd_sm100_single<kDqk, false, false>>(problem, plan, workspace, plan.singles,
                                                                  sizeof(SingleStorage<kDqk>), stream);
}

void launch(const Problem& problem, const Plan& plan, void* workspace, Stream stream) {
  run_call(problem, plan, workspace, stream, [&] {
    runtime::with_constant<576, 512>(problem.d_qk,
                                     [&]<int kDqk>() { launch_with_width<kDqk>(problem, plan, workspace, stream); });
  });
}

const runtime::Registration backend{runtime::kBackend, plan, launch};

}  // namespace
}  // namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET
