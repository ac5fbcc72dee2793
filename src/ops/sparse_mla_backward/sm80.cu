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

Plan plan_of(const Problem& problem) {
  const bool large = takes_large_tiles(problem);
  return make_plan(problem, {.keys = large ? LargeTile<576>::kKeys : SmallTile<576>::kKeys,
                             .single_heads = large ? LargeTile<576>::kHeads : SmallTile<576>::kHeads});
}

template <int kDqk>
void launch_with_width(const Problem& problem, const Plan& plan, Stream stream) {
  if (takes_large_tiles(problem))
    launch_tile<LargeTile<kDqk>>(problem, plan, stream);
  else
    launch_tile<SmallTile<kDqk>>(problem, plan, stream);
}

void launch(const Problem& problem, Stream stream) {
  const Plan plan = plan_of(problem);
  run_call(problem, plan, runtime::kBackend, stream, [&] {
    problem.d_qk == 576 ? launch_with_width<576>(problem, plan, stream) : launch_with_width<512>(problem, plan, stream);
  });
}

const runtime::Registration<Problem> backend{
    {.name = runtime::kBackend,
     .supports = [](const Problem& problem) { return check_plan(problem, plan_of(problem)); },
     .workspace_bytes = [](const Problem& problem) { return plan_of(problem).workspace.bytes; },
     .launch = launch}};

}  // namespace
}  // namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET
