// sparse_mla_decode on GPUs by splits: how many splits of a query a CTA has. On the host.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

namespace hopwell::ops::sparse_mla_decode {

// About how many clocks a CTA of a kernel takes: for its start and end, and for 64 keys.
struct Clocks {
  std::int64_t of_cta, of_tile;
};

// The splits of a call.
struct SplitCounts {
  std::int64_t queries, h_q, head_tiles;  // head_tiles: of a query
  std::int64_t splits, keys_of_split;     // of a query; of a split, at most
  int sms;
};

// The number of splits of a CTA for which a call takes the least time, by the kernel's clocks: 1 to counts.splits. A
// CTA that has all splits of a query writes the output. Otherwise each CTA but a query's first one stores a partial
// result of each of its splits, and the merge kernel follows.
inline std::int64_t splits_of_cta(const SplitCounts& counts, const Clocks& of) {
  constexpr std::int64_t kMerge = 7000;  // clocks of the merge kernel's launch (H200)
  constexpr std::int64_t kBytesOfClock = 2600, kBytesOfHead = 2 * 512 * 4;  // written and read (H200)
  constexpr std::int64_t kAll = 16;  // up to 16 CTAs every number is tried; above, each is 3/4 of the last
  const std::int64_t of_split = std::max<std::int64_t>((counts.keys_of_split + 63) / 64, 1) * of.of_tile;
  std::int64_t best = counts.splits, least = std::numeric_limits<std::int64_t>::max();
  for (std::int64_t most_ctas = counts.splits; most_ctas > 0;
       most_ctas = most_ctas > kAll ? most_ctas * 3 / 4 : most_ctas - 1) {
    const std::int64_t splits = (counts.splits + most_ctas - 1) / most_ctas,
                       ctas = (counts.splits + splits - 1) / splits,
                       waves = (counts.queries * counts.head_tiles * ctas + counts.sms - 1) / counts.sms,
                       stored = counts.queries * counts.h_q * (1 + counts.splits - splits) * kBytesOfHead,
                       merge = ctas == 1 ? 0 : kMerge + stored / kBytesOfClock,
                       clocks = waves * (of.of_cta + splits * of_split) + merge;
    if (clocks < least) best = splits, least = clocks;
  }
  return best;
}

}  // namespace hopwell::ops::sparse_mla_decode
