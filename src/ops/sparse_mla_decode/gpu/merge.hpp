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

HOPWELL_DEVICE void store_merged(const SplitParams& p, int query, int head, const float (&sums)[4], float factor) {
  const int64_t at = row_of_out(p, query, head) + 4 * arch::thread_index();
  float values[4];
  HOPWELL_UNROLL
  for (int i = 0; i < 4; ++i) values[i] = final_value(sums[i], factor);
  if (p.out_is_fp32) {
    HOPWELL_UNROLL
    for (int i = 0; i < 4; ++i) static_cast<float*>(p.out)[at + i] = values[i];
  } else {
    auto* out = reinterpret_cast<uint32_t*>(static_cast<bf16*>(p.out) + at);
    out[0] = arch::pack_bf16(values[0], values[1]), out[1] = arch::pack_bf16(values[2], values[3]);
  }
}

__global__ void __launch_bounds__(MergeConfig::kThreads)
    sparse_mla_decode_merge(const __grid_constant__ SplitParams p) {
  constexpr int kUnroll = MergeConfig::kUnroll;
  const int head = arch::block_index() % p.h_q, query = arch::block_index() / p.h_q;
  tile::wait_for_prior_kernels();
  Stats stats;
  float sums[4] = {};
  HOPWELL_NO_UNROLL
  for (int first = 0; first < p.splits; first += kUnroll) {
    Stats split[kUnroll];
    arch::Words4 values[kUnroll];
    HOPWELL_UNROLL
    for (int i = 0; i < kUnroll; ++i) {
      if (first + i >= p.splits) continue;
      const int64_t at = partial_row(p, p.first_query + query, first + i) + head;
      split[i] = arch::bit_cast<Stats>(p.partial_stats[at]);
      values[i] = {};
      if (split[i].sum != 0)
        values[i] = arch::load_vector<arch::Words4>(p.partial_out + at * kDv + 4 * arch::thread_index());
    }
    HOPWELL_UNROLL
    for (int i = 0; i < kUnroll; ++i) {
      if (split[i].sum == 0) continue;
      const MergeFactors factors = merge_stats(stats, split[i]);
      HOPWELL_UNROLL
      for (int n = 0; n < 4; ++n) sums[n] = merge_values(sums[n], arch::bit_cast<float>(values[i].w[n]), factors);
    }
  }
  const float factor = finish_head(p, p.first_query + query, head, stats, arch::thread_index() == 0);
  store_merged(p, p.first_query + query, head, sums, factor);
}

}  // namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET
