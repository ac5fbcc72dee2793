// attention_distribution on GPUs: what each CTA works on. Made on the host, read by the kernels.
#pragma once

#include "arch/platform.hpp"
#include "ops/attention_distribution/op.hpp"

namespace hopwell::ops::attention_distribution {

inline constexpr int kTileKeys = 64, kTileHeads = 64, kHeadsAtATime = 2 * kTileHeads;
inline constexpr int kPaceTiles = 4;  // of keys, between two looks at the pace

// CTA b takes work tiles b, b + ctas, b + 2 ctas, … Whole rounds of CTAs take whole queries; the index rows of the
// queries that are left are split, so that no CTA idles.
struct Plan {
  int whole_queries;  // the first ones
  int splits;         // of the row of each other query
  int split_entries;  // of one, unless the row ends before
  int work_tiles;     // in all
  int ctas;
  bool alternate;  // all heads fit into a tile, which both warpgroups have: they take turns at tiles of keys
};
Plan plan_of(const Problem& problem);

// Entries first … first + size − 1 of a query's row.
struct WorkTile {
  int query, first, size;
};
HOPWELL_HOST_DEVICE WorkTile work_tile_of(const Plan& plan, int topk, int number) {
  WorkTile work{number, 0, topk};
  if (number >= plan.whole_queries) {
    const int split = number - plan.whole_queries;
    work.query = plan.whole_queries + split / plan.splits;
    work.first = split % plan.splits * plan.split_entries;
    const int left = topk - work.first;
    work.size = left < plan.split_entries ? left : plan.split_entries;
  }
  return work;
}

// Keys in ascending order, in every other wave of queries in descending order, and CTAs at one pace, for the kernels
// that go through them so: where the keys do not fit in L2, what one CTA has read is then still there for the others,
// and what a wave has read last for the next. A sum's bits do not depend on it. Offsets are in the workspace.
struct Ordering {
  bool orders_rows = false, paces = false;
  int steps = 0;                                   // of a query: kPaceTiles tiles of keys
  std::size_t rows = 0, sources = 0, lengths = 0;  // see tile/gpu/order_rows.hpp
  std::size_t progress = 0;                        // steps that CTAs have made
  std::size_t bytes = 0;
};
Ordering ordering_of(const Problem& problem);

}  // namespace hopwell::ops::attention_distribution
