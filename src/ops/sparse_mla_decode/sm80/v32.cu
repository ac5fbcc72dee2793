#include "ops/sparse_mla_decode/sm80/many_heads.hpp"
#include "ops/sparse_mla_decode/sm80/split.hpp"

namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET {

template SplitKernel split_kernel<RowsV32>(int);
template SplitKernel split_kernel<RowsV32WithoutRope>(int);
template SplitKernel many_heads_kernel<RowsV32>();
template SplitKernel many_heads_kernel<RowsV32WithoutRope>();

}  // namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET
