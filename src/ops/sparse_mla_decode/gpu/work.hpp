// sparse_mla_decode on GPUs by splits: the work of a CTA, the entries of its splits, and the addresses of their rows.
#pragma once

#include "ops/sparse_mla_decode/gpu/params.hpp"
#include "ops/sparse_mla_decode/gpu/rows.hpp"

namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET {

// The query, the splits and the tile of heads of a CTA. Computed again where they are needed, to save registers.
struct Work {
  int query;
  int split, splits;  // the first one, and how many
  int first_head;

  // heads: of a tile. Without it first_head is 0. block: index of the CTA.
  HOPWELL_DEVICE explicit Work(const SplitParams& p, int heads = 0, int block = arch::block_index()) {
    const int tile = block / p.ctas_of_query;
    query = p.first_query + tile / p.head_tiles;
    split = block % p.ctas_of_query * p.splits_of_cta;
    splits = p.splits - split < p.splits_of_cta ? p.splits - split : p.splits_of_cta;
    first_head = tile % p.head_tiles * heads;
  }
};

HOPWELL_DEVICE const bf16* query_of(const SplitParams& p, int query) {
  return p.q + query / p.q_len * p.q_stride[0] + query % p.q_len * p.q_stride[1];
}

// The entries of some splits of a query, in the first or in the second cache.
struct Entries {
  const unsigned char* data;  // of the cache
  int64_t stride;             // bytes from block to block
  const int* row;
  int count;
  PagedSlots<tile::Divisor> slots;

  // Of the splits of `work` from number `from` on that are in the same cache.
  HOPWELL_DEVICE Entries(const SplitParams& p, const Work& work, int from = 0) {
    const int query = work.query, split = work.split + from;
    const bool is_extra = split >= p.splits_of_keys;
    const Keys& keys = is_extra ? p.extra : p.keys;
    const PagedSelection& selection = keys.selection;
    const int64_t b = query / p.q_len, i = query - b * p.q_len;
    const int64_t first = (is_extra ? split - p.splits_of_keys : split) * p.keys_per_split,
                  left = selection.length(b, i) - first;
    data = keys.cache.data, stride = keys.cache.stride;
    row = selection.row(b, i) + first;
    slots = selection.slots(b, selection.visible(b, i), is_extra ? p.extra_block : p.block);
    int splits = work.splits - from;
    if (!is_extra && splits > p.splits_of_keys - split) splits = p.splits_of_keys - split;
    const int64_t most = splits * p.keys_per_split;
    count = int(left < 0 ? 0 : left < most ? left : most);
  }
  /// Entry `at`, or -1 if the splits end before it.
  HOPWELL_DEVICE int entry(uint32_t at) const { return at < uint32_t(count) ? row[at] : -1; }
};

// Where a slot's row lies: its data, and what is copied from a second address, its scales or its row of rope_cache.
template <class Row>
struct RowAddress {
  static constexpr bool kHasSecond = Row::kSecondBytes > 0 || Row::kMayHaveRopeCache;
  const unsigned char *data, *second;

  HOPWELL_DEVICE RowAddress(const SplitParams& p, const Entries& entries, int slot) {
    const tile::Divisor& rows = entries.slots.block;
    const int block = slot / rows, row = slot - block * rows;
    const unsigned char* of_block = entries.data + block * entries.stride;
    second = nullptr;
    if constexpr (Row::kMayHaveRopeCache) {
      const int pitch = p.rope_cache.data ? 2 * kDv : Row::kFormat.data_pitch;
      data = of_block + row * pitch;
      if (p.rope_cache.data) second = p.rope_cache.data + block * p.rope_cache.stride + row * (2 * (Row::kWidth - kDv));
    } else {
      data = of_block + int64_t{row} * Row::kFormat.data_pitch;
      if constexpr (Row::kSecondBytes > 0)
        second = of_block + int64_t{rows} * Row::kFormat.data_pitch + int64_t{row} * Row::kFormat.scale_pitch;
    }
  }
};

}  // namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET
