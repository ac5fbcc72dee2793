// lightning_indexer_backward: what its backends are given. Meaning and shapes: hopwell.h.
#pragma once

#include <algorithm>

#include "ops/common/index_gradients.hpp"
#include "runtime/backend.hpp"
#include "tile/selection.hpp"

namespace hopwell::ops::lightning_indexer_backward {

inline constexpr const char* kName = "lightning_indexer_backward";

struct Problem : IndexOperands, IndexGradients {
  View target;    // fp32 [pass_queries, topk]; absent where d_scores is given
  View d_scores;  // fp32 [s_q, topk]; absent where target is given
  View indices;   // int32 [s_q, topk]; absent: the visible keys in order, and topk is s_kv
  Visibility visibility;
  std::int64_t topk = 0;
  // What indexer_dense_loss asks for. Its targets come pass by pass of queries; d_k and the loss are of all passes, in order.
  std::int64_t first_query = 0, pass_queries = 0;  // the pass; it ends at s_q, or before
  View losses;                                     // fp64 [s_q], kept from pass to pass; absent: there is one pass
  float target_scale = 1;                          // of the target's elements
  runtime::Device device;
  void* workspace = nullptr;
  std::size_t workspace_bytes = 0;

  [[nodiscard]] std::int64_t queries() const { return std::min(pass_queries, s_q - first_query); }
  [[nodiscard]] bool first_pass() const { return first_query == 0; }
  [[nodiscard]] bool last_pass() const { return first_query + queries() == s_q; }
};

// A problem whose queries are those of the pass. What is of all passes stays as it is.
Problem queries_of_pass(const Problem& problem);

}  // namespace hopwell::ops::lightning_indexer_backward
