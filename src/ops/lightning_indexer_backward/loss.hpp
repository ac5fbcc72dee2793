// lightning_indexer_backward on GPUs: converts the scores of a query's entries to the gradients of the scores, in
// place, and computes the query's loss. Executed by a CTA.
#pragma once

#include "ops/lightning_indexer_backward/params.hpp"

namespace hopwell::ops::lightning_indexer_backward::HOPWELL_TARGET {

using tile::kLn2, tile::kLog2E;

enum class Reduce { sum, max };
// Reduction over the CTA in a fixed order.
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

// The gradients of the entries of a query, and below the given values of the entries.
template <class T>
HOPWELL_DEVICE float* gradients_of(const Params<T>& p, int query, const tile::Entries& entries) {
  return p.d_scores + int64_t{query} * p.topk + entries.place();
}
template <class T>
HOPWELL_DEVICE const float* given_of(const Params<T>& p, int query, const tile::Entries& entries) {
  return p.given + query * p.given_stride + entries.place();
}

// Records a bound for the contribution of entry i, which has a score, to dk: at most `bound` times |g|.
template <class T>
HOPWELL_DEVICE void note_bound(const Params<T>& p, const tile::Entries& entries, int i, float g, float bound) {
  if (!p.bounds.largest) return;
  const int key = entries.at(i);
  if (p.bound_of_all) {
    const float of_all = arch::bit_cast<float>(*p.bound_of_all);
    if (!(fabsf(g) * bound <= of_all)) arch::red_max(p.bounds.largest + key, arch::bit_cast<uint32_t>(INFINITY));
    return;
  }
  arch::red_max(p.bounds.largest + key, arch::bit_cast<uint32_t>(fabsf(g) * bound));
  arch::red_add(p.bounds.count + key, 1U);
}

// log of a nonzero number, NaN if it is negative. The approximate log treats subnormal numbers as 0, so these are
// replaced by the smallest normal number of their sign.
HOPWELL_DEVICE float log_of_target(float x) {
  constexpr float kLeast = 0x1p-126F;
  return arch::log2_approx(fabsf(x) < kLeast ? (x > 0 ? kLeast : -kLeast) : x) * kLn2;
}

// A gradient of a score; NaN if it is beyond fp32's range.
HOPWELL_DEVICE float finite_or_nan(float g) { return fabsf(g) < INFINITY ? g : NAN; }

// The scores and targets of a row's entries, every `step`-th from this thread's first on. The first kKept are kept in
// registers; the others are read again each time.
template <int kKept>
struct RowEntries {
  const float *all_scores, *all_targets;
  int length, step;
  float scores[kKept], targets[kKept];

  HOPWELL_DEVICE RowEntries(const float* all_scores, const float* all_targets, int length, int step)
      : all_scores(all_scores), all_targets(all_targets), length(length), step(step) {
    HOPWELL_UNROLL
    for (int kept = 0; kept < kKept; ++kept) {
      const int i = arch::thread_index() + kept * step;
      scores[kept] = i < length ? all_scores[i] : -INFINITY, targets[kept] = i < length ? all_targets[i] : 0;
    }
  }
  // Calls visit(entry, score, target).
  template <class Visit>
  HOPWELL_DEVICE void for_each(const Visit& visit) const {
    HOPWELL_UNROLL
    for (int kept = 0; kept < kKept; ++kept)
      if (const int i = arch::thread_index() + kept * step; i < length) visit(i, scores[kept], targets[kept]);
    for (int i = arch::thread_index() + kKept * step; i < length; i += step) visit(i, all_scores[i], all_targets[i]);
  }
};

// Computes g from the scores in p.d_scores, and the query's unweighted loss. If `counts` is false, no entry gets a g.
template <int kKept, class T, int kWarps>
HOPWELL_DEVICE float softmax_gradient(const Params<T>& p, float (&of_warp)[kWarps], int query,
                                      const tile::Entries& entries, float bound, float factor, bool counts) {
  float* const g = gradients_of(p, query, entries);
  const RowEntries<kKept> row(g, given_of(p, query, entries), entries.length, 32 * p.score_warps);
  float highest = -INFINITY, any = 0;
  row.for_each([&](int, float score, float target) {
    highest = fmaxf(highest, score);
    if (score != -INFINITY && target != 0) any = 1;
  });
  highest = reduce<Reduce::max>(p, of_warp, highest), any = reduce<Reduce::max>(p, of_warp, any);
  float sum = 0;
  row.for_each([&](int, float score, float) {
    if (score != -INFINITY && any > 0) sum += arch::exp2_approx((score - highest) * kLog2E);
  });
  sum = reduce<Reduce::sum>(p, of_warp, sum);
  const float log_sum = arch::log2_approx(sum) * kLn2;
  float loss = 0;
  row.for_each([&](int i, float score, float target) {
    const float wanted = p.target_scale * target;
    const bool has_gradient = score != -INFINITY && any > 0;
    if (has_gradient && wanted != 0) loss += wanted * (log_of_target(wanted) - (score - highest) + log_sum);
    const float gradient = has_gradient && counts
                               ? finite_or_nan(factor * (arch::exp2_approx((score - highest) * kLog2E) / sum - wanted))
                               : no_score();
    g[i] = gradient;
    if (has_gradient && counts) note_bound(p, entries, i, gradient, bound);
  });
  return reduce<Reduce::sum>(p, of_warp, loss);
}

// Computes g from the scores in p.d_scores and the given gradients.
template <class T>
HOPWELL_DEVICE void scale_gradient(const Params<T>& p, int query, const tile::Entries& entries, float bound,
                                   float factor, bool counts) {
  float* g = gradients_of(p, query, entries);
  const float* all = given_of(p, query, entries);
  for (int i = arch::thread_index(); i < entries.length; i += 32 * p.score_warps) {
    const bool has_gradient = g[i] != -INFINITY && counts;
    g[i] = has_gradient ? finite_or_nan(factor * all[i]) : no_score();
    if (has_gradient) note_bound(p, entries, i, g[i], bound);
  }
}

// Computes g of the query's entries from the scores in p.d_scores, and the query's loss. A row with weight 0 has no g,
// for any contents. `kKept`: number of entries that a thread keeps in registers.
template <int kKept = 6, class T, int kWarps>
HOPWELL_DEVICE void scores_to_gradients(const Params<T>& p, float (&of_warp)[kWarps], int query,
                                        const tile::Entries& entries, float bound) {
  const float weight = p.row_weights ? p.row_weights[query * p.row_weights_stride] : 1;
  const float factor = (p.d_loss_array ? *p.d_loss_array : p.d_loss) * weight;
  if (p.given_gradients) return scale_gradient(p, query, entries, bound, factor, weight != 0);
  const float loss = softmax_gradient<kKept>(p, of_warp, query, entries, bound, factor, weight != 0);
  if (arch::thread_index() != 0) return;
  p.losses[query] = weight != 0 ? double(weight) * double(loss) : 0;
  if (p.row_loss) p.row_loss[query * p.row_loss_stride] = loss;
}

}  // namespace hopwell::ops::lightning_indexer_backward::HOPWELL_TARGET
