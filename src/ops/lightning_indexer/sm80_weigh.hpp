// lightning_indexer_backward on GPUs: from scores to g, and the loss.
//
// Tile      a CTA has a query: 64 heads of q in shared memory, more one part after the other
// Roles     up to eight warps, each with 16 entries at a time, whose keys it gathers into registers, mma's A
// Timeline  q │ scores of all entries, to the workspace │ barrier │ maximum │ sum │ g in their place, loss
// Budget    shared 16,384 B a limb + 288 B
#pragma once

#include "ops/lightning_indexer/sm80_backward.hpp"

namespace hopwell::ops::lightning_indexer_backward {
namespace {

struct WeighConfig {
  static constexpr int kMaxWarps = 8;
};

template <class T>
struct WeighStorage {
  Tile<kLimbs<T>, kHeads> q;
  float weights[kHeads];
  float of_warp[WeighConfig::kMaxWarps];
};

// Brings 64 heads in.
template <class T>
HOPWELL_DEVICE void load_heads(const Params<T>& p, WeighStorage<T>& s, int query, int first) {
  arch::syncthreads();  // the heads before are no longer read
  for_each_piece(p, query, first, 32 * p.weigh_warps,
                 [&](int row, int number, const Piece<kLimbs<T>>& piece, float weight) {
                   s.q.store(row, number, piece);
                   if (number == 0) s.weights[row] = weight;
                 });
  arch::syncthreads();
}

// What a part of the heads adds to the scores of 16 entries of this warp.
template <class T>
HOPWELL_DEVICE void add_scores(const Params<T>& p, const WeighStorage<T>& s, int query, int first_entry,
                               int first_head) {
  const int g = arch::lane_index() / 4, t = arch::lane_index() % 4;
  const int keys[2] = {key_of(p, query, first_entry + g), key_of(p, query, first_entry + 8 + g)};
  Operand<kLimbs<T>> rows[1];
  gather(p, keys, rows[0]);
  float sums[2] = {0, 0};
  const int heads = p.heads - first_head < kHeads ? p.heads - first_head : kHeads;
  for (int head = 0; head < heads; head += 16) {
    float d[2][1][4] = {};
    multiply<false>(d, rows, s.q, head, p.chunks);
    HOPWELL_UNROLL
    for (int i = 0; i < 8; ++i) {
      const int column = head + i / 4 * 8 + 2 * t + i % 2;
      const float term = s.weights[column] * relu(d[i / 4][0][i % 4]);
      sums[i / 2 % 2] += column < heads ? term : 0;
    }
  }
  HOPWELL_UNROLL
  for (int half = 0; half < 2; ++half) {
    const float sum = tile::sum_of_quad(sums[half]);
    const int entry = first_entry + 8 * half + g;
    if (t != half || entry >= p.topk) continue;
    float* score = p.g + int64_t{query} * p.topk + entry;
    const float whole = (first_head == 0 ? 0 : *score) + sum;
    const bool last = first_head + kHeads >= p.heads;
    *score = keys[half] < 0 || (last && whole != whole) ? -INFINITY : whole;
  }
}

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
  for (int w = 1; w < p.weigh_warps; ++w) x = join(x, of_warp[w]);
  return x;
}

// From the scores in p.g: g, and the query's loss.
template <class T, int kWarps>
HOPWELL_DEVICE void weigh(const Params<T>& p, float (&of_warp)[kWarps], int query, float bound) {
  float* g = p.g + int64_t{query} * p.topk;
  const float* target = p.target + query * p.target_stride;
  float highest = -INFINITY, any = 0;
  for (int i = arch::thread_index(); i < p.topk; i += 32 * p.weigh_warps) {
    highest = fmaxf(highest, g[i]);
    if (g[i] != -INFINITY && target[i] != 0) any = 1;
  }
  highest = reduce<Reduce::max>(p, of_warp, highest), any = reduce<Reduce::max>(p, of_warp, any);
  float sum = 0;
  for (int i = arch::thread_index(); i < p.topk && any > 0; i += 32 * p.weigh_warps)
    if (g[i] != -INFINITY) sum += arch::exp2_approx((g[i] - highest) * kLog2E);
  sum = reduce<Reduce::sum>(p, of_warp, sum);
  const float log_sum = arch::log2_approx(sum) * kLn2;
  float loss = 0;
  for (int i = arch::thread_index(); i < p.topk; i += 32 * p.weigh_warps) {
    const float score = g[i], wanted = target[i];
    if (score == -INFINITY || any == 0) {
      g[i] = arch::bit_cast<float>(uint32_t{kNoScore});
      continue;
    }
    if (wanted != 0) loss += wanted * (arch::log2_approx(wanted) * kLn2 - (score - highest) + log_sum);
    g[i] = p.d_loss * (arch::exp2_approx((score - highest) * kLog2E) / sum - wanted);
    if (!p.bounds.most) continue;
    const int key = p.indices[query * p.indices_stride + i];
    arch::red_max(p.bounds.most + key, arch::bit_cast<uint32_t>(fabsf(g[i]) * bound));
    arch::red_add(p.bounds.count + key, 1U);
  }
  loss = reduce<Reduce::sum>(p, of_warp, loss);
  if (arch::thread_index() == 0) p.losses[query] = double(loss);
}

template <class T>
__global__ void __launch_bounds__(32 * WeighConfig::kMaxWarps) weigh_entries(const __grid_constant__ Params<T> p) {
  auto& s = arch::dynamic_smem<WeighStorage<T>>();
  const int query = arch::block_index(), warp = arch::warp_index(), lane = arch::lane_index();
  float bound = 0;
  for (int first = 0; first < p.heads; first += kHeads) {
    load_heads(p, s, query, first);
    for (int entry = 16 * warp; entry < p.topk; entry += 16 * p.weigh_warps) add_scores(p, s, query, entry, first);
    if (!p.bounds.most) continue;
    for (int row = warp; row < kHeads && first + row < p.heads; row += p.weigh_warps) {
      float largest = 0, x[8];
      for (int number = lane; number < 4 * p.chunks; number += 32) {
        join(s.q.load(row, number), x);
        for (float value : x) largest = fmaxf(largest, fabsf(value));
      }
      largest = tile::max_of_warp(largest);
      if (lane == 0) bound += fabsf(s.weights[row]) * largest;
    }
  }
  bound = 1.001F * reduce<Reduce::sum>(p, s.of_warp, bound);  // its barriers are for the scores, too
  weigh(p, s.of_warp, query, bound);
}

}  // namespace
}  // namespace hopwell::ops::lightning_indexer_backward
