#include "ops/sparse_mla_decode/gpu/split.hpp"

namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET {

template SplitKernel split_kernel<tile::ShiftedCodes, RowsV32>(int);
template SplitKernel split_kernel<tile::ShiftedCodes, RowsV32WithoutRope>(int);

}  // namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET
