// paged_attention on GPUs: what one warp has of a row block.
#pragma once

#include "ops/paged_attention/gpu/params.hpp"

namespace hopwell::ops::paged_attention {

struct Segment {
  int sequence, tiles_before;  // tiles of one row block of each sequence before it, all together
  int tiles, row_block;        // tiles of a row block of this sequence; which of its row blocks
  int first, count;            // tiles of the row block
  int context;
  Keys keys;  // of the segment
  HOPWELL_DEVICE bool whole() const { return count == tiles; }
  HOPWELL_DEVICE bool ends() const { return first + count == tiles; }
  HOPWELL_DEVICE int64_t row_block_begin(const Params& p) const {
    return int64_t{tiles_before} * p.schedule.row_blocks + int64_t{row_block} * tiles;
  }
  // The rest of the row block from `tile` on, as far as `end`.
  HOPWELL_DEVICE void begin_at(const Params& p, int64_t tile, int64_t end) {
    const Keys all = keys_of_sequence(p, context);
    const int offset = int(tile - int64_t{tiles_before} * p.schedule.row_blocks);
    row_block = offset / tiles, first = offset - row_block * tiles;
    count = end - tile < tiles - first ? int(end - tile) : tiles - first;
    keys.begin = all.begin + first * p.schedule.tile;
    keys.end = smaller(all.end, keys.begin + count * p.schedule.tile);
  }
  // The one that follows, if the warp's range goes on until `end`.
  HOPWELL_DEVICE bool advance(const Params& p, int64_t end) {
    const int64_t tile = row_block_begin(p) + first + count;
    if (tile >= end) return false;
    while (tile >= (int64_t{tiles_before} + tiles) * p.schedule.row_blocks) {
      tiles_before += tiles, context = p.cache.context_of(++sequence);
      tiles = tiles_of(p, keys_of_sequence(p, context));
    }
    begin_at(p, tile, end);
    return true;
  }
};

}  // namespace hopwell::ops::paged_attention
