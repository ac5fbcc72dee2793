// lightning_indexer_backward on GPUs. For query s and its entries i, with dot_ij = q[s,j] · k[indices[i]]:
//
//     score_i = Σ_j w_j relu(dot_ij)         g_i = d_loss · (softmax(score)_i − target_i)      positive_ij = dot_ij > 0
//     loss += Σ_i target_i (log target_i − score_i + lse)          dw_j = Σ_i g_i relu(dot_ij)
//     dq_j = w_j Σ_i positive_ij (g_i k_i)         dk_i += g_i Σ_j positive_ij (w_j q_j)
//
// So the products are of zeros and ones, which bf16 has exactly, and of numbers in three limbs.
//
//     weigh_entries    a CTA a query: scores, then g of all entries, in the workspace; the query's loss
//     add_gradients    a CTA a query: dq, dw, and what it adds to dk
//     finish_dk        of deterministic sums: to fp32
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
using lightning_indexer::sum_of_quad;
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

// ---- scores to g -----------------------------------------------------------------------------------------------------

struct WeighConfig {
  static constexpr int kMaxWarps = 8, kEntriesOfWarp = 16;
};

template <class T>
struct WeighStorage {
  Tile<kLimbs<T>, kHeads> q;
  float weights[kHeads];
  float bounds[kHeads];  // |w_j| max |q_j|
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
    const float sum = sum_of_quad(sums[half]);
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
template <Reduce kReduce, class T>
HOPWELL_DEVICE float reduce(const Params<T>& p, float (&of_warp)[WeighConfig::kMaxWarps], float x) {
  const auto join = [](float a, float b) { return kReduce == Reduce::sum ? a + b : fmaxf(a, b); };
  const int warp = arch::warp_index();
  for (int mask = 16; mask > 0; mask /= 2) x = join(x, arch::shuffle_xor(x, mask));
  arch::syncthreads();
  if (arch::lane_index() == 0) of_warp[warp] = x;
  arch::syncthreads();
  x = of_warp[0];
  for (int w = 1; w < p.weigh_warps; ++w) x = join(x, of_warp[w]);
  return x;
}

// From the scores in p.g: g, and the query's loss.
template <class T>
HOPWELL_DEVICE void weigh(const Params<T>& p, float (&of_warp)[WeighConfig::kMaxWarps], int query, float bound) {
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
    if (wanted > 0) loss += wanted * (arch::log2_approx(wanted) * kLn2 - (score - highest) + log_sum);
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
      for (int mask = 16; mask > 0; mask /= 2) largest = fmaxf(largest, arch::shuffle_xor(largest, mask));
      if (lane == 0) bound += fabsf(s.weights[row]) * largest;
    }
  }
  bound = 1.001F * reduce<Reduce::sum>(p, s.of_warp, bound);  // its barriers are for the scores, too
  weigh(p, s.of_warp, query, bound);
}

// ---- gradients -------------------------------------------------------------------------------------------------------

struct GradientConfig {
  static constexpr int kWarps = 4, kThreads = 32 * kWarps, kEntries = 32;
};

template <class T>
struct GradientStorage {
  Tile<kLimbs<T>, kHeads> q;
  Tile<kGradientLimbs, kHeads> weighted_q;                                     // w_j q_j
  Tile<kGradientLimbs, GradientConfig::kEntries> weighted_keys;                // g_i k_i
  alignas(128) unsigned char positive[GradientConfig::kEntries * kHeads * 2];  // [entry][head], bf16 0 or 1
  float weights[kHeads];
  float d_weights[2][kHeads];  // of the entries of two warps
};

HOPWELL_DEVICE uint32_t positive_at(int entry, int piece) { return uint32_t(entry * 128 + ((piece ^ entry % 8) << 4)); }

// This lane's two entries.
struct Entries {
  int keys[2];  // −1: none, or one without a score
  float g[2];
};
template <class T>
HOPWELL_DEVICE Entries entries_of(const Params<T>& p, int query, int first) {
  Entries entries{};
  HOPWELL_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int entry = first + 8 * half + arch::lane_index() / 4;
    const int key = key_of(p, query, entry);
    const float g = key >= 0 ? p.g[int64_t{query} * p.topk + entry] : 0;
    const bool counts = key >= 0 && arch::bit_cast<uint32_t>(g) != kNoScore;
    entries.keys[half] = counts ? key : -1, entries.g[half] = counts ? g : 0;
  }
  return entries;
}

template <class T>
HOPWELL_DEVICE void load_heads(const Params<T>& p, GradientStorage<T>& s, int query, int first) {
  for_each_piece(p, query, first, GradientConfig::kThreads,
                 [&](int row, int number, const Piece<kLimbs<T>>& piece, float weight) {
                   s.q.store(row, number, piece);
                   float x[8];
                   join(piece, x);
                   for (float& value : x) value *= weight;
                   s.weighted_q.store(row, number, split<kGradientLimbs>(x));
                   if (number == 0) s.weights[row] = weight;
                 });
  arch::syncthreads();
}

