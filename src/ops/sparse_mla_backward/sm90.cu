// sparse_mla_backward on Hopper: two CTAs process 128 heads of a query, one CTA 64 remaining heads. passes/call.hpp
// lists the other kernels of a call, plan.hpp has the numbers.
#include "ops/sparse_mla_backward/passes/call.hpp"
#include "ops/sparse_mla_backward/sm90/pair.hpp"
#include "ops/sparse_mla_backward/sm90/single.hpp"

namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET {

// In sm90/window.cu.
extern template void launch_pairs<WindowParams>(const Problem&, const Plan&, void*, Stream);
extern template void launch_singles<WindowParams>(const Problem&, const Plan&, void*, Stream);

namespace {

// The pair adds two partial sums per score; the kernel for 64 heads computes one sum. dq of deterministic calls must
// not depend on the number of heads, so these calls do not use the pair.
runtime::PlanOr<Plan> plan(const Problem& problem) {
  return plan_on(runtime::kBackend, problem,
                 {.keys = Config::kKeys,
                  .single_heads = Config::kHeads,
                  .pair_heads = PairConfig::kHeads,
                  .deterministic_pairs = false,
                  .merges_rows = true,
                  .single_evicts_keys_first = true,
                  .takes_windows = true});
}

void launch_groups(const Problem& problem, const Plan& plan, void* workspace, Stream stream) {
  runtime::with_constant<576, 512>(problem.d_qk, [&]<int kDqk>() {
    launch_main<sparse_mla_bwd_sm90_single<kDqk, 4, false, false, true, Params>>(
        problem, plan, workspace, plan.grouped, Params{}, Config::kThreads, sizeof(SharedStorage<kDqk>), stream,
        HeadMaps{});
  });
}

void launch(const Problem& problem, const Plan& plan, void* workspace, Stream stream) {
  ops::HOPWELL_TARGET::merge_rows<Problem>(kName, problem.device, plan.groups,
                                           merge_params_of(problem, plan, workspace), stream);
  run_call(problem, plan, workspace, stream, [&] {
    if (problem.window) {
      launch_pairs<WindowParams>(problem, plan, workspace, stream);
      launch_singles<WindowParams>(problem, plan, workspace, stream);
    } else {
      launch_groups(problem, plan, workspace, stream);
      launch_pairs<Params>(problem, plan, workspace, stream);
      launch_singles<Params>(problem, plan, workspace, stream);
    }
  });
}

const runtime::Registration backend{runtime::kBackend, plan, launch};

}  // namespace
}  // namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET
