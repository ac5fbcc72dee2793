// sparse_mla_backward on GPUs, a pass: each query's valid keys in ascending order, by ranges of keys, so that CTAs meet
// in L2; and the zeros where sums are added, since memory has little to do meanwhile. And the pass that brings attn,
// summed in that order, back to its entries.
#pragma once

#include <bit>

#include "ops/sparse_mla_backward/passes/clear_sums.hpp"
#include "tile/gpu/warp.hpp"

namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET {

constexpr int kOrderThreads = 512, kOrderWarps = kOrderThreads / 32, kLongestRow = int{kLongestOrderedRow};
constexpr int kRounds = kLongestRow / kOrderThreads, kDigitBits = 4, kDigits = 1 << kDigitBits;
constexpr int kSortedBits = 2 * kDigitBits;  // the highest, one of which tells invalid entries: 128 ranges of keys

struct OrderStorage {
  uint32_t keys[2][kLongestRow];
  uint16_t sources[2][kLongestRow];
  int counts[kDigits * kOrderWarps];  // by digit, then warp
  int warp_sums[kOrderWarps];
};

struct OrderParams {
  tile::SelectionParams selection;
  int* rows;          // [s_q, topk]: the keys of valid entries by ranges; within one in the order of their entries
  uint16_t* sources;  // [s_q, topk]: the entries that they come from; or null
  int* lengths;       // [s_q]: how many
  tile::MergedRows merged;  // which rows are wanted
  ClearParams sums;         // zeros, 16 bytes at a time: memory has little to do while rows are put in order
  ClearParams attn;         // the same; a row for each query; or no rows
};

// What of the rows this CTA clears.
HOPWELL_DEVICE void clear_some_rows(const ClearParams& p) {
  const int64_t rows = (p.rows + arch::grid_size() - 1) / arch::grid_size(), first = rows * arch::block_index();
  const int chunks = int(p.words / 4);
  for (int i = arch::thread_index(); i < rows * chunks; i += kOrderThreads)
    if (first + i / chunks < p.rows)
      *reinterpret_cast<arch::Words4*>(p.data + (first + i / chunks) * p.stride + i % chunks * 4) = {};
}

// The sum of the CTA's values.
HOPWELL_DEVICE int sum_over_cta(int (&warp_sums)[kOrderWarps], int value) {
  const int warp = arch::warp_index();
  value = tile::sum_of_warp(value);
  arch::syncthreads();
  if (arch::lane_index() == 0) warp_sums[warp] = value;
  arch::syncthreads();
  int sum = 0;
  for (int w = 0; w < kOrderWarps; ++w) sum += warp_sums[w];
  return sum;
}

// Replaces counts by the sums of all before.
HOPWELL_DEVICE void sum_counts(OrderStorage& s) {
  const int t = arch::thread_index(), lane = arch::lane_index(), warp = arch::warp_index();
  static_assert(kDigits * kOrderWarps <= kOrderThreads);
  const int own = t < kDigits * kOrderWarps ? s.counts[t] : 0;
  int sum = tile::sum_up_to_lane(own);
  if (lane == 31) s.warp_sums[warp] = sum;
  arch::syncthreads();
  for (int w = 0; w < warp; ++w) sum += s.warp_sums[w];
  if (t < kDigits * kOrderWarps) s.counts[t] = sum - own;
  arch::syncthreads();
}

// One pass of a radix sort, by the digit at `shift`: each warp ranks its own stretch of the row, and equal digits stay
// in order.
HOPWELL_DEVICE void sort_by_digit(OrderStorage& s, int from, int rounds, int shift) {
  const int t = arch::thread_index(), lane = arch::lane_index(), warp = arch::warp_index();
  const int first = warp * rounds * 32 + lane;
  if (t < kDigits * kOrderWarps) s.counts[t] = 0;
  arch::syncthreads();
  int rank[kRounds];
  HOPWELL_UNROLL
  for (int r = 0; r < kRounds; ++r) {
    if (r >= rounds) break;
    const auto digit = int(s.keys[from][first + 32 * r] >> shift & (kDigits - 1));
    uint32_t same = 0xffffffff;  // lanes with this digit
    HOPWELL_UNROLL
    for (int bit = 0; bit < kDigitBits; ++bit) {
      const uint32_t set = arch::ballot(digit >> bit & 1);
      same &= digit >> bit & 1 ? set : ~set;
    }
    int& count = s.counts[digit * kOrderWarps + warp];
    const int before = count, lower = std::popcount(same & ((1u << lane) - 1));
    rank[r] = before + lower;
    arch::syncwarp();
    if (lower == 0) count = before + std::popcount(same);
    arch::syncwarp();  // kept: the next round reads the count; rows of up to 512 entries have one round
  }
  arch::syncthreads();
  sum_counts(s);
  HOPWELL_UNROLL
  for (int r = 0; r < kRounds; ++r) {
    if (r >= rounds) break;
    const uint32_t key = s.keys[from][first + 32 * r];
    const int to = s.counts[int(key >> shift & (kDigits - 1)) * kOrderWarps + warp] + rank[r];
    if (unsigned(to) >= kLongestRow) continue;  // were a barrier lost, numbers would be wrong, but not addresses
    s.keys[1 - from][to] = key;
    s.sources[1 - from][to] = s.sources[from][first + 32 * r];
  }
  arch::syncthreads();
}

// A CTA for one query. Rows that ascend already are only copied. Entries that do not count stand as a key with a bit
// above those of all others.
__global__ void __launch_bounds__(kOrderThreads) order_row(const __grid_constant__ OrderParams p) {
  auto& s = arch::dynamic_smem<OrderStorage>();
  const int t = arch::thread_index(), query = arch::block_index();
  clear_some_rows(p.sums);
  for (int64_t i = t; i < p.attn.words && query < p.attn.rows; i += kOrderThreads)
    p.attn.data[query * p.attn.stride + i] = 0;
  if (!p.merged.wants(query)) return;
  const Entries entries = tile::entries_of(p.selection, query);
  const int rounds = (entries.length + kOrderThreads - 1) / kOrderThreads, bits = std::bit_width(entries.visible.end());
  int valid = 0;
  for (int i = t; i < rounds * kOrderThreads; i += kOrderThreads) {
    const int key = entries.key(i);
    s.keys[0][i] = key < 0 ? 1u << bits : uint32_t(key);
    s.sources[0][i] = uint16_t(i);
    valid += key >= 0;
  }
  const int length = sum_over_cta(s.warp_sums, valid);
  int descents = 0;
  for (int i = t; i + 1 < rounds * kOrderThreads; i += kOrderThreads) descents += s.keys[0][i] > s.keys[0][i + 1];
  int from = 0;
  if (sum_over_cta(s.warp_sums, descents) > 0) {
    const int lowest = bits + 1 > kSortedBits ? bits + 1 - kSortedBits : 0;
    for (int shift = lowest; shift <= bits; shift += kDigitBits, from = 1 - from) sort_by_digit(s, from, rounds, shift);
  }
  for (int i = t; i < entries.length && i < length; i += kOrderThreads) {
    p.rows[int64_t{query} * p.selection.topk + i] = int(s.keys[from][i]);
    const int source = s.sources[from][i];
    if (p.sources) p.sources[int64_t{query} * p.selection.topk + i] = uint16_t(source < entries.length ? source : 0);
  }
  if (t == 0) p.lengths[query] = length;
}

inline void order_rows(const Problem& problem, const Plan& plan, Stream stream) {
  if (!plan.orders_rows) return;
  const Workspace& workspace = plan.workspace;
  const ClearParams attn = attn_sums_of(problem, plan);
  const OrderParams p{tile::params_of(problem.selection),
                      scratch<int>(problem, workspace.rows),
                      attn.data ? scratch<uint16_t>(problem, workspace.sources) : nullptr,
                      scratch<int>(problem, workspace.lengths),
                      params_of({}, problem, plan, plan.singles).merged,
                      dkv_sums_of(problem, plan),
                      attn};
  runtime::launch(kName, order_row, shape_of_ctas(problem.s_q, kOrderThreads, sizeof(OrderStorage)), stream, p);
}

// ---- attn

struct RestoreAttnParams {
  float* attn;              // [s_q, topk]: the sums of a row's keys in their order before, at their entries after
  const uint16_t* sources;  // [s_q, topk], lengths [s_q]: as order_row gives them
  const int* lengths;
  int64_t stride;
  int topk;
};

// A CTA for one query.
__global__ void __launch_bounds__(kOrderThreads) restore_attn_order(const __grid_constant__ RestoreAttnParams p) {
  auto& row = arch::dynamic_smem<float[kLongestRow]>();
  const int t = arch::thread_index(), query = arch::block_index(), length = p.lengths[query];
  float* attn = p.attn + query * p.stride;
  for (int i = t; i < p.topk; i += kOrderThreads) row[i] = 0;
  arch::syncthreads();
  for (int i = t; i < length && i < p.topk; i += kOrderThreads) {
    const int source = p.sources[int64_t{query} * p.topk + i];
    if (source < p.topk) row[source] = attn[i];  // always; were a barrier of order_row lost, addresses would be right
  }
  arch::syncthreads();
  for (int i = t; i < p.topk; i += kOrderThreads) attn[i] = row[i];
}

inline void restore_attn(const Problem& problem, const Plan& plan, Stream stream) {
  if (!plan.orders_rows || !problem.attn || plan.distribution) return;
  const RestoreAttnParams p{problem.attn.as<float>(), scratch<uint16_t>(problem, plan.workspace.sources),
                            scratch<int>(problem, plan.workspace.lengths), problem.attn.stride[0],
                            static_cast<int>(problem.topk)};
  runtime::launch(kName, restore_attn_order, shape_of_ctas(problem.s_q, kOrderThreads, sizeof(float[kLongestRow])),
                  stream, p);
}

}  // namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET
