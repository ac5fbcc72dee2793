// A query's valid keys in ascending order, by ranges of keys, so that CTAs at one pace (tile/gpu/pacing.hpp) meet in L2.
#pragma once

#include <bit>

#include "arch/sm80/reduce.hpp"
#include "tile/gpu/entries.hpp"
#include "tile/gpu/warp.hpp"

namespace hopwell::tile {

inline constexpr int kOrderThreads = 512, kOrderWarps = kOrderThreads / 32;
inline constexpr int kOrderRounds = kLongestOrderedRow / kOrderThreads, kDigitBits = 4, kDigits = 1 << kDigitBits;
inline constexpr int kSortedBits =
    2 * kDigitBits;  // the highest, one of which tells invalid entries: 128 ranges of keys

struct OrderedRows {
  int* rows;          // [s_q, topk]: the keys of valid entries by ranges; within one in the order of their entries
  uint16_t* sources;  // [s_q, topk]: the entries that they come from; or null
  int* lengths;       // [s_q]: how many
};

/// What a kernel is told of its rows, instead of the selection that they come from.
inline SelectionParams ordered_selection_of(SelectionParams p, const OrderedRows& ordered) {
  p.indices = ordered.rows, p.indices_stride = p.topk;
  p.topk_length = ordered.lengths, p.length_stride = 1;
  p.visibility = {};
  return p;
}

struct OrderStorage {
  uint32_t keys[2][kLongestOrderedRow];
  uint16_t sources[2][kLongestOrderedRow];
  int counts[kDigits * kOrderWarps];  // by digit, then warp
  int warp_sums[kOrderWarps];
};

/// The sum of the CTA's values.
HOPWELL_DEVICE int sum_over_cta(int (&warp_sums)[kOrderWarps], int value) {
  const int warp = arch::warp_index();
  value = sum_of_warp(value);
  arch::syncthreads();
  if (arch::lane_index() == 0) warp_sums[warp] = value;
  arch::syncthreads();
  int sum = 0;
  for (int w = 0; w < kOrderWarps; ++w) sum += warp_sums[w];
  return sum;
}

/// Replaces counts by the sums of all before.
HOPWELL_DEVICE void sum_counts(OrderStorage& s) {
  const int t = arch::thread_index(), lane = arch::lane_index(), warp = arch::warp_index();
  static_assert(kDigits * kOrderWarps <= kOrderThreads);
  const int own = t < kDigits * kOrderWarps ? s.counts[t] : 0;
  int sum = sum_up_to_lane(own);
  if (lane == 31) s.warp_sums[warp] = sum;
  arch::syncthreads();
  for (int w = 0; w < warp; ++w) sum += s.warp_sums[w];
  if (t < kDigits * kOrderWarps) s.counts[t] = sum - own;
  arch::syncthreads();
}

/// One pass of a radix sort, by the digit at `shift`: each warp ranks its own stretch of the row, and equal digits stay
/// in order.
HOPWELL_DEVICE void sort_by_digit(OrderStorage& s, int from, int rounds, int shift) {
  const int t = arch::thread_index(), lane = arch::lane_index(), warp = arch::warp_index();
  const int first = warp * rounds * 32 + lane;
  if (t < kDigits * kOrderWarps) s.counts[t] = 0;
  arch::syncthreads();
  int rank[kOrderRounds];
  HOPWELL_UNROLL
  for (int r = 0; r < kOrderRounds; ++r) {
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
  for (int r = 0; r < kOrderRounds; ++r) {
    if (r >= rounds) break;
    const uint32_t key = s.keys[from][first + 32 * r];
    const int to = s.counts[int(key >> shift & (kDigits - 1)) * kOrderWarps + warp] + rank[r];
    if (unsigned(to) >= kLongestOrderedRow) continue;  // were a barrier lost, numbers would be wrong, but not addresses
    s.keys[1 - from][to] = key;
    s.sources[1 - from][to] = s.sources[from][first + 32 * r];
  }
  arch::syncthreads();
}

/// Puts a query's row in order, by a CTA of kOrderThreads. Rows that ascend already are only copied. Entries that do not
/// count stand as a key with a bit above those of all others.
HOPWELL_DEVICE void order_row_of_query(const SelectionParams& selection, const OrderedRows& to, OrderStorage& s,
                                       int query) {
  const int t = arch::thread_index();
  const Entries entries = entries_of(selection, query);
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
    to.rows[int64_t{query} * selection.topk + i] = int(s.keys[from][i]);
    const int source = s.sources[from][i];
    if (to.sources) to.sources[int64_t{query} * selection.topk + i] = uint16_t(source < entries.length ? source : 0);
  }
  if (t == 0) to.lengths[query] = length;
}

}  // namespace hopwell::tile
