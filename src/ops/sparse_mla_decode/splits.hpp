// sparse_mla_decode on GPUs by splits: how a query's splits are distributed to CTAs. On the host.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

namespace hopwell::ops::sparse_mla_decode {

// The approximate time of a CTA in clocks of an SM: its start and end, and 64 keys.
struct Clocks {
  std::int64_t of_cta, of_tile;
};

// The splits of a call.
struct SplitCounts {
  std::int64_t queries, h_q, head_tiles;  // head_tiles: of a query
  std::int64_t splits, keys_of_split;     // of a query; of a split, at most
  int sms;
  int clusters = 0;  // of `splits` CTAs that run at the same time; 0: the kernel cannot merge in a cluster
};

struct SplitsOfCtas {
  std::int64_t splits_of_cta = 1;
  bool in_cluster = false;  // one split a CTA, and the CTAs of a tile of heads are a cluster that merges its splits
};

// The distribution for which a call takes the least time, by the kernel's clocks. A CTA that has all splits of a query
// writes the output, and so does a cluster. Otherwise each CTA but a query's first one stores a partial result of each
// of its splits, and the merge kernel follows.
inline SplitsOfCtas distribute_splits(const SplitCounts& counts, const Clocks& of) {
  // Clocks of the merge kernel's launch, and of a merge in a cluster (H200).
  constexpr std::int64_t kMerge = 7000, kClusterMerge = 3500;
  constexpr std::int64_t kBytesOfClock = 2600, kBytesOfHead = 2 * 512 * 4;  // written and read (H200)
  constexpr std::int64_t kAll = 16;  // up to 16 CTAs every number is tried; above, each is 3/4 of the last
  const std::int64_t tiles = counts.queries * counts.head_tiles,
                     of_split = std::max<std::int64_t>((counts.keys_of_split + 63) / 64, 1) * of.of_tile;
  const auto waves = [](std::int64_t parts, std::int64_t at_once) { return (parts + at_once - 1) / at_once; };
  SplitsOfCtas best;
  std::int64_t least = std::numeric_limits<std::int64_t>::max();
  const auto consider = [&](SplitsOfCtas plan, std::int64_t clocks) {
    if (clocks < least) best = plan, least = clocks;
  };
  for (std::int64_t most_ctas = counts.splits; most_ctas > 0;
       most_ctas = most_ctas > kAll ? most_ctas * 3 / 4 : most_ctas - 1) {
    const std::int64_t splits = (counts.splits + most_ctas - 1) / most_ctas,
                       ctas = (counts.splits + splits - 1) / splits,
                       stored = counts.queries * counts.h_q * (1 + counts.splits - splits) * kBytesOfHead,
                       merge = ctas == 1 ? 0 : kMerge + stored / kBytesOfClock;
    consider({splits, false}, waves(tiles * ctas, counts.sms) * (of.of_cta + splits * of_split) + merge);
  }
  // The emulator has room for more clusters than its SMs could hold.
  const std::int64_t clusters = std::min<std::int64_t>(counts.clusters, counts.sms / counts.splits);
  if (clusters > 0) consider({1, true}, waves(tiles, clusters) * (of.of_cta + of_split + kClusterMerge));
  return best;
}

}  // namespace hopwell::ops::sparse_mla_decode
