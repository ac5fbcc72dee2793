// paged_attention on GPUs: division of the work between CTAs and warps.
//
// A row block is the unit of work of a CTA: `heads` neighbouring KV heads of a sequence, whose keys are contiguous in
// memory, and `queries` of the query vectors that share each KV head. The row blocks of a sequence are equally long.
// All row blocks lie end to end on a line of key tiles:
//
//     sequence 0            sequence 1                                          sequence 2
//     block 0 │ block 1     block 0             │ block 1                       block 0 │ block 1
//     ▓▓▓▓▓▓▓▓│▓▓▓▓▓▓▓▓     ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓│▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓          ▓▓▓▓    │▓▓▓▓
//     └── CTA 0 ───┘└── CTA 1 ───┘└── CTA 2 ───┘└── CTA 3 ──┘└── …
//
// Each CTA computes an equal share of the line, and each of its warps an equal part of that, so one long sequence among
// short ones is as fast as many equal ones. The kernel computes the shares from the lengths (partition.hpp), so a
// captured graph follows lengths that change. If the row blocks of a small batch are all equally long and their number
// is nearly a multiple of the number of CTAs, each CTA computes whole row blocks and publishes no partial result.
#pragma once

#include "ops/paged_attention/gpu/scalars.hpp"

namespace hopwell::arch {
struct Words4;
}

namespace hopwell::ops::paged_attention {

constexpr int kMaxWarps = 8, kMaxThreads = 32 * kMaxWarps;
constexpr int kPieceBytes = 32 * 3 * 16;  // bytes of a piece of a partial result, four values per lane: combine.hpp
// Most tiles of a CTA that computes whole row blocks: they shorten the end of a call, which matters less in long calls.
constexpr int kMaxTilesOfWholeBlocks = 1100;

struct Schedule {
  arch::Words4* partials;  // [CTAs, pieces, chunks of a lane, 32]: partial results of CTAs (combine.hpp)
  uint32_t tag[2];         // of this launch's partial results: random, so that stale memory does not match it
  Divisor heads, queries, passes, row_blocks;  // per row block; passes over `queries`; row blocks of a sequence
  Divisor lanes;                               // lanes that share a key
  Divisor tile;                                // keys of a tile
  Divisor pairs;                               // pairs of values of a row block
  Divisor pieces;                              // pieces of a row block's result, four values per lane of a warp
  int merge_groups;                            // groups of warps of a CTA that have a warp for each piece
  Divisor warps, ctas;                         // warps per CTA, CTAs
  Divisor interleaved_heads;                   // warps that read the same keys, each for one head of a row block
  Divisor shares;            // shares of a CTA: warps / interleaved_heads; `shares` warps have the first head
  int whole_blocks;          // row blocks of a CTA if all are equally long; 0: no whole number
  int threads;               // per CTA
  int sequences_per_thread;  // sequences whose lengths a thread adds
  bool partition_by_warp;    // each warp computes its share by itself
};

// The line of tiles, divided into the shares of the CTAs.
struct Partition {
  int64_t tiles,
      share;  // tiles of all CTAs, of one; the first `extra` CTAs have one more, and some of the last may be empty
  int extra;
  HOPWELL_HOST_DEVICE int64_t first_tile(int cta) const {
    const int64_t tile = cta * share + smaller(cta, extra);
    return tile < tiles ? tile : tiles;
  }
  HOPWELL_HOST_DEVICE int cta_of(int64_t tile) const {
    const int64_t longer = extra * (share + 1);
    return int(tile < longer ? quotient(tile, share + 1) : extra + quotient(tile - longer, share));
  }
};

// Equal shares. If there are enough tiles, each warp of a CTA has at least one.
HOPWELL_HOST_DEVICE Partition partition_of(const Schedule& schedule, int64_t tiles) {
  Partition partition{tiles, schedule.shares, 0};
  if (tiles < int64_t{schedule.ctas} * schedule.shares) return partition;
  partition.share = tiles >> 31 ? tiles / schedule.ctas.value : int(tiles) / schedule.ctas;
  partition.extra = int(tiles - partition.share * schedule.ctas);
  return partition;
}

// True if CTAs compute whole row blocks when all are equally long.
HOPWELL_HOST_DEVICE bool may_take_whole_blocks(const Schedule& schedule, const Partition& partition) {
  return schedule.whole_blocks > 0 && partition.share > schedule.shares && partition.share <= kMaxTilesOfWholeBlocks;
}

// Range of tiles on the line: of a CTA, or of a warp's share.
struct TileRange {
  int64_t begin, end;
  HOPWELL_HOST_DEVICE TileRange of_share(int share, const Divisor& shares) const {
    const int count = int(end - begin), each = count / shares, more = count - each * shares;
    const int64_t first = begin + share * each + smaller(share, more);
    return {first, first + each + (share < more ? 1 : 0)};
  }
};

}  // namespace hopwell::ops::paged_attention
