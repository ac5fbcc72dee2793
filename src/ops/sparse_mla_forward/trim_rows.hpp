// sparse_mla_forward on GPUs, preprocess: finds the last valid entry of each index row.
#pragma once

#include "ops/sparse_mla_forward/trim_plan.hpp"
#include "runtime/launch.hpp"
#include "tile/ceil_div.hpp"
#include "tile/gpu/trim_rows.hpp"

namespace hopwell::ops::sparse_mla_forward::HOPWELL_TARGET {

__global__ void __launch_bounds__(tile::kTrimThreads)
    sparse_mla_fwd_trim_rows(const __grid_constant__ tile::TrimParams p) {
  tile::trim_row(p, arch::block_index() * tile::kRowsOfTrimCta + arch::warp_index());
}

inline void trim_rows(const Problem& problem, const TrimmedRows& trimmed, void* workspace, Stream stream) {
  if (!trimmed.enabled) return;
  const tile::TrimParams p{tile::params_of(problem.selection), runtime::at_offset<int>(workspace, trimmed.lengths),
                           static_cast<int>(problem.s_q)};
  const std::int64_t ctas = tile::ceil_div(problem.s_q, tile::kRowsOfTrimCta);
  runtime::launch("sparse_mla_forward", sparse_mla_fwd_trim_rows, runtime::shape_of_ctas(ctas, tile::kTrimThreads),
                  stream, p);
}

// The selection of a call, with the row lengths from trim_rows if it runs.
inline tile::SelectionParams selection_of(const Problem& problem, const TrimmedRows& trimmed, void* workspace) {
  tile::SelectionParams p = tile::params_of(problem.selection);
  if (trimmed.enabled) p.lengths = runtime::at_offset<int>(workspace, trimmed.lengths), p.length_stride = 1;
  return p;
}

}  // namespace hopwell::ops::sparse_mla_forward::HOPWELL_TARGET
