#include "ops/sparse_mla_decode/sm80/split.hpp"

namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET {

template SplitKernel split_kernel<RowsV32>(int);
template SplitKernel split_kernel<RowsV32WithoutRope>(int);

}  // namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET
