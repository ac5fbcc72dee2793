// lightning_indexer_backward on GPUs. For query s and its entries i, with dot_ij = q[s,j] · k[indices[i]]:
//
//     score_i = Σ_j w_j relu(dot_ij)         g_i = d_loss · (softmax(score)_i − target_i)      positive_ij = dot_ij > 0
//     loss += Σ_i target_i (log target_i − score_i + lse)          dw_j = Σ_i g_i relu(dot_ij)
//     dq_j = w_j Σ_i positive_ij (g_i k_i)         dk_i += g_i Σ_j positive_ij (w_j q_j)
//
// So the products are of zeros and ones, which bf16 has exactly, and of numbers in three limbs.
//
//     clear_d_k        or its deterministic sums and their bounds
//     weigh_entries    a CTA a query: scores, then g of all entries, in the workspace; the query's loss     sm80_weigh.hpp
//     add_gradients    a CTA a query: dq, dw, and what it adds to dk                                     sm80_gradients.hpp
//     finish_d_k       of deterministic sums: to fp32
//     sum_losses       in the order of the queries
//
// Deterministic sums are integers, 64 bits: multiples of a unit 2^-e of the key, so large that all n entries of the key, none
// of which adds more than most = max |g_i| Σ_j |w_j| max |q_j|, stay below 2^62: a contribution is off by 2^-62 · n · most.
#pragma once

#include "ops/lightning_indexer/sm80_operands.hpp"

