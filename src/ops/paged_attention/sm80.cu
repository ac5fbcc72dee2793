// paged_attention for any NVIDIA GPU from Ampere on. One kernel splits all keys equally between warps and merges their
// partial results (split_kernel.hpp). gpu/schedule.hpp describes the division of the work, tiles/families.hpp the
// division of a tile between the lanes of a warp.
#include "ops/paged_attention/tiles/families.hpp"
#include "runtime/launch.hpp"
#include "runtime/launch_tag.hpp"

namespace hopwell::ops::paged_attention::HOPWELL_TARGET {
namespace {

runtime::PlanOr<SplitPlan> plan(const Problem& problem) {
  if (const char* reason = unsupported(problem)) return runtime::Unsupported{reason};
  const TileKernel<Params> kernel = kernel_of<Params>(problem);
  const Params params = plan_split(problem, kernel.shared);
  return SplitPlan{kernel, params, split_workspace_bytes(params)};
}

void launch(const Problem& problem, const SplitPlan& plan, void* workspace, Stream stream) {
  if (problem.b == 0) return;
  Params p = plan.params;
  p.schedule.partials = static_cast<arch::Words4*>(workspace);
  const runtime::LaunchTag tag = runtime::new_launch_tag();
  p.schedule.tag[0] = tag.words[0], p.schedule.tag[1] = tag.words[1];
  runtime::launch("paged_attention", plan.kernel.kernel,
                  {.grid = {static_cast<std::uint32_t>(p.schedule.ctas.value)},
                   .threads = static_cast<std::uint32_t>(p.schedule.threads),
                   .shared_bytes = plan.kernel.shared.with(p.schedule.warps),
                   .programmatic_dependency = problem.device.has_dependent_launches(),
                   .cooperative = true},
                  stream, p);
}

const runtime::Registration backend{runtime::kBackend, plan, launch};

}  // namespace
}  // namespace hopwell::ops::paged_attention::HOPWELL_TARGET
