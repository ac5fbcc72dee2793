// Programmatic dependent launches: a kernel that starts while the one ahead of it in the stream is still running. Before
// Hopper there are none, and both functions do nothing.
#pragma once

#include "arch/sm90/cluster.hpp"

namespace hopwell::tile {

/// Lets the next kernel of the stream start, once all CTAs have said so or ended.
HOPWELL_DEVICE void launch_dependents() {
#if HOPWELL_HAS_SM90
  arch::griddepcontrol_launch_dependents();
#endif
}

/// Waits until the kernels ahead have ended and what they wrote can be read. Nothing of theirs may be read, and nothing
/// that they read be written, before it.
HOPWELL_DEVICE void wait_for_prior_kernels() {
#if HOPWELL_HAS_SM90
  arch::griddepcontrol_wait();
#endif
}

}  // namespace hopwell::tile