namespace hopwell::ops::lightning_indexer_backward {
namespace {

using arch::bf16;
using lightning_indexer::join;
using lightning_indexer::kChunks;
using lightning_indexer::kHeads;
using lightning_indexer::kLimbs;
using lightning_indexer::kLn2;
using lightning_indexer::kLog2E;
using lightning_indexer::multiply;
using lightning_indexer::Operand;
using lightning_indexer::Piece;
using lightning_indexer::piece_at;
using lightning_indexer::relu;
using lightning_indexer::Rows;
using lightning_indexer::split;
using lightning_indexer::Tile;

// g of an entry that has no score: no key, or a score of −inf. No sum or product gives these bits.
constexpr uint32_t kNoScore = 0xffc0deadU;
constexpr int kGradientLimbs = 3;  // two would do, were it not for sums that cancel

// Bounds of a key's deterministic sums, in the workspace; null: sums are floats.
struct KeyBounds {
  uint32_t *most, *count;  // [s_kv]: bits of the largest contribution; how many there are
};

template <class T>
struct Params {
  Rows<T> q, k;
  int64_t q_stride;  // from query to query
  const void* weights;
  int64_t weights_stride;
  bool weights_bf16;
  const int* indices;
  const float* target;
  int64_t indices_stride, target_stride;
  float* g;        // [s_q, topk]
  double* losses;  // [s_q]
  float d_loss;
  T* d_q;
  void* d_weights;
  float* d_k;
  int64_t* fixed_d_k;  // [s_kv, columns], or null
  KeyBounds bounds;
  int64_t d_q_stride_s, d_q_stride_h, d_k_stride, d_weights_stride;
  int s_kv, topk, heads, columns, chunks;
  int weigh_warps;    // of a CTA of weigh_entries
  bool d_k_in_pairs;  // rows are 8-byte aligned
};

// 64 heads of a query from `first` on, by all threads of the CTA: visit(row, piece number, piece, weight).
template <class T, class Visit>
HOPWELL_DEVICE void for_each_piece(const Params<T>& p, int query, int first, int threads, Visit visit) {
  for (int i = arch::thread_index(); i < kHeads * 4 * p.chunks; i += threads) {
    const int row = i / (4 * p.chunks), number = i - row * 4 * p.chunks, head = first + row;
    Piece<kLimbs<T>> piece{};
    float weight = 0;
    if (head < p.heads) {
      piece = p.q.piece(p.q.data + query * p.q_stride + head * p.q.stride, 8 * number);
      weight = lightning_indexer::load_weight(p.weights, p.weights_bf16, query * p.weights_stride + head);
    }
    visit(row, number, piece, weight);
  }
}

// Rows g and g + 8 of this lane: the keys of two entries, zeros where there is none.
template <class T>
HOPWELL_DEVICE void gather(const Params<T>& p, const int (&keys)[2], Operand<kLimbs<T>>& to) {
  HOPWELL_UNROLL
  for (int half = 0; half < 2; ++half) {
    const T* row = p.k.data + int64_t{keys[half] < 0 ? 0 : keys[half]} * p.k.stride;
    HOPWELL_UNROLL
    for (int chunk = 0; chunk < kChunks; ++chunk)
      to.piece[chunk][half] = keys[half] >= 0 && chunk < p.chunks
                                  ? p.k.piece(row, 32 * chunk + arch::lane_index() % 4 * 8)
                                  : Piece<kLimbs<T>>{};
  }
}

template <class T>
HOPWELL_DEVICE int key_of(const Params<T>& p, int query, int entry) {
  const int key = entry < p.topk ? p.indices[query * p.indices_stride + entry] : -1;
  return unsigned(key) < unsigned(p.s_kv) ? key : -1;
}

// 2^e of a key's deterministic sums, as the exponent; `none`: the bound is infinite or NaN.
struct Unit {
  int exponent;
  bool none;
};
HOPWELL_DEVICE Unit unit_of(uint32_t most, uint32_t count) {
  const float bound = arch::bit_cast<float>(most) * float(count);
  const int exponent = int(arch::bit_cast<uint32_t>(bound) >> 23) - 126;  // bound < 2^exponent
  return {61 - exponent, !(bound < INFINITY)};
}
HOPWELL_DEVICE double power_of_two(int exponent) { return arch::bit_cast<double>(uint64_t(exponent + 1023) << 52); }

// ---- before and after ------------------------------------------------------------------------------------------------

constexpr int kPassThreads = 256;

// Zeros for dk, or for its deterministic sums and their bounds.
template <class T>
__global__ void __launch_bounds__(kPassThreads) clear_d_k(const __grid_constant__ Params<T> p) {
  const int64_t step = int64_t{arch::grid_size()} * kPassThreads;
  for (int64_t i = int64_t{arch::block_index()} * kPassThreads + arch::thread_index(); i < int64_t{p.s_kv} * p.columns;
       i += step) {
    const int64_t key = i / p.columns, column = i - key * p.columns;
    if (p.fixed_d_k) {
      p.fixed_d_k[i] = 0;
      if (column == 0) p.bounds.most[key] = p.bounds.count[key] = 0;
    } else {
      p.d_k[key * p.d_k_stride + column] = 0;
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kPassThreads) finish_d_k(const __grid_constant__ Params<T> p) {
  const int64_t step = int64_t{arch::grid_size()} * kPassThreads;
  for (int64_t i = int64_t{arch::block_index()} * kPassThreads + arch::thread_index(); i < int64_t{p.s_kv} * p.columns;
       i += step) {
    const int64_t key = i / p.columns;
    const Unit unit = unit_of(p.bounds.most[key], p.bounds.count[key]);
    p.d_k[key * p.d_k_stride + i - key * p.columns] =
        unit.none ? NAN : float(double(p.fixed_d_k[i]) * power_of_two(-unit.exponent));
  }
}

// One warp: lane l adds up every 32nd query's loss from l on, lane 0 those sums.
__global__ void __launch_bounds__(32) sum_losses(const double* losses, int64_t s_q, float* loss) {
  auto& of_lane = arch::dynamic_smem<double[32]>();
  double sum = 0;
  for (int64_t s = arch::lane_index(); s < s_q; s += 32) sum += losses[s];
  of_lane[arch::lane_index()] = sum;
  arch::syncwarp();
  if (arch::lane_index() != 0) return;
  for (int lane = 1; lane < 32; ++lane) sum += of_lane[lane];
  *loss = float(sum);
}

}  // namespace
}  // namespace hopwell::ops::lightning_indexer_backward
