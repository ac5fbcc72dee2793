// sparse_mla_decode on GPUs by splits: how a query's splits are distributed to CTAs. On the host.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "tile/ceil_div.hpp"

namespace hopwell::ops::sparse_mla_decode {

// The approximate time of a CTA in clocks of an SM: its start and end, and 64 keys.
struct Clocks {
  std::int64_t of_cta, of_tile;
};

// The splits of a call.
struct SplitCounts {
  std::int64_t queries, h_q;
  std::int64_t head_tiles, splits;  // per query
  std::int64_t keys_of_split;       // at most
  int sms;
  int clusters = 0;    // clusters of `splits` CTAs that run at the same time; 0: the kernel cannot merge in a cluster
  bool merges = true;  // a CTA merges its splits
};

struct SplitsOfCtas {
  std::int64_t splits_of_cta = 1;
  bool in_cluster = false;  // one split a CTA, and the CTAs of a tile of heads are a cluster that merges its splits
};

// The distribution for which a call takes the least time, by the kernel's clocks. A CTA that has all splits of a query
// writes the output, and so does a cluster. Otherwise each CTA but a query's first one stores a partial result of each
// of its splits, and the merge kernel follows. If CTAs do not merge, all of them do so for two splits or more.
inline SplitsOfCtas distribute_splits(const SplitCounts& counts, const Clocks& of) {
  // Clocks of the merge kernel's launch, and of a merge in a cluster (H200).
  constexpr std::int64_t kMerge = 7000, kClusterMerge = 3500;
  constexpr std::int64_t kBytesOfClock = 2600, kBytesOfHead = 2 * 512 * 4;  // written and read (H200)
  const std::int64_t tiles = counts.queries * counts.head_tiles,
                     of_split = std::max<std::int64_t>(tile::ceil_div(counts.keys_of_split, 64), 1) * of.of_tile;
  SplitsOfCtas best;
  std::int64_t least = std::numeric_limits<std::int64_t>::max();
  const auto consider = [&](SplitsOfCtas plan, std::int64_t clocks) {
    if (clocks < least) best = plan, least = clocks;
  };
  // All numbers of CTAs, each with the fewest splits per CTA.
  for (std::int64_t ctas = counts.splits; ctas > 0; --ctas) {
    const std::int64_t splits = tile::ceil_div(counts.splits, ctas);
    ctas = tile::ceil_div(counts.splits, splits);
    const std::int64_t stored_splits = counts.merges ? 1 + counts.splits - splits : counts.splits,
                       stored = counts.queries * counts.h_q * stored_splits * kBytesOfHead,
                       merge = stored_splits == 1 ? 0 : kMerge + stored / kBytesOfClock;
    consider({splits, false}, tile::ceil_div(tiles * ctas, counts.sms) * (of.of_cta + splits * of_split) + merge);
  }
  // The emulator has room for more clusters than its SMs could hold.
  const std::int64_t clusters = std::min<std::int64_t>(counts.clusters, counts.sms / counts.splits);
  if (clusters > 0) consider({1, true}, tile::ceil_div(tiles, clusters) * (of.of_cta + of_split + kClusterMerge));
  return best;
}

}  // namespace hopwell::ops::sparse_mla_decode
