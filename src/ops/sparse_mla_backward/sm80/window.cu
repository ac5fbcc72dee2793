// The kernels for queries with window keys.
#include "ops/sparse_mla_backward/sm80/launch.hpp"

namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET {

template void launch_with<WindowParams>(const Problem&, const Plan&, void*, Stream);

}  // namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET
