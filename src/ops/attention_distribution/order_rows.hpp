// attention_distribution on GPUs: preprocessing for a kernel whose CTAs read keys in ascending or descending order.
#pragma once

#include "ops/attention_distribution/params.hpp"
#include "runtime/launch.hpp"
#include "tile/gpu/order_rows.hpp"

namespace hopwell::ops::attention_distribution::HOPWELL_TARGET {

constexpr int kMaxLead = 1;  // steps; see tile/gpu/throttle.hpp

struct OrderParams {
  tile::SelectionParams selection;
  tile::OrderedRows ordered;
  float* attn;  // zeros, where no sum will be written
  int64_t attn_stride;
  uint32_t* progress;  // zero; or null
  int wave;            // queries that are worked on at a time
};

// Sorts the keys of one query with one CTA. Every other wave has descending keys (serpentine order), because L2 still
// holds the keys that the previous wave read last.
__global__ void __launch_bounds__(tile::kOrderThreads, tile::kOrderCtas)
    attention_distribution_sort_row(const __grid_constant__ OrderParams p) {
  auto& s = arch::dynamic_smem<tile::OrderStorage>();
  const int query = arch::block_index(), t = arch::thread_index();
  if (p.progress && query == 0 && t == 0) *p.progress = 0;
  const Entries entries = tile::entries_of(p.selection, query);
  const int length = tile::order_entries(entries, p.selection.topk, {0, int(entries.visible.end())}, p.ordered,
                                         int64_t{query} * p.selection.topk, s, query / p.wave % 2 != 0);
  if (t == 0) p.ordered.lengths[query] = length;
  for (int i = t; i < p.selection.topk; i += tile::kOrderThreads)
    if (!entries.counts(s.entries[i])) p.attn[query * p.attn_stride + i] = 0;
}

// Launches it, and tells a kernel's parameters of the rows.
inline void order_rows(const Problem& problem, const Ordering& ordering, Params& p, void* workspace, Stream stream) {
  const tile::OrderedRows ordered{runtime::at_offset<int>(workspace, ordering.rows),
                                  runtime::at_offset<uint16_t>(workspace, ordering.sources),
                                  runtime::at_offset<int>(workspace, ordering.lengths)};
  if (ordering.throttles)
    p.throttle = {runtime::at_offset<uint32_t>(workspace, ordering.progress), p.plan.ctas, kMaxLead,
                  p.plan.whole_queries, ordering.steps};
  runtime::launch("attention_distribution", attention_distribution_sort_row,
                  runtime::shape_of_ctas(problem.s_q, tile::kOrderThreads, sizeof(tile::OrderStorage)), stream,
                  OrderParams{p.selection, ordered, p.attn, p.attn_stride, p.throttle.progress, p.plan.ctas});
  p.selection = tile::ordered_selection_of(p.selection, ordered), p.sources = ordered.sources;
}

}  // namespace hopwell::ops::attention_distribution::HOPWELL_TARGET
