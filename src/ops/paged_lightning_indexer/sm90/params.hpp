// paged_lightning_indexer for Hopper: parameters of the score kernels, and boxes of keys.
//
// The copy engine loads keys in boxes of up to 64 rows of one block. A page that does not exist has a coordinate
// outside of the cache, for which the engine writes zeros and reads nothing.
#pragma once

#include "arch/sm90/bulk_copy.hpp"
#include "ops/lightning_indexer/sm90/score.hpp"
#include "ops/paged_lightning_indexer/score_work.hpp"

namespace hopwell::ops::paged_lightning_indexer::HOPWELL_TARGET {

using SequenceTask = PagedScoreParams<indexer::ScoreTask>;

template <class T>
struct Sm90Params {
  SequenceTask task;
  arch::TensorMap q, k;  // [b, q_len, h_index, d_index]; keys [blocks, block, d_index] in boxes of box_rows rows
  int box_rows;
};

// A box of keys. A page that does not exist is -1.
struct Box {
  int page, row;  // of the page
};
HOPWELL_DEVICE Box box_of(const PagedKeys& p, int first, int end) {
  const CachePage page = page_of(p, first, first < end);
  return {page.exists ? page.number : -1, page.row};
}

// Copies the scales of a box whose page exists. The caller announces their box_rows · 4 bytes on `full`.
template <class T>
HOPWELL_DEVICE void copy_scales(const Sm90Params<T>& p, float* to, const Box& box, arch::mbarrier& full) {
  arch::bulk_load(
      arch::shared_address(to),
      reinterpret_cast<const float*>(p.task.cache + box.page * p.task.block_stride + p.task.scales) + box.row,
      uint32_t(p.box_rows) * uint32_t(sizeof(float)), full);
}
// Copies the rows of a box, or zeros, to a panel's rows at `to`.
template <class T>
HOPWELL_DEVICE void copy_rows(const Sm90Params<T>& p, uint32_t to, int column, const Box& box, arch::mbarrier& full) {
  arch::tma_load<3>(to, p.k, {column, box.row, box.page >= 0 ? box.page : int(p.task.positions.blocks)}, full);
}

}  // namespace hopwell::ops::paged_lightning_indexer::HOPWELL_TARGET
