// sparse_mla_backward on GPUs: the launch of a main kernel.
#pragma once

#include "ops/sparse_mla_backward/passes/postprocess_dq.hpp"

namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET {

// Launches a main kernel on its tiles, then computes dq of the split tiles. KernelParams: Params and the backend's
// further parameters, which `p` has.
template <auto kKernel, class KernelParams, class... Further>
void launch_main(const Problem& problem, const Plan& plan, void* workspace, const MainPass& pass, KernelParams p,
                 std::uint32_t threads, std::size_t shared_bytes, Stream stream, const Further&... further) {
  if (pass.clusters() == 0) return;
  const auto ctas = static_cast<std::uint32_t>(pass.ctas);
  const arch::LaunchShape shape{.grid = {ctas * static_cast<std::uint32_t>(pass.clusters())},
                                .threads = threads,
                                .cluster = ctas,
                                .shared_bytes = shared_bytes};
  static_cast<Params&>(p) = params_of(params_of(problem, plan, workspace), problem, plan, workspace, pass);
  // A CTA fills an SM; clusters may leave some SMs empty.
  if (plan.throttles)
    p.wave = ctas == 1 ? problem.device.sms : pass.ctas * runtime::clusters_that_fit<kKernel>(problem.device, shape);
  if (p.wave == 0) p.progress = nullptr;
  runtime::launch(kName, kKernel, shape, stream, p, further...);
  postprocess_dq(problem, plan, workspace, pass, stream);
}

}  // namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET
