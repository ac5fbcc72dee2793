// lightning_indexer on GPUs: the topk best keys of a query, of equal ones the smaller, in ascending order.
//
// Tile      a CTA has a query's row of scores, visible ones only
// Timeline  up to eight times: count the digits of 4 bits of all scores that begin like the threshold │ barrier │ the next
//           digit of the threshold; then each warp counts what it keeps of its stretch of keys │ barrier │ writes it
// Budget    shared 4,352 B; reads a row up to ten times, from L1 or L2
#pragma once

#include <bit>
#include <cmath>

#include "arch/sm80/threads.hpp"
#include "ops/lightning_indexer/op.hpp"

namespace hopwell::ops::lightning_indexer {
namespace {

struct SelectConfig {
  static constexpr int kMaxWarps = 32, kDigitBits = 4, kDigits = 1 << kDigitBits;
};

struct SelectParams {
  Causality causality;
  const float* scores;  // [queries, pitch]
  int64_t first_query, pitch;
  int* indices;        // [s_q, topk]
  float* kept_scores;  // [s_q, topk], or null
  int64_t indices_stride, kept_stride;
  int s_kv, topk;
  int warps;  // of a CTA
};

struct SelectStorage {
  int digits[2][SelectConfig::kMaxWarps][SelectConfig::kDigits];
  struct {
    int better, equal;
  } of_warp[SelectConfig::kMaxWarps];
};

// Numbers in the order of the floats.
HOPWELL_DEVICE uint32_t order_of(float x) {
  const auto bits = arch::bit_cast<uint32_t>(x);
  return bits >> 31 ? ~bits : bits | 0x80000000U;
}

// The scores of 32 keys from `begin` on, a lane a key, then `step` further …: visit(key, score, whether it exists). Eight
// loads at a time.
template <class Visit>
HOPWELL_DEVICE void for_each_score(const float* row, int begin, int end, int step, Visit visit) {
  constexpr int kTogether = 8;
  for (int first = begin; first < end; first += kTogether * step) {
    const int key = first + arch::lane_index();
    float score[kTogether];
    HOPWELL_UNROLL
    for (int i = 0; i < kTogether; ++i) score[i] = key + i * step < end ? row[key + i * step] : 0;
    HOPWELL_UNROLL
    for (int i = 0; i < kTogether; ++i) {
      if (first + i * step >= end) break;
      visit(key + i * step, score[i], key + i * step < end);
    }
  }
}

// How often digit lane % 16 at `shift` comes among this warp's scores that begin with `prefix`.
HOPWELL_DEVICE int count_digit(const SelectParams& p, const float* row, int n, uint32_t prefix, int shift) {
  const uint32_t lane = uint32_t(arch::lane_index());
  uint32_t unlike[SelectConfig::kDigitBits];  // all ones where this lane's digit has a zero
  HOPWELL_UNROLL
  for (int bit = 0; bit < SelectConfig::kDigitBits; ++bit) unlike[bit] = lane >> bit & 1 ? 0 : 0xffffffff;
  int count = 0;
  for_each_score(row, 32 * arch::warp_index(), n, 32 * p.warps, [&](int, float score, bool exists) {
    const uint32_t order = order_of(score), digit = order >> shift;
    uint32_t same = arch::ballot(exists && digit >> SelectConfig::kDigitBits == prefix);
    if (same == 0) return;
    HOPWELL_UNROLL
    for (int bit = 0; bit < SelectConfig::kDigitBits; ++bit) same &= arch::ballot(digit >> bit & 1) ^ unlike[bit];
    count += std::popcount(same);
  });
  return count;
}

// What is kept: scores of higher order than the threshold, and the first `equal` of the same.
struct Threshold {
  uint32_t order;
  int equal;
};

HOPWELL_DEVICE Threshold find_threshold(const SelectParams& p, SelectStorage& s, const float* row, int n) {
  const int lane = arch::lane_index(), warp = arch::warp_index();
  Threshold threshold{0, p.topk};
  for (int shift = 32 - SelectConfig::kDigitBits, turn = 0; shift >= 0; shift -= SelectConfig::kDigitBits, turn ^= 1) {
    const int own = count_digit(p, row, n, threshold.order, shift);
    if (lane < SelectConfig::kDigits) s.digits[turn][warp][lane] = own;
    arch::syncthreads();
    // Lane l has digit 15 − l.
    int count = 0;
    for (int w = 0; w < p.warps && lane < SelectConfig::kDigits; ++w)
      count += s.digits[turn][w][SelectConfig::kDigits - 1 - lane];
    int sum = count;
    for (int step = 1; step < SelectConfig::kDigits; step *= 2) {
      const int before = arch::shuffle(sum, (lane - step) & 31);
      sum += lane >= step ? before : 0;
    }
    const uint32_t reached = arch::ballot(sum >= threshold.equal && lane < SelectConfig::kDigits);
    int digit = 0;  // lane of the first that reaches it
    while (digit + 1 < SelectConfig::kDigits && !(reached >> digit & 1)) ++digit;
    threshold.equal -= arch::shuffle(sum - count, digit);
    threshold.order = threshold.order << SelectConfig::kDigitBits | uint32_t(SelectConfig::kDigits - 1 - digit);
    if (threshold.equal == arch::shuffle(count, digit) && threshold.order > 0)
      return {(threshold.order << shift) - 1, 0};  // all that begin like this are kept
  }
  return threshold;
}

// Each warp has a stretch of the row, 32 keys at a time.
HOPWELL_DEVICE void write_kept(const SelectParams& p, SelectStorage& s, const float* row, int n,
                               const Threshold& threshold, int* indices, float* scores) {
  const int lane = arch::lane_index(), warp = arch::warp_index();
  const int each = (n + 32 * p.warps - 1) / (32 * p.warps) * 32;
  const int begin = warp * each, end = begin + each < n ? begin + each : n;
  int better = 0, equal = 0;
  for_each_score(row, begin, end, 32, [&](int, float score, bool exists) {
    const uint32_t order = order_of(score);
    better += std::popcount(arch::ballot(exists && order > threshold.order));
    equal += std::popcount(arch::ballot(exists && order == threshold.order));
  });
  if (lane == 0) s.of_warp[warp] = {better, equal};
  arch::syncthreads();
  better = equal = 0;
  for (int w = 0; w < warp; ++w) better += s.of_warp[w].better, equal += s.of_warp[w].equal;
  for_each_score(row, begin, end, 32, [&](int key, float score, bool exists) {
    const uint32_t order = order_of(score), before = (1U << lane) - 1;
    const uint32_t are_better = arch::ballot(exists && order > threshold.order),
                   are_equal = arch::ballot(exists && order == threshold.order);
    const int equal_before = equal + std::popcount(are_equal & before);
    const bool taken = (are_better >> lane & 1) || ((are_equal >> lane & 1) && equal_before < threshold.equal);
    const int at =
        better + std::popcount(are_better & before) + (equal_before < threshold.equal ? equal_before : threshold.equal);
    if (taken && unsigned(at) < unsigned(p.topk)) {  // always; were a barrier lost, places would still be of the row
      indices[at] = key;
      if (scores) scores[at] = score;
    }
    better += std::popcount(are_better), equal += std::popcount(are_equal);
  });
}

__global__ void __launch_bounds__(32 * SelectConfig::kMaxWarps) select_keys(const __grid_constant__ SelectParams p) {
  auto& s = arch::dynamic_smem<SelectStorage>();
  const int query = arch::block_index();
  const float* row = p.scores + query * p.pitch;
  int* indices = p.indices + (p.first_query + query) * p.indices_stride;
  float* scores = p.kept_scores ? p.kept_scores + (p.first_query + query) * p.kept_stride : nullptr;
  const int n = int(p.causality.visible_keys(p.first_query + query, p.s_kv));
  if (n > p.topk) return write_kept(p, s, row, n, find_threshold(p, s, row, n), indices, scores);
  for (int i = arch::thread_index(); i < p.topk; i += 32 * p.warps) {
    indices[i] = i < n ? i : -1;
    if (scores) scores[i] = i < n ? row[i] : -INFINITY;
  }
}

}  // namespace
}  // namespace hopwell::ops::lightning_indexer
