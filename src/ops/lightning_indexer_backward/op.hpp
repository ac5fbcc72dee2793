// lightning_indexer_backward: the problem that its backends run. Meaning and shapes: declaration.py.
#pragma once

#include <algorithm>

#include "ops/common/index_gradients.hpp"
#include "runtime/backend.hpp"
#include "tile/selection.hpp"

namespace hopwell {
struct LightningIndexerBackwardArgs;
}  // namespace hopwell

namespace hopwell::ops::lightning_indexer_backward {

inline constexpr const char* kName = "lightning_indexer_backward";

struct Problem : IndexOperands, IndexGradients {
  View target;    // fp32 [s_q, topk]; absent if d_scores is given
  View d_scores;  // fp32 [s_q, topk]; absent if target is given
  View indices;   // int32 [s_q, topk]; absent: the visible keys in order, and topk is s_kv
  Visibility visibility;
  std::int64_t topk = 0;
  runtime::Device device;
};

// A pass over some queries of a problem. For indexer_dense_loss, which supplies targets in passes. d_k and the loss
// accumulate over all passes, in order. Backends register kernels for passes, and for whole problems as a single pass.
struct PassProblem : Problem {                     // target [pass_queries, topk]
  std::int64_t first_query = 0, pass_queries = 0;  // the pass ends at s_q or earlier
  View losses;                                     // fp64 [s_q], kept between passes; absent: a single pass
  float target_scale = 1;                          // factor of the target's elements

  [[nodiscard]] std::int64_t queries() const { return std::min(pass_queries, s_q - first_query); }
  [[nodiscard]] bool first_pass() const { return first_query == 0; }
  [[nodiscard]] bool last_pass() const { return first_query + queries() == s_q; }
};

// All queries as one pass.
inline PassProblem single_pass(const Problem& problem) {
  PassProblem p;
  static_cast<Problem&>(p) = problem;
  p.pass_queries = p.s_q;
  return p;
}

// Restricts the problem to the queries of one pass. Tensors shared by all passes are unchanged.
PassProblem queries_of_pass(const PassProblem& problem);

Problem check(const LightningIndexerBackwardArgs& args);

}  // namespace hopwell::ops::lightning_indexer_backward
