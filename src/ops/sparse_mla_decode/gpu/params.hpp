// sparse_mla_decode on GPUs by splits: kernel parameters, the order in which splits merge, and a query's final values.
#pragma once

#include <cmath>

#include "arch/sm80/memory.hpp"
#include "ops/sparse_mla_decode/op.hpp"
#include "tile/divisor.hpp"
#include "tile/gpu/numbers.hpp"
#include "tile/gpu/softmax.hpp"

namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET {

using arch::bf16;

constexpr int kDv = 512;
constexpr int kMostOfCluster = 8;  // CTAs

// Parameters of the split kernel and of the merge kernel. A query is token `query mod q_len` of sequence
// `query div q_len`.
struct SplitParams {
  Keys keys, extra;
  mla_cache::Blocks rope_cache;                                    // data is null if it is absent
  const bf16* q;                                                   // [b, q_len, h_q, d_qk]
  void* out;                                                       // bf16 or fp32 [b, q_len, h_q, 512]
  float* lse;                                                      // [b, q_len, h_q], or null
  const float* attn_sink;                                          // [h_q], or null
  const float* kv_scale;                                           // on the device, or null: kv_scale_value
  int64_t q_stride[3], out_stride[3], lse_stride[3], sink_stride;  // elements
  float kv_scale_value, scale_log2;                                // sm_scale · log2(e)
  bool out_is_fp32;
  int h_q;
  tile::Divisor head_tiles, q_len, block, extra_block;  // block: rows of a block of the cache
  int splits, splits_of_keys;                           // of a query; of the first cache
  int64_t keys_per_split;
  int first_query;              // of this launch
  tile::Divisor ctas_of_query;  // for a tile of heads
  int splits_of_cta;            // a query's last CTA may have fewer
  bool merges_in_cluster;       // the CTAs of a tile of heads are a cluster, each has one split: sm90/cluster_merge.hpp
  // Partial results: Σ p · v [queries of a launch, splits, h_q, 512]; row_max and Σ p [queries of a launch, splits,
  // h_q]. Where Σ p is 0, Σ p · v is not read and need not be written. A CTA that merges its splits stores the result
  // as the first one's, and a Σ p of 0 for the others.
  float* partial_out;
  arch::Words2* partial_stats;

  [[nodiscard]] HOPWELL_DEVICE float kv_scale_factor() const { return kv_scale ? *kv_scale : kv_scale_value; }
};

// The softmax of some of a head's keys: row_max in units of log 2, and Σ exp2(score − row_max). A sum of 0: no keys, or
// scores of −∞ alone.
struct Stats {
  float row_max = -INFINITY, sum = 0;
};

// Merges the statistics of a later split. Returns the factors of the outputs so far and of the later ones.
struct MergeFactors {
  float earlier, later;
};
HOPWELL_DEVICE MergeFactors merge_stats(Stats& stats, const Stats& later) {
  if (later.sum == 0) return {1, 0};
  if (stats.sum == 0) {
    stats = later;
    return {0, 1};
  }
  const float row_max = fmaxf(stats.row_max, later.row_max), base = tile::finite_row_max(row_max);
  const MergeFactors f{arch::exp2_approx(stats.row_max - base), arch::exp2_approx(later.row_max - base)};
  stats = {row_max, fmaf(later.sum, f.later, tile::rescaled(stats.sum, f.earlier))};
  return f;
}

// The factor of a head's output Σ p · v; stores the head's lse if `stores`.
HOPWELL_DEVICE float finish_head(const SplitParams& p, int query, int head, const Stats& stats, bool stores) {
  const float lse = tile::lse_of(stats.row_max, stats.sum);
  if (stores && p.lse)
    p.lse[query / p.q_len * p.lse_stride[0] + query % p.q_len * p.lse_stride[1] + head * p.lse_stride[2]] = lse;
  if (stats.sum == 0) return 0;
  float factor = 1 / stats.sum;
  if (p.attn_sink) factor /= tile::sink_divisor(p.attn_sink[head * p.sink_stride], lse);
  return factor * p.kv_scale_factor();
}

// Merges an element of the output of a later split with the output so far. An output whose factor is 0 adds nothing,
// not even NaN: it may have no keys, or scores of −∞ alone.
HOPWELL_DEVICE float merge_values(float earlier, float later, const MergeFactors& f) {
  const float kept = f.earlier == 0 ? 0 : tile::rescaled(earlier, f.earlier);
  return f.later == 0 ? kept : fmaf(later, f.later, kept);
}

// Row of partial_out and partial_stats of a query's first head, for split `split`.
HOPWELL_DEVICE int64_t partial_row(const SplitParams& p, int query, int split) {
  return (int64_t{query - p.first_query} * p.splits + split) * p.h_q;
}

// Element `column` of a head's output; its row begins at row_of_out().
HOPWELL_DEVICE int64_t row_of_out(const SplitParams& p, int query, int head) {
  return query / p.q_len * p.out_stride[0] + query % p.q_len * p.out_stride[1] + head * p.out_stride[2];
}
// The product of a sum and its head's factor. A factor of 0 stands for no keys, or for an infinite sink.
HOPWELL_DEVICE float final_value(float sum, float factor) { return factor == 0 ? 0 : sum * factor; }

// Four columns of a head, merged split by split.
struct MergedColumns {
  Stats stats;
  float sums[4] = {};

  // A split that has no keys adds nothing. Its values are not read.
  HOPWELL_DEVICE void add(const Stats& of_split, const arch::Words4& values) {
    if (of_split.sum == 0) return;
    const MergeFactors factors = merge_stats(stats, of_split);
    HOPWELL_UNROLL
    for (int i = 0; i < 4; ++i) sums[i] = merge_values(sums[i], arch::bit_cast<float>(values.w[i]), factors);
  }
  // Stores the head's columns from `column` on, and, by the thread that has column 0, its lse.
  HOPWELL_DEVICE void store(const SplitParams& p, int query, int head, int column) const {
    const float factor = finish_head(p, query, head, stats, column == 0);
    const int64_t at = row_of_out(p, query, head) + column;
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
};

}  // namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET
