// indexer_dense_loss is made of two other operators, on every backend: queries are taken in passes, and a pass is
//
//     attention_distribution        over all visible keys, to the workspace: the targets
//     lightning_indexer_backward    from these: index scores, their softmax, g in their place, the gradients
//
// each by the same backend's kernels, which go through the keys that a query sees and no others. d_k_index and the loss are
// of all passes, in their order. What a query gets does not depend on how the passes are cut.
#pragma once

#include "ops/indexer_dense_loss/op.hpp"

namespace hopwell::ops::indexer_dense_loss {

// The workspace holds the targets of so many queries, and as many scores: 256 MiB in all, or where that would be less than
// a query for each multiprocessor, about as much as kv has.
std::int64_t queries_at_a_time(const Problem& problem);

runtime::Support supports_on(const char* backend, const Problem& problem);
std::size_t workspace_bytes_on(const char* backend, const Problem& problem);
void launch_on(const char* backend, const Problem& problem, Stream stream);

}  // namespace hopwell::ops::indexer_dense_loss
