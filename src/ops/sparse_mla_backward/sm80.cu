// sparse_mla_backward for any NVIDIA GPU from Ampere on: a CTA processes 32 heads of a query; on Hopper 64.
// passes/call.hpp lists the other kernels of a call, plan.hpp has the numbers.
#include "ops/sparse_mla_backward/passes/call.hpp"
#include "ops/sparse_mla_backward/sm80/gradients.hpp"

namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET {
namespace {

template <int kDqk>
using SmallTile = Tile<kDqk, 2, 1>;
template <int kDqk>
using LargeTile = Tile<kDqk, 4, 2>;

bool takes_large_tiles(const Problem& problem) {
  const bool has_room = problem.device.capability == 90 || problem.device.capability == 0;  // Hopper, and the emulator
  return problem.h_q > SmallTile<576>::kHeads && has_room;
}

runtime::PlanOr<Plan> plan(const Problem& problem) {
  const bool large = takes_large_tiles(problem);
  return plan_on(runtime::kBackend, problem,
                 {.keys = large ? LargeTile<576>::kKeys : SmallTile<576>::kKeys,
                  .single_heads = large ? LargeTile<576>::kHeads : SmallTile<576>::kHeads,
                  .takes_windows = true});
}

template <int kDqk, class P>
void launch_with_width(const Problem& problem, const Plan& plan, void* workspace, Stream stream) {
  if (takes_large_tiles(problem))
    launch_tile<LargeTile<kDqk>, P>(problem, plan, workspace, stream);
  else
    launch_tile<SmallTile<kDqk>, P>(problem, plan, workspace, stream);
}

template <class P>
void launch_with(const Problem& problem, const Plan& plan, void* workspace, Stream stream) {
  problem.d_qk == 576 ? launch_with_width<576, P>(problem, plan, workspace, stream)
                      : launch_with_width<512, P>(problem, plan, workspace, stream);
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
