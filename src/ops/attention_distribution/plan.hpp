// attention_distribution on GPUs: work tiles of the CTAs. Made on the host, read by the kernels.
#pragma once

#include "arch/platform.hpp"
#include "ops/attention_distribution/op.hpp"
#include "runtime/workspace.hpp"

namespace hopwell::ops::attention_distribution {

inline constexpr int kTileKeys = 64, kTileHeads = 64, kHeadsAtATime = 2 * kTileHeads;
inline constexpr int kThrottleTiles = 4;  // tiles of keys between two reads of the throttle's progress

// CTA b processes work tiles b, b + ctas, b + 2 ctas, … In full waves of CTAs a work tile is a whole query. The index
// rows of the remaining queries are split, so that no CTA idles.
struct Plan {
  int whole_queries;  // the first queries
  int splits;         // splits of the row of each other query
  int split_entries;  // entries of a split; the last split may be shorter
  int work_tiles;     // total number
  int ctas;
  bool alternate;  // all heads fit in one tile, which both warpgroups have; they alternate between tiles of keys
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

// For kernels that sort rows: keys in ascending order, descending in every other wave of queries (serpentine order),
// and throttled CTAs. If the keys do not fit in L2, CTAs then share the keys that a CTA has read,
// and a wave begins with the last keys of the previous wave. The bits of a sum do not depend on it. Offsets are in the
// workspace.
struct Ordering {
  bool orders_rows = false, throttles = false;
  int steps = 0;                                   // of a query: a step is kThrottleTiles tiles of keys
  std::size_t rows = 0, sources = 0, lengths = 0;  // see tile/gpu/order_rows.hpp
  std::size_t progress = 0;                        // sum of the steps of all CTAs
  std::size_t bytes = 0;
};
Ordering ordering_of(const Problem& problem);

// The plan of a call by kernels that sort rows. A launch without a workspace keeps the order of the rows.
struct OrderedPlan {
  Plan tiles;
  Ordering ordering;
  std::size_t workspace_bytes;
};

}  // namespace hopwell::ops::attention_distribution
