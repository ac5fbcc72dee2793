// Index rows without the invalid entries at their ends. This file decides for which calls the ends are found.
// tile/gpu/trim_rows.hpp finds them on the device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/sparse_mla_forward/op.hpp"
#include "runtime/workspace.hpp"

namespace hopwell::ops::sparse_mla_forward {

// `lengths`: byte offset in the workspace of the rows' lengths, int32 [s_q]; only if they exist.
struct TrimmedRows {
  bool exist = false;
  std::size_t lengths = 0;
};

// A launch takes about 3 µs, so calls of less than about 0.4 ms do not look. On the emulator's own profile (capability
// 0) all calls do. The bits of a call do not depend on it.
inline TrimmedRows place_trimmed_rows(const Problem& p, runtime::WorkspaceLayout& layout) {
  constexpr std::int64_t kLeastEntries = std::int64_t{1} << 28;  // of all heads
  const bool pays = p.device.capability == 0 || p.s_q * p.topk * p.h_q >= kLeastEntries;
  if (p.selection.indices == nullptr || p.topk == 0 || p.s_q == 0 || !pays) return {};
  return {true, layout.reserve(4 * p.s_q)};
}

// The plan of a backend that decides nothing else before its launch.
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
