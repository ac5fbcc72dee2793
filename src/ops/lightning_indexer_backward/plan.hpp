// lightning_indexer_backward on GPUs: what lies in the workspace, and how the passes over d_k are cut, from the problem and
// the device alone.
#pragma once

#include "ops/lightning_indexer_backward/op.hpp"

namespace hopwell::ops::lightning_indexer_backward {

// Offsets in bytes; those from fixed_d_k on are of deterministic sums.
struct Workspace {
  std::size_t gradients = 0;  // fp32 [pass_queries, topk]: of the scores
  std::size_t losses = 0;     // fp64 [s_q]
  std::size_t apart = 0;  // uint32 [pass_queries], where there are no indices: of groups of queries, at most so many
  std::size_t fixed_d_k = 0;  // int64 [s_kv, d_index]
  std::size_t largest = 0;    // uint32 [s_kv]
  std::size_t count = 0;      // uint32 [s_kv]
  std::size_t of_all = 0;     // uint32: of every key, where there are no indices
  std::size_t bytes = 0;      // of all
};
Workspace workspace_of(const Problem& p);
std::size_t workspace_bytes(const Problem& p);

inline constexpr int kPassThreads = 256;

struct Plan {
  std::uint32_t pass_ctas;  // of a pass over all of d_k; 0: d_k is empty
  int head_tiles;           // of 64 heads, of a query
  int column_blocks;        // of 32 columns
  // On Hopper, of queries that a CTA takes together because they see the same keys.
  int group_rows;  // of 128, for the heads of each; 0: one by one, with indices or more than 64 heads
  int group;
};
Plan plan_of(const Problem& p);

}  // namespace hopwell::ops::lightning_indexer_backward