// Which of 16 entries and 32 heads have a positive product, to shared memory; dw; and half of g_i k_i.
template <class T>
HOPWELL_DEVICE void find_positive(const Params<T>& p, GradientStorage<T>& s, const Entries& entries, int heads,
                                  float (&d_weights)[4][2]) {
  const int lane = arch::lane_index(), g = lane / 4, t = lane % 4;
  const int first_entry = arch::warp_index() % 2 * 16, side = arch::warp_index() / 2;
  Operand<kLimbs<T>> rows[1];
  gather(p, entries.keys, rows[0]);
  HOPWELL_UNROLL
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    if (chunk % 2 != side || chunk >= p.chunks) continue;
    HOPWELL_UNROLL
    for (int half = 0; half < 2; ++half) {
      float x[8];
      join(rows[0].piece[chunk][half], x);
      for (float& value : x) value *= entries.g[half];
      s.weighted_keys.store(first_entry + 8 * half + g, 4 * chunk + t, split<kGradientLimbs>(x));
    }
  }
  HOPWELL_UNROLL
  for (int pair = 0; pair < 2; ++pair) {
    const int head = 32 * side + 16 * pair;
    if (head >= heads) break;
    float d[2][1][4] = {};
    multiply<false>(d, rows, s.q, head, p.chunks);
    HOPWELL_UNROLL
    for (int i = 0; i < 4; ++i) {
      constexpr uint32_t kOne = 0x3f80;
      const int block = i / 2, half = i % 2;
      const float low = d[block][0][2 * half], high = d[block][0][2 * half + 1];
      *reinterpret_cast<uint32_t*>(s.positive + positive_at(first_entry + 8 * half + g, head / 8 + block) + 4 * t) =
          (low > 0 ? kOne : 0) | (high > 0 ? kOne << 16 : 0);
      if (entries.keys[half] < 0) continue;  // q may be NaN
      d_weights[2 * pair + block][0] += entries.g[half] * relu(low);
      d_weights[2 * pair + block][1] += entries.g[half] * relu(high);
    }
  }
}

// This lane's place in 16 rows of a tile, 16 columns, as ldmatrix reads them transposed.
HOPWELL_DEVICE uint32_t place_of_lane() {
  const auto lane = uint32_t(arch::lane_index());
  return piece_at(lane % 16, lane / 16);
}
// d += a · 16 rows of the tile from 16 · `block` on, columns 16 · `column` to 16 · `column` + 15.
template <int kRows>
HOPWELL_DEVICE void multiply_by_columns(float (&d)[2][4], const uint32_t (&a)[4],
                                        const Tile<kGradientLimbs, kRows>& tile, uint32_t place, int block,
                                        int column) {
  HOPWELL_UNROLL
  for (int limb = 0; limb < kGradientLimbs; ++limb) {
    uint32_t b[4];
    arch::ldmatrix<arch::Transpose::yes>(b,
                                         tile.address(limb) + uint32_t(block) * 4096 + (place ^ uint32_t(column) << 5));
    const uint32_t left[2] = {b[0], b[1]}, right[2] = {b[2], b[3]};
    arch::mma_m16n8k16_bf16(d[0], a, left);
    arch::mma_m16n8k16_bf16(d[1], a, right);
  }
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

// Adds two neighbouring columns to a key's row of dk.
template <class T>
HOPWELL_DEVICE void add_to_key(const Params<T>& p, int key, int column, float low, float high) {
  if (p.fixed_d_k) {
    const Unit unit = unit_of(p.bounds.most[key], p.bounds.count[key]);
    int64_t* to = p.fixed_d_k + int64_t{key} * p.columns + column;
    if (unit.none) return;
    arch::red_add(to, int64_t(double(low) * power_of_two(unit.exponent)));
    if (column + 1 < p.columns) arch::red_add(to + 1, int64_t(double(high) * power_of_two(unit.exponent)));
    return;
  }
  float* to = p.d_k + key * p.d_k_stride + column;
#if HOPWELL_HAS_SM90
  if (p.d_k_in_pairs && column + 1 < p.columns) return arch::red_add_v2(to, low, high);
#endif
  arch::red_add(to, low);
  if (column + 1 < p.columns) arch::red_add(to + 1, high);
}

// dk of 16 entries, half of the columns.
template <class T>
HOPWELL_DEVICE void add_d_k(const Params<T>& p, const GradientStorage<T>& s, const Entries& entries, int heads) {
  const int lane = arch::lane_index(), t = lane % 4, first_entry = arch::warp_index() % 2 * 16;
  const int side = arch::warp_index() / 2;
  uint32_t a[4][4];
  HOPWELL_UNROLL
  for (int step = 0; step < 4; ++step)
    if (16 * step < heads)
      arch::ldmatrix(a[step],
                     arch::shared_address(s.positive) + positive_at(first_entry + lane % 16, 2 * step + lane / 16));
  const uint32_t place = place_of_lane();
  HOPWELL_UNROLL
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    if (chunk >= p.chunks) break;
    float d[2][4] = {};
    HOPWELL_UNROLL
    for (int step = 0; step < 4; ++step)
      if (16 * step < heads) multiply_by_columns(d, a[step], s.weighted_q, place, step, 2 * chunk + side);
    HOPWELL_UNROLL
    for (int half = 0; half < 2; ++half) {
      if (entries.keys[half] < 0) continue;
      const float g = entries.g[half];
      HOPWELL_UNROLL
      for (int i = 0; i < 2; ++i) {
        const int at = 32 * chunk + 16 * side + 8 * i + 2 * t;
        if (at < p.columns) add_to_key(p, entries.keys[half], at, g * d[i][2 * half], g * d[i][2 * half + 1]);
      }
    }
  }
}

// dq of this warp's 16 heads, without their weights.
template <class T>
HOPWELL_DEVICE void add_d_q(const Params<T>& p, const GradientStorage<T>& s, float (&d_q)[kChunks * 2][2][4]) {
  const int lane = arch::lane_index(), warp = arch::warp_index();
  const uint32_t place = place_of_lane();
  HOPWELL_UNROLL
  for (int step = 0; step < GradientConfig::kEntries / 16; ++step) {
    uint32_t a[4];  // heads × entries: of [entry][head] the transpose
    arch::ldmatrix<arch::Transpose::yes>(
        a,
        arch::shared_address(s.positive) + positive_at(16 * step + lane % 8 + lane / 16 * 8, 2 * warp + lane / 8 % 2));
    HOPWELL_UNROLL
    for (int i = 0; i < kChunks * 2; ++i)
      if (i < 2 * p.chunks) multiply_by_columns(d_q[i], a, s.weighted_keys, place, step, i);
  }
}

HOPWELL_DEVICE void store_as(float x, float* to) { *to = x; }
HOPWELL_DEVICE void store_as(float x, bf16* to) { *to = arch::to_bf16(x); }

template <class T>
HOPWELL_DEVICE void store_d_q(const Params<T>& p, const GradientStorage<T>& s, int query, int first,
                              const float (&d_q)[kChunks * 2][2][4]) {
  const int lane = arch::lane_index(), g = lane / 4, t = lane % 4;
  HOPWELL_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int row = 16 * arch::warp_index() + 8 * half + g, head = first + row;
    if (head >= p.heads) continue;
    T* to = p.d_q + query * p.d_q_stride_s + head * p.d_q_stride_h;
    HOPWELL_UNROLL
    for (int i = 0; i < kChunks * 8; ++i) {
      const int column = i / 2 * 8 + 2 * t + i % 2;
      if (column < p.columns) store_as(s.weights[row] * d_q[i / 4][i / 2 % 2][2 * half + i % 2], to + column);
    }
  }
}

// Adds up dw: over the lanes that have other entries, then two warps.
template <class T>
HOPWELL_DEVICE void store_d_weights(const Params<T>& p, GradientStorage<T>& s, int query, int first,
                                    const float (&d_weights)[4][2]) {
  const int lane = arch::lane_index(), warp = arch::warp_index();
  HOPWELL_UNROLL
  for (int i = 0; i < 8; ++i) {
    if (first + warp / 2 * 32 + i / 2 * 8 >= p.heads) break;
    float sum = d_weights[i / 2][i % 2];
    for (int mask = 4; mask < 32; mask *= 2) sum += arch::shuffle_xor(sum, mask);
    if (lane < 4) s.d_weights[warp % 2][warp / 2 * 32 + i / 2 * 8 + 2 * lane + i % 2] = sum;
  }
  arch::syncthreads();
  const int row = arch::thread_index(), head = first + row;
  if (row >= kHeads || head >= p.heads) return;
  const float sum = s.d_weights[0][row] + s.d_weights[1][row];
  const int64_t at = query * p.d_weights_stride + head;
  if (p.weights_bf16)
    static_cast<bf16*>(p.d_weights)[at] = arch::to_bf16(sum);
  else
    static_cast<float*>(p.d_weights)[at] = sum;
}

template <class T>
__global__ void __launch_bounds__(GradientConfig::kThreads) add_gradients(const __grid_constant__ Params<T> p) {
  auto& s = arch::dynamic_smem<GradientStorage<T>>();
  const int query = arch::block_index(), own = arch::warp_index() % 2 * 16;
  for (int first = 0; first < p.heads; first += kHeads) {
    const int heads = p.heads - first < kHeads ? p.heads - first : kHeads;
    const bool has_heads = 16 * arch::warp_index() < heads;
    float d_q[kChunks * 2][2][4] = {}, d_weights[4][2] = {};
    load_heads(p, s, query, first);
    for (int entry = 0; entry < p.topk; entry += GradientConfig::kEntries) {
      const Entries entries = entries_of(p, query, entry + own);
      find_positive(p, s, entries, heads, d_weights);
      arch::syncthreads();
      add_d_k(p, s, entries, heads);
      if (has_heads) add_d_q(p, s, d_q);
      arch::syncthreads();  // before the next entries overwrite these
    }
    if (has_heads) store_d_q(p, s, query, first, d_q);
    store_d_weights(p, s, query, first, d_weights);
  }
}

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
