#include "ops/sparse_mla_decode/sm90/few_heads.hpp"

namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET {

template SplitKernel few_heads_kernel<RowsPerTensor<576>>(int);
template SplitKernel few_heads_kernel<RowsPerTensor<512>>(int);

}  // namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET
