// The split kernels of a backend. Each file of the backend's folder includes split.hpp and instantiates the kernels of
// some row formats.
#pragma once

#include <cstddef>

#include "ops/sparse_mla_decode/gpu/params.hpp"
#include "ops/sparse_mla_decode/gpu/rows.hpp"

namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET {

struct SplitKernel {
  void (*kernel)(SplitParams);
  int threads;
  std::size_t shared_bytes;
};

// The kernel for tiles of 8 or 16 heads. Codes: how it decodes e4m3 (tile/gpu/e4m3.hpp).
template <class Codes, class RowsOfFormat>
SplitKernel split_kernel(int heads);

}  // namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET
