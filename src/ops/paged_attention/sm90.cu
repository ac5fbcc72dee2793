// paged_attention for Hopper and few row blocks. One kernel gives each row block a cluster (cluster_kernel.hpp).
// sm80.cu splits any work equally and is faster for other problems: many row blocks, several long sequences of
// different lengths, and long sequences with too few heads to fill the GPU.
#include "ops/paged_attention/sm90/clusters_that_fit.hpp"
#include "ops/paged_attention/tiles/families.hpp"
#include "runtime/launch.hpp"

namespace hopwell::ops::paged_attention::HOPWELL_TARGET {
namespace {

runtime::PlanOr<ClusterCall> plan(const Problem& problem) {
  auto planned = plan_clusters_if_faster(problem, clusters_that_fit);
  if (auto* unsupported = std::get_if<runtime::Unsupported>(&planned)) return std::move(*unsupported);
  ClusterCall call{.clusters = std::get<ClusterPlan>(planned)};
  if (problem.b == 0) return call;
  call.kernel = kernel_of<ClusterParams>(problem);
  call.params = cluster_params(problem, call.clusters, call.kernel.shared, call.kernel.keys_of_lookup);
  return call;
}

void launch(const Problem& problem, const ClusterCall& plan, void* /*workspace*/, Stream stream) {
  if (problem.b == 0) return;
  runtime::launch("paged_attention", plan.kernel.kernel,
                  {.grid = {static_cast<std::uint32_t>(plan.clusters.ctas())},
                   .threads = static_cast<std::uint32_t>(plan.params.schedule.threads),
                   .cluster = static_cast<std::uint32_t>(plan.clusters.size),
                   .shared_bytes = plan.kernel.shared.with(plan.params.schedule.warps),
                   .programmatic_dependency = problem.device.has_dependent_launches()},
                  stream, plan.params);
}

const runtime::Registration backend{runtime::kBackend, plan, launch};

}  // namespace
}  // namespace hopwell::ops::paged_attention::HOPWELL_TARGET
