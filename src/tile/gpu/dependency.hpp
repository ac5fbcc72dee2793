// Programmatic dependent launch: a kernel starts while the previous kernel of the stream is still running. GPUs before
// Hopper do not support it; there both functions do nothing.
#pragma once

#include "arch/sm90/cluster.hpp"

namespace hopwell::tile {

/// Lets the next kernel of the stream start when every CTA has called this or has ended.
HOPWELL_DEVICE void launch_dependents() {
#if HOPWELL_HAS_SM90
  arch::griddepcontrol_launch_dependents();
#endif
}

/// Waits until the previous kernels have ended and their writes are visible. Before this call a kernel must not read
/// their outputs or overwrite their inputs.
HOPWELL_DEVICE void wait_for_prior_kernels() {
#if HOPWELL_HAS_SM90
  arch::griddepcontrol_wait();
#endif
}

}  // namespace hopwell::tile
