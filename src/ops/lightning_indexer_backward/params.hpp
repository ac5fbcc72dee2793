// lightning_indexer_backward on GPUs. For query s and its entries i, with dot_ij = q[s,j] · k[indices[i]]:
//
//     score_i = Σ_j w_j relu(dot_ij)         g_i = factor · (softmax(score)_i − target_i)      positive_ij = dot_ij > 0
//     row_loss = Σ_i target_i (log target_i − score_i + lse)       dw_j = Σ_i g_i relu(dot_ij)
//     dq_j = w_j Σ_i positive_ij (g_i k_i)         dk_i += g_i Σ_j positive_ij (w_j q_j)
//
// factor is d_loss times the row's weight. With given d_scores, g_i = factor · d_scores_i. Without relu, every entry is
// positive and relu(dot) is dot. Each product has one operand of zeros and ones, which is exact in bf16, and one
// operand in a bf16x3 split.
//
// The kernels, without `lightning_indexer_bwd_` and the architecture:
//
//     clear_d_k          passes.hpp               clears d_k, or its deterministic sums and their bounds
//     score              score.hpp, loss.hpp      scores, then g of all entries, in the workspace; the query's loss
//     gradients          gradients.hpp            dq, dw, and each query's contribution to dk
//     postprocess_d_k    passes.hpp               converts deterministic sums to fp32
//     sum_losses         passes.hpp               sums the losses in the order of the queries
//
// Deterministic sums of dk are the wide sums of tile/gpu/fixed_point.hpp, with one unit per key. Each of a key's n
// entries contributes at most |g_i| Σ_j |w_j| max |q_j|, which is at most `largest`: the error of a contribution is at
// most 2^-60 · n · largest. Without indices, the first contribution is added before g of all queries is known. Then the
// bound assumes |g_i| <= 256 times the factor, and n = s_q. A key becomes NaN if a larger contribution, or one that is
// not finite, is added to it.
#pragma once

#include "ops/common/index_score.hpp"
#include "ops/lightning_indexer_backward/plan.hpp"
#include "runtime/launch.hpp"
#include "tile/gpu/entries.hpp"
#include "tile/gpu/fixed_point.hpp"
#include "tile/gpu/row_major.hpp"
#include "tile/gpu/warp.hpp"

namespace hopwell::ops::lightning_indexer_backward::HOPWELL_TARGET {

using arch::bf16;
using tile::kHeadTile, tile::kSplitTerms;

// g of an entry without a score: no visible key, or a score of −inf. No sum or product has these bits.
constexpr uint32_t kNoScore = 0xffc0deadU;
HOPWELL_DEVICE float no_score() { return arch::bit_cast<float>(uint32_t{kNoScore}); }
HOPWELL_DEVICE bool has_score(float g) { return arch::bit_cast<uint32_t>(g) != kNoScore; }

// A head's part of dq: 0 if no entry contributes, even if the weight is NaN.
HOPWELL_DEVICE float weighted(float weight, float sum) { return sum != 0 ? weight * sum : 0; }

constexpr int kGradientTerms = 3;  // bf16x3 split; two terms would be enough, except for sums that cancel

template <class T>
struct Params {
  tile::RowMajor<T> q, k;
  int64_t q_stride;     // query stride
  const void* weights;  // fp32 or bf16 [s_q, h_index]
  int64_t weights_stride;
  bool weights_bf16;
  tile::SelectionParams selection;
  const float* given;  // targets, or gradients of the scores
  bool given_gradients;
  float target_scale;
  int64_t given_stride;
  const float* row_weights;  // [s_q], or null
  int64_t row_weights_stride;
  float* d_scores;  // g [s_q, topk], in the entries' slots
  double* losses;   // [s_q], weighted
  float* row_loss;  // [s_q], or null
  int64_t row_loss_stride;
  float d_loss;
  const float* d_loss_array;  // replaces d_loss; or null
  T* d_q;
  void* d_weights;  // dtype of weights
  float* d_k;
  int64_t* fixed_d_k;      // [s_kv, columns], or null
  tile::SumBounds bounds;  // [s_kv]; null: sums are floats
  uint32_t* bound_of_all;  // bits of the bound of every finite contribution; null: each entry records its own bound
  int64_t d_q_stride_s, d_q_stride_h, d_k_stride, d_weights_stride;
  int s_kv, topk, heads, columns, column_blocks;
  int score_warps;                  // warps of a CTA of the score kernel
  bool d_k_in_pairs, d_q_in_pairs;  // pairs of adjacent columns, from an even column on, are aligned
};

// Bound of a key's deterministic sums; infinite or NaN: no unit exists.
HOPWELL_DEVICE float bound_of(uint32_t largest, uint32_t count) {
  return arch::bit_cast<float>(largest) * float(count);
}

// [s_q], over all passes.
inline double* losses_of(const PassProblem& problem, const Plan& plan, void* workspace) {
  return problem.losses ? problem.losses.as<double>() : runtime::at_offset<double>(workspace, plan.workspace.losses);
}

// Parameters for the queries of a pass.
template <class T>
Params<T> params_of(const PassProblem& whole, const Plan& plan, void* workspace, int score_warps) {
  const PassProblem problem = queries_of_pass(whole);
  const Workspace& offsets = plan.workspace;
  Params<T> p{};
  p.q = tile::row_major<T>(problem.q, 2), p.k = tile::row_major<T>(problem.k, 1);
  p.q_stride = problem.q.stride[0];
  p.weights = problem.weights.data, p.weights_stride = problem.weights.stride[0];
  p.weights_bf16 = problem.weights.dtype == DType::kBFloat16;
  p.selection =
      tile::params_of({.indices = problem.indices ? non_null_indices(problem.indices.as<const int>()) : nullptr,
                       .indices_stride = problem.indices.stride[0],
                       .visibility = problem.visibility,
                       .s_q = problem.s_q,
                       .s_kv = problem.s_kv,
                       .topk = problem.topk});
  const View& given = problem.d_scores ? problem.d_scores : problem.target;
  p.given = given.as<const float>(), p.given_stride = given.stride[0], p.given_gradients = bool(problem.d_scores);
  p.target_scale = problem.target_scale;
  p.row_weights = problem.row_weights.as<const float>(), p.row_weights_stride = problem.row_weights.stride[0];
  p.d_scores = runtime::at_offset<float>(workspace, offsets.gradients);
  p.losses = losses_of(whole, plan, workspace) + whole.first_query;
  p.row_loss = problem.row_loss.as<float>(), p.row_loss_stride = problem.row_loss.stride[0];
  p.d_loss = problem.d_loss, p.d_loss_array = problem.d_loss_array.as<const float>();
  p.d_q = problem.d_q.as<T>(), p.d_weights = problem.d_weights.data, p.d_k = problem.d_k.as<float>();
  if (problem.deterministic) {
    p.fixed_d_k = runtime::at_offset<std::int64_t>(workspace, offsets.fixed_d_k);
    p.bounds = {runtime::at_offset<std::uint32_t>(workspace, offsets.largest),
                runtime::at_offset<std::uint32_t>(workspace, offsets.count)};
    if (!problem.indices) p.bound_of_all = runtime::at_offset<std::uint32_t>(workspace, offsets.of_all);
  }
  p.d_q_stride_s = problem.d_q.stride[0], p.d_q_stride_h = problem.d_q.stride[1];
  p.d_k_stride = problem.d_k.stride[0], p.d_weights_stride = problem.d_weights.stride[0];
  p.s_kv = static_cast<int>(problem.s_kv), p.topk = static_cast<int>(problem.topk);
  p.heads = static_cast<int>(problem.h_index), p.columns = static_cast<int>(problem.d_index);
  p.column_blocks = plan.column_blocks, p.score_warps = score_warps;
  p.d_q_in_pairs =
      reinterpret_cast<std::uintptr_t>(p.d_q) % 4 == 0 && p.d_q_stride_s % 2 == 0 && p.d_q_stride_h % 2 == 0;
  p.d_k_in_pairs = reinterpret_cast<std::uintptr_t>(p.d_k) % 8 == 0 && (problem.s_kv <= 1 || p.d_k_stride % 2 == 0);
  return p;
}

}  // namespace hopwell::ops::lightning_indexer_backward::HOPWELL_TARGET
