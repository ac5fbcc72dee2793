// lightning_indexer_backward on GPUs: layout of the workspace, and division of the passes over d_k; depends on the
// problem and the device only.
#pragma once

#include "ops/lightning_indexer_backward/op.hpp"
#include "runtime/workspace.hpp"

namespace hopwell::ops::lightning_indexer_backward {

// Offsets in bytes. fixed_d_k, largest, count and of_all are for deterministic sums only.
struct Workspace {
  std::size_t gradients = 0;  // fp32 [pass_queries, topk]: gradients of the scores
  std::size_t losses = 0;     // fp64 [s_q]
  std::size_t ungrouped = 0;  // uint32 [pass_queries], without indices only: ungrouped flag per query group
  std::size_t fixed_d_k = 0;  // int64 [s_kv, d_index]
  std::size_t largest = 0;    // uint32 [s_kv]
  std::size_t count = 0;      // uint32 [s_kv]
  std::size_t of_all = 0;     // uint32: shared by all keys, without indices only
  std::size_t positive = 0;   // on Hopper, for ungrouped queries: signs of the products
};

inline constexpr int kPassThreads = 256;

struct Plan {
  std::uint32_t pass_ctas;  // CTAs of a pass over all of d_k; 0: d_k is empty
  int head_tiles;           // per query, 64 heads each
  int column_blocks;        // of 32 columns
  // On Hopper: queries that a CTA processes together because they see the same keys.
  int group_rows;  // rows per query, of 128; 0: ungrouped, with indices or more than 64 heads
  int group;
  Workspace workspace;
  std::size_t workspace_bytes;
};
Plan plan_of(const PassProblem& p);

}  // namespace hopwell::ops::lightning_indexer_backward
