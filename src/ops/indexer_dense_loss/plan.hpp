// indexer_dense_loss is composed of two other operators, on every backend. Queries are processed in passes, and a pass
// is
//
//     attention_distribution        over all visible keys, to the workspace: the targets
//     lightning_indexer_backward    from these: index scores, their softmax, g in their place, the gradients
//
// each with the kernels of the same backend, which process only the keys that a query sees. d_k_index and the loss
// accumulate over all passes, in order. The results of a query do not depend on the division into passes.
#pragma once

#include <vector>

#include "ops/attention_distribution/op.hpp"
#include "ops/indexer_dense_loss/op.hpp"
#include "ops/lightning_indexer_backward/op.hpp"

namespace hopwell::ops::indexer_dense_loss {

// The workspace holds the targets of this many queries, and as many scores: 256 MiB in total. If that is less than one
// query per SM, it is larger: about the size of kv.
std::int64_t queries_at_a_time(const Problem& problem);

// The two calls of a pass.
struct PassPlan {
  runtime::Planned<attention_distribution::Problem> targets;
  runtime::Planned<lightning_indexer_backward::PassProblem> gradients;
};
struct Plan {
  std::int64_t queries_at_a_time = 0;
  std::vector<PassPlan> passes;  // the first is for every pass but the last, the second for the last
  // Offsets in bytes. The workspace begins with the targets, fp32 [queries at a time, s_kv].
  std::size_t losses = 0;     // fp64 [s_q]
  std::size_t gradients = 0;  // workspace of lightning_indexer_backward
  std::size_t workspace_bytes = 0;
};
runtime::PlanOr<Plan> plan_on(const char* backend, const Problem& problem);
void launch(const Problem& problem, const Plan& plan, void* workspace, Stream stream);

}  // namespace hopwell::ops::indexer_dense_loss
