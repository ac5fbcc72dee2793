// paged_lightning_indexer on GPUs: the call as a problem of lightning_indexer, whose plans it uses, and the division of
// the queries into passes. Depends on shapes only.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/lightning_indexer/plan.hpp"
#include "ops/paged_lightning_indexer/op.hpp"
#include "tile/ceil_div.hpp"

namespace hopwell::ops::paged_lightning_indexer {

namespace unpaged = lightning_indexer;

struct Plan {
  unpaged::Problem problem;  // s_q = b · q_len queries of at most s_kv keys, without tensors
  unpaged::Plan of;          // scores: at most 256 MiB, or the scores of one query
  std::size_t workspace_bytes;
};

inline runtime::PlanOr<Plan> plan_of(const Problem& p) {
  using runtime::Unsupported;
  constexpr std::int64_t kFloats = std::int64_t{1} << 26, kLimit = std::int64_t{1} << 31;
  unpaged::Problem f;
  f.q.dtype = p.q.dtype;
  f.s_q = p.b * p.q_len, f.s_kv = p.most_positions(), f.h_index = p.h_index, f.d_index = p.d_index;
  f.topk = p.topk, f.relu = p.relu, f.device = p.device;
  if (f.d_index > 128) return Unsupported{"needs d_index at most 128"};
  if (f.s_q >= kLimit || f.topk >= kLimit) return Unsupported{"needs b · q_len and topk below 2^31"};
  if (f.s_kv >= kLimit / 2) return Unsupported{"needs max_blocks · block below 2^30"};
  if (f.h_index >= kLimit / 64) return Unsupported{"needs h_index below 2^25"};
  const bool accessible = reinterpret_cast<std::uintptr_t>(p.cache.data) % 4 == 0 && p.cache.stride % 4 == 0;
  if (p.format && !accessible) return Unsupported{"needs base and block stride of cache in multiples of 4 bytes"};
  const std::int64_t keys = std::max<std::int64_t>(f.s_kv, 1);
  const std::int64_t together = std::min(f.s_q, std::max<std::int64_t>(kFloats / keys, 1));
  const unpaged::Plan plan = unpaged::plan_for(f, together);
  return Plan{f, plan, plan.workspace_bytes};
}

// Calls run(first query, number of queries) for one group of queries after another.
template <class Run>
void for_each_pass(const Plan& plan, Run run) {
  const std::int64_t together = plan.of.queries_at_a_time, queries = plan.problem.s_q;
  for (std::int64_t first = 0; first < queries; first += together) run(first, std::min(together, queries - first));
}

}  // namespace hopwell::ops::paged_lightning_indexer
