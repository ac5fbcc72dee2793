#include "ops/sparse_mla_decode/gpu/split.hpp"

namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET {

template SplitKernel split_kernel<tile::ShiftedCodes, RowsPerTensor<576>>(int);
template SplitKernel split_kernel<tile::ShiftedCodes, RowsPerTensor<512>>(int);

}  // namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET
