#include "ops/sparse_mla_decode/sm90/many_heads.hpp"

namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET {

template SplitKernel many_heads_kernel<RowsV4>();
template SplitKernel many_heads_kernel<RowsV41>();

}  // namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET
