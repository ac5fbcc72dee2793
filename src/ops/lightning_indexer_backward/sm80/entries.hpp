// lightning_indexer_backward by mma.sync: heads and the keys of entries as operands, for both kernels.
#pragma once

#include "ops/lightning_indexer_backward/params.hpp"
#include "tile/gpu/mma_tile.hpp"

namespace hopwell::ops::lightning_indexer_backward::HOPWELL_TARGET {

using tile::Chunk, tile::kColumnBlocks, tile::MmaRows, tile::MmaTile;

// 64 heads of a query from `first` on, over all threads of the CTA: calls visit(row, chunk number, chunk, weight).
template <class T, class Visit>
HOPWELL_DEVICE void for_each_chunk(const Params<T>& p, int query, int first, int threads, Visit visit) {
  for (int i = arch::thread_index(); i < kHeadTile * 4 * p.column_blocks; i += threads) {
    const int row = i / (4 * p.column_blocks), number = i - row * 4 * p.column_blocks, head = first + row;
    Chunk<kSplitTerms<T>> chunk{};
    float weight = 0;
    if (head < p.heads) {
      chunk = p.q.chunk(p.q.data + query * p.q_stride + head * p.q.stride, 8 * number);
      weight = tile::load_fp32(p.weights, p.weights_bf16, query * p.weights_stride + head);
    }
    visit(row, number, chunk, weight);
  }
}

// Loads rows g and g + 8 of this lane: the keys of two entries; zeros for an invalid entry.
template <class T>
HOPWELL_DEVICE void gather(const Params<T>& p, const int (&keys)[2], MmaRows<kSplitTerms<T>>& to) {
  HOPWELL_UNROLL
  for (int half = 0; half < 2; ++half) {
    const T* row = p.k.data + int64_t{keys[half] < 0 ? 0 : keys[half]} * p.k.stride;
    HOPWELL_UNROLL
    for (int block = 0; block < kColumnBlocks; ++block) {
      to.chunk[block][half] = keys[half] >= 0 && block < p.column_blocks
                                  ? p.k.chunk(row, 32 * block + 8 * tile::quad_lane())
                                  : Chunk<kSplitTerms<T>>{};
    }
  }
}

}  // namespace hopwell::ops::lightning_indexer_backward::HOPWELL_TARGET
