// paged_attention on GPUs: how the work is shared out between CTAs and warps.
//
// A row block is what a CTA works on at a time: `heads` neighbouring KV heads of a sequence, whose keys lie side by
// side in memory, and `queries` of the query vectors that share each of them. The row blocks of a sequence are equally
// long, and all row blocks lie end to end on a line of key tiles:
//
//     sequence 0            sequence 1                                          sequence 2
//     block 0 │ block 1     block 0             │ block 1                       block 0 │ block 1
//     ▓▓▓▓▓▓▓▓│▓▓▓▓▓▓▓▓     ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓│▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓          ▓▓▓▓    │▓▓▓▓
//     └── CTA 0 ───┘└── CTA 1 ───┘└── CTA 2 ───┘└── CTA 3 ──┘└── …
//
// Each CTA takes an equal share, and each of its warps an equal part of that, so one long sequence among short ones is
// as good as many equal ones. They find their shares from the lengths, inside the kernel (partition.hpp): a captured
// graph follows lengths that change. If the row blocks of a small batch are all equally long and nearly a multiple of
// the CTAs in number, each CTA takes whole ones and has nothing to hand over.
#pragma once

#include "ops/paged_attention/gpu/scalars.hpp"

namespace hopwell::arch {
struct Words4;
}

namespace hopwell::ops::paged_attention {

constexpr int kMaxWarps = 8, kMaxThreads = 32 * kMaxWarps;
constexpr int kPieceBytes = 32 * 3 * 16;  // of what is handed over, four values a lane: handover.hpp
// Of a CTA that takes whole row blocks: the end of a call, which they shorten, matters less in longer ones.
constexpr int kMaxTilesOfWholeBlocks = 1100;

struct Schedule {
  arch::Words4* partials;  // [CTAs, pieces, chunks of a lane, 32]: what CTAs hand over (handover.hpp)
  uint32_t tag[2];         // of this launch's partial results: random, so that nothing else looks like one
  Divisor heads, queries, passes, row_blocks;  // of a row block; passes of `queries`; row blocks of a sequence
  Divisor lanes;                               // that share a key
  Divisor tile;                                // keys
  Divisor pairs;                               // of values of a row block
  Divisor pieces;                              // of a row block's result, four values a lane of a warp
  int merge_groups;                            // groups of warps of a CTA that have a warp for each piece
  Divisor warps, ctas;                         // warps of a CTA
  Divisor abreast;                             // warps that walk along the same keys, each for a head of the row block
  Divisor shares;                              // of a CTA's tiles: warps / abreast; `shares` warps have the first head
  int whole_blocks;                            // row blocks of a CTA if all are equally long; 0: no whole number
  int threads;                                 // of a CTA
  int sequences_per_thread;                    // whose lengths it adds up
  bool partition_by_warp;                      // each warp finds the shares by itself
};

// The line of tiles, cut into the shares of the CTAs.
struct Partition {
  int64_t tiles,
      share;  // of all CTAs, of one; the first `extra` CTAs have one more, and some of the last may have none
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

// Equal shares, but at least a tile for each warp of a CTA as long as there are any.
HOPWELL_HOST_DEVICE Partition partition_of(const Schedule& schedule, int64_t tiles) {
  Partition partition{tiles, schedule.shares, 0};
  if (tiles < int64_t{schedule.ctas} * schedule.shares) return partition;
  partition.share = tiles >> 31 ? tiles / schedule.ctas.value : int(tiles) / schedule.ctas;
  partition.extra = int(tiles - partition.share * schedule.ctas);
  return partition;
}

// Whether CTAs take whole row blocks if all are equally long.
HOPWELL_HOST_DEVICE bool may_take_whole_blocks(const Schedule& schedule, const Partition& partition) {
  return schedule.whole_blocks > 0 && partition.share > schedule.shares && partition.share <= kMaxTilesOfWholeBlocks;
}

// A range of tiles on the line: of a CTA, or a warp's share of it.
struct TileRange {
  int64_t begin, end;
  HOPWELL_HOST_DEVICE TileRange of_share(int share, const Divisor& shares) const {
    const int count = int(end - begin), each = count / shares, more = count - each * shares;
    const int64_t first = begin + share * each + smaller(share, more);
    return {first, first + each + (share < more ? 1 : 0)};
  }
};

}  // namespace hopwell::ops::paged_attention
