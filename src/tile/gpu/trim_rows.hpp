// Finds the length of index rows without the invalid entries at their ends. A query near the start of its document has
// fewer keys than topk, and the rest of its row is invalid. Kernels that know the length spend no time on the rest.
#pragma once

#include "tile/gpu/entries.hpp"
#include "tile/gpu/warp.hpp"

namespace hopwell::tile {

inline constexpr int kTrimThreads = 256, kRowsOfTrimCta = kTrimThreads / 32;

struct TrimParams {
  SelectionParams selection;  // with indices
  int* lengths;               // [s_q]: output
  int s_q;
};

// Number of entries up to the last valid one among the 32 · kRounds entries before `end`; 0 if none of them is valid.
// Executed by one warp.
template <int kRounds>
HOPWELL_DEVICE int length_among(const Entries& entries, int end) {
  int keys[kRounds], length = 0;
  HOPWELL_UNROLL
  for (int i = 0; i < kRounds; ++i) {
    const int at = end - 1 - 32 * i - arch::lane_index();
    keys[i] = at >= 0 ? entries.row[at] : -1;
  }
  HOPWELL_UNROLL
  for (int i = kRounds - 1; i >= 0; --i)
    if (entries.counts(keys[i])) length = end - 32 * i - arch::lane_index();
  return max_of_warp(length);
}

/// One warp per row. Most rows end with a valid entry, so a warp first looks at 32 entries, then at 256 at a time.
HOPWELL_DEVICE void trim_row(const TrimParams& p, int query) {
  if (query >= p.s_q) return;
  const Entries entries = entries_of(p.selection, query);
  int length = length_among<1>(entries, entries.length);
  HOPWELL_NO_UNROLL
  for (int end = entries.length - 32; length == 0 && end > 0; end -= 256) length = length_among<8>(entries, end);
  if (arch::lane_index() == 0) p.lengths[query] = length;
}

}  // namespace hopwell::tile
