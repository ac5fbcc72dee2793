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

// Writes g of an entry that has a score. In what it adds to dk it does not exceed `bound` times its own magnitude.
template <class T>
HOPWELL_DEVICE void write_gradient(const Params<T>& p, int query, int i, float g, float bound) {
  p.d_scores[int64_t{query} * p.topk + i] = g;
  if (!p.bounds.largest) return;
  const int key = p.indices[query * p.indices_stride + i];
  arch::red_max(p.bounds.largest + key, arch::bit_cast<uint32_t>(fabsf(g) * bound));
  arch::red_add(p.bounds.count + key, 1U);
}

// From the scores in p.d_scores: g, and the query's loss without its weight. Where the row does not count there is no g.
template <class T, int kWarps>
HOPWELL_DEVICE float softmax_gradient(const Params<T>& p, float (&of_warp)[kWarps], int query, float bound,
                                      float factor, bool counts) {
  float* g = p.d_scores + int64_t{query} * p.topk;
  const float* target = p.given + query * p.given_stride;
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
    const bool has_gradient = score != -INFINITY && any > 0;
    if (has_gradient && wanted != 0) loss += wanted * (arch::log2_approx(wanted) * kLn2 - (score - highest) + log_sum);
    if (has_gradient && counts)
      write_gradient(p, query, i, factor * (arch::exp2_approx((score - highest) * kLog2E) / sum - wanted), bound);
    else
      g[i] = no_score();
  }
  return reduce<Reduce::sum>(p, of_warp, loss);
}

// From the scores in p.d_scores, and the gradients that are given: g.
template <class T>
HOPWELL_DEVICE void scale_gradient(const Params<T>& p, int query, float bound, float factor, bool counts) {
  float* g = p.d_scores + int64_t{query} * p.topk;
  for (int i = arch::thread_index(); i < p.topk; i += 32 * p.score_warps) {
    const float given = factor * p.given[query * p.given_stride + i];
    if (g[i] != -INFINITY && counts)
      write_gradient(p, query, i, fabsf(given) < INFINITY ? given : NAN, bound);
    else
      g[i] = no_score();
  }
}

// From the scores in p.d_scores: g of the query's entries, and its loss. A row of weight 0 has no g, whatever is in it.
template <class T, int kWarps>
HOPWELL_DEVICE void finish_scores(const Params<T>& p, float (&of_warp)[kWarps], int query, float bound) {
  const float weight = p.row_weights ? p.row_weights[query * p.row_weights_stride] : 1;
  const float factor = (p.d_loss_array ? *p.d_loss_array : p.d_loss) * weight;
  if (p.given_gradients) return scale_gradient(p, query, bound, factor, weight != 0);
  const float loss = softmax_gradient(p, of_warp, query, bound, factor, weight != 0);
  if (arch::thread_index() != 0) return;
  p.losses[query] = weight != 0 ? double(weight) * double(loss) : 0;
  if (p.row_loss) p.row_loss[query * p.row_loss_stride] = loss;
}

}  // namespace hopwell::ops::lightning_indexer_backward::HOPWELL_TARGET
