// paged_lightning_indexer on GPUs: parameters with which lightning_indexer's selection kernels write positions or
// slots.
//
// The score of a position without a page is absent_score(), which sorts below all others. If a threshold would select
// such positions, topk or fewer positions exist, and all of these are written.
#pragma once

#include "ops/lightning_indexer/long_select.hpp"
#include "ops/paged_lightning_indexer/plan.hpp"

namespace hopwell::ops::paged_lightning_indexer::HOPWELL_TARGET {

namespace indexer = lightning_indexer::HOPWELL_TARGET;

struct PagedSelectParams : indexer::SelectParams {
  PagedSelection positions;
  bool slots;
  int64_t indices_stride_b, top_stride_b;  // from sequence to sequence
  int* lengths;                            // or null
  int64_t lengths_stride_b, lengths_stride_i;
};

struct PagedRow : indexer::QueryRow {
  const int* table;
  int block, blocks;
  bool slots;
  int* length;

  /// The slot of a visible key, or -1.
  [[nodiscard]] HOPWELL_DEVICE int slot(int key) const {
    const int position = first_key + key, number = position / block, page = table[number];
    return uint32_t(page) < uint32_t(blocks) ? page * block + position - number * block : -1;
  }
  [[nodiscard]] HOPWELL_DEVICE bool exists(int key) const { return slot(key) >= 0; }
  [[nodiscard]] HOPWELL_DEVICE int index(int key) const { return slots ? slot(key) : first_key + key; }
};

HOPWELL_DEVICE PagedRow row_of(const PagedSelectParams& p, int query) {
  const PagedSelection& s = p.positions;
  const uint32_t at = uint32_t(p.first_query) + uint32_t(query), q_len = uint32_t(s.q_len);  // fewer than 2^31 queries
  const int64_t b = at / q_len, i = at % q_len;
  PagedRow row;
  row.scores = p.scores + query * p.pitch;
  row.indices = p.indices + b * p.indices_stride_b + i * p.indices_stride;
  row.top_scores = p.top_scores ? p.top_scores + b * p.top_stride_b + i * p.top_stride : nullptr;
  row.first_key = 0, row.visible = p.topk > 0 ? int(s.visible(b, i)) : 0;
  row.table = s.block_tables + b * s.tables_stride, row.block = int(s.block), row.blocks = int(s.blocks);
  row.slots = p.slots;
  row.length = p.lengths ? p.lengths + b * p.lengths_stride_b + i * p.lengths_stride_i : nullptr;
  return row;
}

HOPWELL_DEVICE void forget_length(PagedRow& row) { row.length = nullptr; }
HOPWELL_DEVICE void note_count(const PagedSelectParams& /*p*/, const PagedRow& row, int count) {
  if (row.length && arch::thread_index() == 0) *row.length = count;
}
HOPWELL_DEVICE void write_visible(const PagedSelectParams& p, int* of_warp, const PagedRow& row,
                                  const indexer::RowCtas& ctas = {}) {
  if (ctas.rank == 0) note_count(p, row, indexer::write_existing(p, of_warp, row));
}

// The sortable key of absent_score() is 1. The sortable key of −inf is 0x007fffff.
HOPWELL_DEVICE bool selects_absent(const PagedSelectParams& /*p*/, uint32_t order) { return order < 0x007fffffU; }
HOPWELL_DEVICE uint32_t lowest_order(const PagedSelectParams& /*p*/) { return 1; }

inline PagedSelectParams select_params(const Problem& problem, const Plan& plan, const void* workspace,
                                       std::int64_t first, const unpaged::SelectPlan& select) {
  PagedSelectParams p{};
  p.scores = static_cast<const float*>(workspace), p.first_query = first, p.pitch = plan.problem.s_kv;
  p.indices = problem.indices.as<int>(), p.top_scores = problem.scores.as<float>();
  p.indices_stride_b = problem.indices.stride[0], p.indices_stride = problem.indices.stride[1];
  p.top_stride_b = problem.scores.stride[0], p.top_stride = problem.scores.stride[1];
  p.s_kv = static_cast<int>(plan.problem.s_kv), p.topk = static_cast<int>(problem.topk);
  p.warps = select.warps, p.bucket_bits = select.bucket_bits;
  p.positions = problem.positions, p.slots = problem.slots;
  p.lengths = problem.lengths.as<int>();
  p.lengths_stride_b = problem.lengths.stride[0], p.lengths_stride_i = problem.lengths.stride[1];
  return p;
}

}  // namespace hopwell::ops::paged_lightning_indexer::HOPWELL_TARGET
