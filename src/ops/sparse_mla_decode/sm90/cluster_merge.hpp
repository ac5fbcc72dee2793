// The kernels of sparse_mla_decode for Hopper: a cluster merges the splits of a tile of heads. Each CTA has one split.
//
//     CTA 0   store its result │ cluster barrier │ merge columns of all results, store the output │ cluster barrier
//     CTA 1   store its result │                 │ merge other columns …                         │
//
// A CTA's result overwrites its key stages in shared memory. Splits merge in the order of the merge kernel, with the
// same bits.
#pragma once

#include <cstddef>

#include "ops/sparse_mla_decode/sm90/key_tiles.hpp"

namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET {

// Rows are 64 bytes longer than a multiple of 128, so that two rows have the same columns in different banks.
template <int kHeads>
struct SplitResult {
  static constexpr int kPitch = kDv + 16;
  alignas(16) float out[kHeads][kPitch];
  Stats stats[kHeads];
};

#if HOPWELL_HAS_SM90A

// Executed by the CTA's first kReaders threads. The other threads have exited or will exit.
template <class Config>
HOPWELL_DEVICE void merge_in_cluster(const SplitParams& p, const SplitResult<Config::kHeads>& own) {
  using Result = SplitResult<Config::kHeads>;
  constexpr int kMost = kMostOfCluster, kQuads = kDv / 4;
  arch::cluster_sync();
  const Work work(p, Config::kHeads);
  const uint32_t here = arch::shared_address(&own);
  HOPWELL_NO_UNROLL
  for (int i = work.split * Config::kReaders + arch::thread_index(); i < Config::kHeads * kQuads;
       i += p.splits * Config::kReaders) {
    const int of_tile = i / kQuads, column = i % kQuads * 4, head = work.first_head + of_tile;
    if (head >= p.h_q) break;
    Stats split[kMost];
    arch::Words4 values[kMost];
    HOPWELL_UNROLL
    for (int n = 0; n < kMost; ++n) {
      split[n] = {}, values[n] = {};
      if (n >= p.splits) continue;
      const uint32_t at = arch::map_to_rank(here, uint32_t(n)),
                     stats = at + uint32_t(offsetof(Result, stats) + of_tile * sizeof(Stats));
      split[n] = {arch::bit_cast<float>(arch::load_cluster(stats)),
                  arch::bit_cast<float>(arch::load_cluster(stats + 4))};
      values[n] = arch::load_cluster_v4(at + uint32_t(of_tile * Result::kPitch + column) * 4);
    }
    MergedColumns merged;
    HOPWELL_UNROLL
    for (int n = 0; n < kMost; ++n) merged.add(split[n], values[n]);
    merged.store(p, work.query, head, column);
  }
  arch::cluster_sync();  // the other CTAs have read this one's result
}

#endif

}  // namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET
