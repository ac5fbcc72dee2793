// The split kernels of a backend. Each file of the backend's folder instantiates the kernels of some row formats.
#pragma once

#include <cstddef>
#include <optional>

#include "ops/sparse_mla_decode/gpu/params.hpp"
#include "ops/sparse_mla_decode/gpu/rows.hpp"
#include "ops/sparse_mla_decode/splits.hpp"

namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET {

struct SplitKernel {
  void (*kernel)(SplitParams);
  int threads;
  std::size_t shared_bytes;
  std::optional<Clocks> clocks = std::nullopt;  // absent: a CTA can have one split only
  bool merges = false;                          // a CTA merges its splits; else it stores a partial result of each
  // Number of clusters of `size` CTAs that run at the same time; null if the kernel cannot merge splits in a cluster.
  int (*clusters_that_fit)(const runtime::Device& device, std::int64_t size) = nullptr;
};

// The kernel for tiles of 8 or 16 heads, and of 32 for rows with codes, for any GPU from Ampere on.
template <class RowsOfFormat>
SplitKernel split_kernel(int heads);

// Hopper's kernel for tiles of 8 or 16 heads.
template <class RowsOfFormat>
SplitKernel few_heads_kernel(int heads);

// Hopper's kernel for tiles of 64 heads.
template <class RowsOfFormat>
SplitKernel many_heads_kernel();

// `kernel_of` called with the rows of a problem's format.
template <class KernelOf>
SplitKernel with_rows_of(const Problem& p, const KernelOf& kernel_of) {
  if (!p.format) return p.d_qk == 576 ? kernel_of(RowsPlain<576>{}) : kernel_of(RowsPlain<512>{});
  if (*p.format == mla_cache::kV32) return kernel_of(RowsV32{});
  if (*p.format == mla_cache::kV32WithoutRope) return kernel_of(RowsV32WithoutRope{});
  if (*p.format == mla_cache::kV4) return kernel_of(RowsV4{});
  if (*p.format == mla_cache::kV41) return kernel_of(RowsV41{});
  return p.d_qk == 576 ? kernel_of(RowsPerTensor<576>{}) : kernel_of(RowsPerTensor<512>{});
}

}  // namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET
