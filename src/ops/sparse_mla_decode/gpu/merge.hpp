// sparse_mla_decode on GPUs: merges the partial results of each query, one by one in ascending order of their splits.
// The partial result of split 0 may be of several splits, which their CTA has merged.
//
//     out = (((split 0 + split 1) + split 2) + …) / sum
//
// Tile      one head of one query; a thread has four columns
// Roles     all warps are alike. Every thread merges the statistics for itself
// Timeline  statistics of 8 splits │ outputs of those that have keys │ merge │ the next 8 splits …
// Bound     latency: two dependent loads for 8 splits. The launch begins while the split kernel still runs
#pragma once

#include "ops/sparse_mla_decode/gpu/params.hpp"
#include "tile/gpu/dependency.hpp"

namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET {

struct MergeConfig {
  static constexpr int kThreads = kDv / 4, kUnroll = 8;
};

__global__ void __launch_bounds__(MergeConfig::kThreads)
    sparse_mla_decode_merge(const __grid_constant__ SplitParams p) {
  constexpr int kUnroll = MergeConfig::kUnroll;
  const int head = arch::block_index() % p.h_q, query = p.first_query + arch::block_index() / p.h_q;
  const int column = 4 * arch::thread_index();
  tile::wait_for_prior_kernels();
  MergedColumns merged;
  HOPWELL_NO_UNROLL
  for (int first = 0; first < p.splits; first += kUnroll) {
    Stats split[kUnroll];
    arch::Words4 values[kUnroll];
    HOPWELL_UNROLL
    for (int i = 0; i < kUnroll; ++i) {
      if (first + i >= p.splits) continue;
      const int64_t at = partial_row(p, query, first + i) + head;
      split[i] = arch::bit_cast<Stats>(p.partial_stats[at]);
      values[i] = {};
      if (split[i].sum != 0) values[i] = arch::load_vector<arch::Words4>(p.partial_out + at * kDv + column);
    }
    HOPWELL_UNROLL
    for (int i = 0; i < kUnroll; ++i) merged.add(split[i], values[i]);
  }
  merged.store(p, query, head, column);
}

}  // namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET
