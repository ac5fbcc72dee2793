// The kernels for queries with window keys.
#include "ops/sparse_mla_backward/sm90/pair.hpp"
#include "ops/sparse_mla_backward/sm90/single.hpp"

namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET {

template void launch_pairs<WindowParams>(const Problem&, const Plan&, void*, Stream);
template void launch_singles<WindowParams>(const Problem&, const Plan&, void*, Stream);

}  // namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET
