// lightning_indexer_backward: the problem that its backends run. Meaning and shapes: declaration.py.
#pragma once

#include <algorithm>

#include "ops/common/index_gradients.hpp"
#include "runtime/backend.hpp"
#include "tile/selection.hpp"

namespace hopwell::ops::lightning_indexer_backward {

inline constexpr const char* kName = "lightning_indexer_backward";

struct Problem : IndexOperands, IndexGradients {
  View target;    // fp32 [pass_queries, topk]; absent if d_scores is given
  View d_scores;  // fp32 [s_q, topk]; absent if target is given
  View indices;   // int32 [s_q, topk]; absent: the visible keys in order, and topk is s_kv
  Visibility visibility;
  std::int64_t topk = 0;
  // For indexer_dense_loss, which supplies targets in passes of queries. d_k and the loss accumulate over all passes,
  // in order.
  std::int64_t first_query = 0, pass_queries = 0;  // the current pass; it ends at s_q or earlier
  View losses;                                     // fp64 [s_q], kept between passes; absent: a single pass
  float target_scale = 1;                          // factor of the target's elements
  runtime::Device device;
  void* workspace = nullptr;
  std::size_t workspace_bytes = 0;

  [[nodiscard]] std::int64_t queries() const { return std::min(pass_queries, s_q - first_query); }
  [[nodiscard]] bool first_pass() const { return first_query == 0; }
  [[nodiscard]] bool last_pass() const { return first_query + queries() == s_q; }
};

// Restricts the problem to the queries of one pass. Tensors shared by all passes are unchanged.
Problem queries_of_pass(const Problem& problem);

Problem check(const LightningIndexerBackwardArgs& args);

}  // namespace hopwell::ops::lightning_indexer_backward
