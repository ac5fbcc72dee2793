// sparse_mla_backward for any NVIDIA GPU from Ampere on: a CTA processes 32 heads of a query; on Hopper 64.
// passes/call.hpp lists the other kernels of a call, plan.hpp has the numbers.
#include "ops/sparse_mla_backward/passes/call.hpp"
#include "ops/sparse_mla_backward/sm80/launch.hpp"

namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET {

extern template void launch_with<WindowParams>(const Problem&, const Plan&, void*, Stream);  // in sm80/window.cu

namespace {

runtime::PlanOr<Plan> plan(const Problem& problem) {
  const bool large = takes_large_tiles(problem);
  return plan_on(runtime::kBackend, problem,
                 {.keys = large ? LargeTile<576>::kKeys : SmallTile<576>::kKeys,
                  .single_heads = large ? LargeTile<576>::kHeads : SmallTile<576>::kHeads,
                  .takes_windows = true});
}

void launch(const Problem& problem, const Plan& plan, void* workspace, Stream stream) {
  run_call(problem, plan, workspace, stream, [&] {
    problem.window ? launch_with<WindowParams>(problem, plan, workspace, stream)
                   : launch_with<Params>(problem, plan, workspace, stream);
  });
}

const runtime::Registration backend{runtime::kBackend, plan, launch};

}  // namespace
}  // namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET
