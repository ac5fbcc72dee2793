// paged_attention on GPUs: a segment is the part of a row block that one warp computes.
#pragma once

#include "ops/paged_attention/gpu/params.hpp"

namespace hopwell::ops::paged_attention {

struct Segment {
  int sequence, tiles_before;  // tiles of one row block of each earlier sequence, summed
  int tiles, row_block;        // tiles of a row block of this sequence; index of the row block in the sequence
  int first, count;            // first tile within the row block; number of tiles
  int context;
  Keys keys;  // keys of the segment
  HOPWELL_DEVICE bool whole() const { return count == tiles; }
  HOPWELL_DEVICE bool ends() const { return first + count == tiles; }
  HOPWELL_DEVICE int64_t row_block_begin(const Params& p) const {
    return int64_t{tiles_before} * p.schedule.row_blocks + int64_t{row_block} * tiles;
  }
  // Sets the segment to the row block of `tile`, from `tile` to its end or to `end`.
  HOPWELL_DEVICE void begin_at(const Params& p, int64_t tile, int64_t end) {
    const Keys all = keys_of_sequence(p, context);
    const int offset = int(tile - int64_t{tiles_before} * p.schedule.row_blocks);
    row_block = offset / tiles, first = offset - row_block * tiles;
    count = end - tile < tiles - first ? int(end - tile) : tiles - first;
    keys.begin = all.begin + first * p.schedule.tile;
    keys.end = smaller(all.end, keys.begin + count * p.schedule.tile);
  }
  // Moves to the next segment, if the warp's range up to `end` has one.
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
