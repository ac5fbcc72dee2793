// Sorts a query's valid keys into 32 ascending ranges of keys, so that throttled CTAs (tile/gpu/throttle.hpp) share
// rows in L2.
#pragma once

#include <bit>

#include "arch/sm80/reduce.hpp"
#include "tile/gpu/entries.hpp"
#include "tile/gpu/warp.hpp"

namespace hopwell::tile {

inline constexpr int kOrderThreads = 512, kOrderWarps = kOrderThreads / 32, kOrderCtas = 4;  // per SM
inline constexpr int kOrderRounds = kLongestOrderedRow / kOrderThreads;
inline constexpr int kKeyRangeBits = 5, kKeyRanges = 1 << kKeyRangeBits;
inline constexpr uint32_t kNoRank = 0xffffffff;
inline constexpr int kNoKey = 0x7fffffff;  // more than any

struct OrderedRows {
  int* rows;          // [s_q, topk]: keys of the valid entries, by range; within a range in the order of their entries,
                      // or all in reverse
  uint16_t* sources;  // [s_q, topk]: original entries of these keys; or null
  int* lengths;       // [s_q]: number of valid entries
};

/// The selection that a kernel uses instead of the original one.
inline SelectionParams ordered_selection_of(SelectionParams p, const OrderedRows& ordered) {
  p.indices = ordered.rows, p.indices_stride = p.topk;
  p.lengths = ordered.lengths, p.length_stride = 1;
  p.visibility = {};
  return p;
}

struct OrderStorage {
  int entries[kLongestOrderedRow];  // the original row; -1 beyond its length
  int keys[kLongestOrderedRow];
  uint16_t sources[kLongestOrderedRow];
  int counts[kKeyRanges * kOrderWarps];  // by range, then by warp
  int warp_sums[kOrderWarps], length;
  int largest[kOrderWarps], largest_complement[kOrderWarps];  // of a warp's keys, and of ~key
};

/// Replaces counts by their exclusive prefix sums and returns the total.
HOPWELL_DEVICE int sum_counts(OrderStorage& s) {
  const int t = arch::thread_index(), lane = arch::lane_index(), warp = arch::warp_index();
  static_assert(kKeyRanges * kOrderWarps == kOrderThreads);
  const int own = s.counts[t];
  int sum = sum_up_to_lane(own);
  if (lane == 31) s.warp_sums[warp] = sum;
  arch::syncthreads();
  for (int w = 0; w < warp; ++w) sum += s.warp_sums[w];
  s.counts[t] = sum - own;
  if (t == kOrderThreads - 1) s.length = sum;
  arch::syncthreads();
  return s.length;
}

/// Keys first … first + count − 1, which are cut into kKeyRanges ranges.
struct KeySpan {
  int first, count;
};

/// From a row's first valid key to its last. By a CTA of kOrderThreads.
HOPWELL_DEVICE KeySpan span_of_keys(const Entries& entries, OrderStorage& s) {
  int largest = -1, largest_complement = ~kNoKey;
  for (int i = arch::thread_index(); i < entries.length; i += kOrderThreads) {
    const int key = entries.at(i);
    if (!entries.counts(key)) continue;
    largest = key > largest ? key : largest;
    largest_complement = ~key > largest_complement ? ~key : largest_complement;
  }
  largest = max_of_warp(largest), largest_complement = max_of_warp(largest_complement);
  const int own_warp = arch::warp_index();
  if (arch::lane_index() == 0) s.largest[own_warp] = largest, s.largest_complement[own_warp] = largest_complement;
  arch::syncthreads();
  for (int warp = 0; warp < kOrderWarps; ++warp) {
    largest = s.largest[warp] > largest ? s.largest[warp] : largest;
    largest_complement =
        s.largest_complement[warp] > largest_complement ? s.largest_complement[warp] : largest_complement;
  }
  return {~largest_complement, largest - ~largest_complement + 1};
}

/// Sorts up to kLongestOrderedRow entries of a row in one pass, executed by a CTA of kOrderThreads. More and smaller
/// ranges gain nothing. Each warp ranks its own part of the row, so that the entries of a range stay in order. `size`:
/// entries of the row, at least entries.length. `at`: offset of the first sorted key. `descending`: reverse order.
/// Returns the number of keys.
HOPWELL_DEVICE int order_entries(const Entries& entries, int size, const KeySpan& span, const OrderedRows& to,
                                 int64_t at, OrderStorage& s, bool descending) {
  const int t = arch::thread_index(), lane = arch::lane_index(), warp = arch::warp_index();
  const int rounds = (size + kOrderThreads - 1) / kOrderThreads, first = warp * rounds * 32 + lane;
  const float ranges_a_key = float(kKeyRanges) / float(span.count);
  HOPWELL_UNROLL
  for (int r = 0; r < kOrderRounds; ++r) {
    if (r >= rounds) break;
    s.entries[first + 32 * r] = entries.at(first + 32 * r);
  }
  s.counts[t] = 0;
  arch::syncthreads();
  uint32_t ranks[kOrderRounds];  // rank among the warp's entries of the range; upper bits: the range
  HOPWELL_UNROLL
  for (int r = 0; r < kOrderRounds; ++r) {
    if (r >= rounds) break;
    const int key = s.entries[first + 32 * r];
    const bool valid = entries.counts(key);
    int range = valid ? int(float(key - span.first) * ranges_a_key) : 0;
    range = unsigned(range) < kKeyRanges ? range : kKeyRanges - 1;  // rounding; or a lost barrier
    uint32_t same = arch::ballot(valid);                            // lanes with a key of this range
    HOPWELL_UNROLL
    for (int bit = 0; bit < kKeyRangeBits; ++bit) {
      const uint32_t set = arch::ballot(range >> bit & 1);
      same &= range >> bit & 1 ? set : ~set;
    }
    int& count = s.counts[range * kOrderWarps + warp];
    const int before = count, lower = std::popcount(same & ((1u << lane) - 1));
    ranks[r] = valid ? uint32_t(range) << 16 | uint32_t(before + lower) : kNoRank;
    arch::syncwarp();
    if (valid && lower == 0) count = before + std::popcount(same);
    arch::syncwarp();  // kept: the next round reads the count; rows of up to 512 entries have one round
  }
  arch::syncthreads();
  const int length = sum_counts(s);
  HOPWELL_UNROLL
  for (int r = 0; r < kOrderRounds; ++r) {
    if (r >= rounds) break;
    if (ranks[r] == kNoRank) continue;
    const int place = s.counts[int(ranks[r] >> 16) * kOrderWarps + warp] + int(ranks[r] & 0xffff);
    const int i = descending ? length - 1 - place : place;
    if (unsigned(i) >= kLongestOrderedRow) continue;  // only when a test leaves out a barrier
    s.keys[i] = s.entries[first + 32 * r];
    s.sources[i] = uint16_t(first + 32 * r);
  }
  arch::syncthreads();
  for (int i = t; i < entries.length && i < length; i += kOrderThreads) {
    to.rows[at + i] = s.keys[i];
    const int source = s.sources[i];
    if (to.sources) to.sources[at + i] = uint16_t(source < entries.length ? source : 0);
  }
  return length;
}

}  // namespace hopwell::tile
