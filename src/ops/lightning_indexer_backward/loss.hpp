// lightning_indexer_backward on GPUs: from the scores of a query's entries, which wait in the place of their gradients, to
// these and to the query's loss. By a CTA.
#pragma once

#include "ops/lightning_indexer_backward/params.hpp"

namespace hopwell::ops::lightning_indexer_backward::HOPWELL_TARGET {

using tile::kLn2, tile::kLog2E;

enum class Reduce { sum, max };
// Over the CTA, always in the same order.
template <Reduce kReduce, class T, int kWarps>
HOPWELL_DEVICE float reduce(const Params<T>& p, float (&of_warp)[kWarps], float x) {
  const auto join = [](float a, float b) { return kReduce == Reduce::sum ? a + b : fmaxf(a, b); };
  const int warp = arch::warp_index();
  x = tile::reduce<16, 1>(x, join);
  arch::syncthreads();
  if (arch::lane_index() == 0) of_warp[warp] = x;
  arch::syncthreads();
  x = of_warp[0];
  for (int w = 1; w < p.score_warps; ++w) x = join(x, of_warp[w]);
  return x;
}

// From the scores in p.d_scores: g, and the query's loss. No g exceeds `bound` times its own magnitude in what it adds to dk.
template <class T, int kWarps>
HOPWELL_DEVICE void softmax_gradient(const Params<T>& p, float (&of_warp)[kWarps], int query, float bound) {
  float* g = p.d_scores + int64_t{query} * p.topk;
  const float* target = p.target + query * p.target_stride;
  float highest = -INFINITY, any = 0;
  for (int i = arch::thread_index(); i < p.topk; i += 32 * p.score_warps) {
    highest = fmaxf(highest, g[i]);
    if (g[i] != -INFINITY && target[i] != 0) any = 1;
  }
  highest = reduce<Reduce::max>(p, of_warp, highest), any = reduce<Reduce::max>(p, of_warp, any);
  float sum = 0;
  for (int i = arch::thread_index(); i < p.topk && any > 0; i += 32 * p.score_warps)
    if (g[i] != -INFINITY) sum += arch::exp2_approx((g[i] - highest) * kLog2E);
  sum = reduce<Reduce::sum>(p, of_warp, sum);
  const float log_sum = arch::log2_approx(sum) * kLn2;
  float loss = 0;
  for (int i = arch::thread_index(); i < p.topk; i += 32 * p.score_warps) {
    const float score = g[i], wanted = target[i];
    if (score == -INFINITY || any == 0) {
      g[i] = no_score();
      continue;
    }
    if (wanted != 0) loss += wanted * (arch::log2_approx(wanted) * kLn2 - (score - highest) + log_sum);
    g[i] = p.d_loss * (arch::exp2_approx((score - highest) * kLog2E) / sum - wanted);
    if (!p.bounds.largest) continue;
    const int key = p.indices[query * p.indices_stride + i];
    arch::red_max(p.bounds.largest + key, arch::bit_cast<uint32_t>(fabsf(g[i]) * bound));
    arch::red_add(p.bounds.count + key, 1U);
  }
  loss = reduce<Reduce::sum>(p, of_warp, loss);
  if (arch::thread_index() == 0) p.losses[query] = double(loss);
}

}  // namespace hopwell::ops::lightning_indexer_backward::HOPWELL_TARGET
