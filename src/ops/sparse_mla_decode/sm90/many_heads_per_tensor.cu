#include "ops/sparse_mla_decode/sm90/many_heads.hpp"

namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET {

template SplitKernel many_heads_kernel<RowsPerTensor<576>>();
template SplitKernel many_heads_kernel<RowsPerTensor<512>>();

}  // namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET
