// indexer_dense_loss is composed of two other operators, on every backend. Queries are processed in passes, and a pass
// is
//
//     attention_distribution        over all visible keys, to the workspace: the targets
//     lightning_indexer_backward    from these: index scores, their softmax, g in their place, the gradients
//
// each with the kernels of the same backend, which process only the keys that a query sees. d_k_index and the loss
// accumulate over all passes, in order. The results of a query do not depend on the division into passes.
#pragma once

#include "ops/indexer_dense_loss/op.hpp"

namespace hopwell::ops::indexer_dense_loss {

// The workspace holds the targets of this many queries, and as many scores: 256 MiB in total. If that is less than one
// query per SM, it is larger: about the size of kv.
std::int64_t queries_at_a_time(const Problem& problem);

runtime::Support supports_on(const char* backend, const Problem& problem);
std::size_t workspace_bytes_on(const char* backend, const Problem& problem);
void launch_on(const char* backend, const Problem& problem, Stream stream);

}  // namespace hopwell::ops::indexer_dense_loss
