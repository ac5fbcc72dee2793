// sparse_mla_backward on GPUs, preprocess: sorts each query's valid keys into ascending ranges of keys, so that CTAs
// share rows in L2; descending in every other wave, so that consecutive waves share rows too (serpentine order). The
// same kernel clears sums, because sorting leaves memory idle. And postprocess: moves attn, summed in that order, back
// to its entries.
//
// A deterministic call sorts a query's keys by that query's row alone: by ranges of the span of the row's own keys,
// 4,096 entries at a time. Other queries, more keys, an offset of all keys and padding change nothing.
#pragma once

#include "ops/sparse_mla_backward/passes/clear_accumulators.hpp"
#include "tile/gpu/order_rows.hpp"

namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET {

using tile::kOrderThreads;

struct OrderParams {
  tile::SelectionParams selection;
  tile::OrderedRows ordered;
  tile::MergedRows merged;               // selects the rows to sort
  ClearParams sums;                      // cleared 16 bytes at a time, because sorting leaves memory idle
  ClearParams attn;                      // the same; one row per query, or no rows
  int tiles_of_query, serpentine_tiles;  // see Plan
  bool own_span;                         // ranges are of the row's own keys, whatever s_kv is: deterministic

  HOPWELL_DEVICE bool descends(int query) const {
    return serpentine_tiles > 0 && query * tiles_of_query / serpentine_tiles % 2 != 0;
  }
};

// Clears this CTA's part of the rows.
HOPWELL_DEVICE void clear_some_rows(const ClearParams& p) {
  const int64_t rows = (p.rows + arch::grid_size() - 1) / arch::grid_size(), first = rows * arch::block_index();
  const int chunks = int(p.words / 4);
  for (int i = arch::thread_index(); i < rows * chunks; i += kOrderThreads)
    if (first + i / chunks < p.rows)
      arch::store_vector(p.data + (first + i / chunks) * p.stride + i % chunks * 4, arch::Words4{});
}

// One CTA per query.
__global__ void __launch_bounds__(kOrderThreads) sparse_mla_bwd_sort_row(const __grid_constant__ OrderParams p) {
  auto& s = arch::dynamic_smem<tile::OrderStorage>();
  const int query = arch::block_index();
  clear_some_rows(p.sums);
  for (int64_t i = arch::thread_index(); i < p.attn.words && query < p.attn.rows; i += kOrderThreads)
    p.attn.data[query * p.attn.stride + i] = 0;
  if (!p.merged.wants(query)) return;
  const Entries entries = tile::entries_of(p.selection, query);
  const tile::KeySpan span = p.own_span ? tile::span_of_keys(entries, s) : tile::KeySpan{0, int(entries.visible.end())};
  int length = 0;
  for (int first = 0; first < p.selection.topk; first += tile::kLongestOrderedRow) {
    const int left = p.selection.topk - first;
    const int size = left < tile::kLongestOrderedRow ? left : tile::kLongestOrderedRow;
    const int64_t at = int64_t{query} * p.selection.topk + length;
    length += tile::order_entries(entries.slice(first, size), size, span, p.ordered, at, s, p.descends(query));
  }
  if (arch::thread_index() == 0) p.ordered.lengths[query] = length;
}

inline void order_rows(const Problem& problem, const Plan& plan, void* workspace, Stream stream) {
  if (!plan.orders_rows) return;
  const ClearParams attn = cleared_attn(problem, plan);
  const OrderParams p{tile::params_of(problem.selection),
                      ordered_rows_of(problem, plan, workspace),
                      params_of({}, problem, plan, workspace, plan.singles).merged,
                      plan.order_clears_dkv_accum ? cleared_dkv_accum(problem, plan, workspace) : ClearParams{},
                      attn,
                      std::max(plan.pairs.head_blocks, plan.singles.head_blocks),
                      plan.serpentine_tiles,
                      problem.deterministic};
  runtime::launch(kName, sparse_mla_bwd_sort_row, shape_of_ctas(problem.s_q, kOrderThreads, sizeof(tile::OrderStorage)),
                  stream, p);
}

// ---- attn

struct RestoreAttnParams {
  float* attn;              // [s_q, topk]: input: sums in the order of the sorted keys; output: in the order of entries
  const uint16_t* sources;  // [s_q, topk], and lengths [s_q]: written by sparse_mla_bwd_sort_row
  const int* lengths;
  int64_t stride;
  int topk;
};

// One CTA per query.
__global__ void __launch_bounds__(kOrderThreads)
    sparse_mla_bwd_restore_attn_order(const __grid_constant__ RestoreAttnParams p) {
  auto& row = arch::dynamic_smem<float[tile::kLongestOrderedRow]>();
  const int t = arch::thread_index(), query = arch::block_index(), length = p.lengths[query];
  float* attn = p.attn + query * p.stride;
  for (int i = t; i < p.topk; i += kOrderThreads) row[i] = 0;
  arch::syncthreads();
  for (int i = t; i < length && i < p.topk; i += kOrderThreads) {
    const int source = p.sources[int64_t{query} * p.topk + i];
    if (source < p.topk)
      row[source] = attn[i];  // always true; without a barrier of the sorting kernel, keeps addresses valid
  }
  arch::syncthreads();
  for (int i = t; i < p.topk; i += kOrderThreads) attn[i] = row[i];
}

inline void restore_attn(const Problem& problem, const Plan& plan, void* workspace, Stream stream) {
  if (!plan.orders_rows || !problem.attn || plan.distribution) return;
  const RestoreAttnParams p{problem.attn.as<float>(), runtime::at_offset<uint16_t>(workspace, plan.workspace.sources),
                            runtime::at_offset<int>(workspace, plan.workspace.lengths), problem.attn.stride[0],
                            static_cast<int>(problem.topk)};
  runtime::launch(kName, sparse_mla_bwd_restore_attn_order,
                  shape_of_ctas(problem.s_q, kOrderThreads, sizeof(float[tile::kLongestOrderedRow])), stream, p);
}

}  // namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET
