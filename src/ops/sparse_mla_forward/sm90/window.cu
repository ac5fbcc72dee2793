// The kernels for Hopper with window keys.
#include "ops/sparse_mla_forward/sm90/kernel.hpp"

namespace hopwell::ops::sparse_mla_forward::HOPWELL_TARGET {

void launch_with_window(const Problem& problem, const Plan& plan, Stream stream) {
  const WindowParams p = params_with_window(problem);
  const auto launch_it =
      problem.d_qk == 576 ? launch_for_heads<576, WindowParams> : launch_for_heads<512, WindowParams>;
  launch_it(problem, plan, p, stream);
}

}  // namespace hopwell::ops::sparse_mla_forward::HOPWELL_TARGET
