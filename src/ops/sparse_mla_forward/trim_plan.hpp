// sparse_mla_forward: the plan of a preprocess that finds the last valid entry of each index row. It says which calls
// run the preprocess, and where the workspace has the lengths. tile/gpu/trim_rows.hpp runs on the device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/sparse_mla_forward/op.hpp"
#include "runtime/workspace.hpp"

namespace hopwell::ops::sparse_mla_forward {

// `lengths`: byte offset in the workspace of the rows' lengths, int32 [s_q].
struct TrimmedRows {
  bool enabled = false;
  std::size_t lengths = 0;
};

// The kernel runs in calls that take about 1 ms on an H200, and longer; on the emulator's own profile (capability 0) in
// all calls. Results have the same bits without it.
inline TrimmedRows place_trimmed_rows(const Problem& p, runtime::WorkspaceLayout& layout) {
  constexpr std::int64_t kLeastEntries = std::int64_t{1} << 28;  // of all queries and heads
  const bool pays = p.device.capability == 0 || p.s_q * p.topk * p.h_q >= kLeastEntries;
  if (p.selection.indices == nullptr || p.topk == 0 || p.s_q == 0 || !pays) return {};
  return {true, layout.reserve(4 * p.s_q)};
}

// The plan of sm80 and sm100, which plan nothing but this preprocess.
struct TrimmedRowsPlan {
  TrimmedRows trimmed;
  std::size_t workspace_bytes = 0;
};
inline TrimmedRowsPlan trimmed_rows_plan(const Problem& problem) {
  runtime::WorkspaceLayout layout;
  const TrimmedRows trimmed = place_trimmed_rows(problem, layout);
  return {trimmed, layout.bytes};
}

}  // namespace hopwell::ops::sparse_mla_forward
