// lightning_indexer on GPUs: the topk best keys of a query, of equal ones the smaller, in ascending order.
//
// Tile      a CTA has a query's row of scores, visible ones only: places in it count from the first visible key
// Timeline  up to eight times: count the digits of 4 bits of all scores that begin like the threshold │ barrier │ the next
//           digit of the threshold; then each warp counts what it selects of its range of keys │ barrier │ writes it
// Budget    shared 4,352 B; reads a row up to ten times, from L1 or L2
#pragma once

#include <bit>
#include <cmath>

#include "arch/sm80/threads.hpp"
#include "ops/lightning_indexer/plan.hpp"
#include "runtime/launch.hpp"

namespace hopwell::ops::lightning_indexer::HOPWELL_TARGET {

struct SelectConfig {
  static constexpr int kDigitBits = 4, kDigits = 1 << kDigitBits;
};

struct SelectParams {
  Visibility visibility;
  const float* scores;  // [queries, pitch]
  int64_t first_query, pitch;
  int* indices;       // [s_q, topk]
  float* top_scores;  // [s_q, topk], or null
  int64_t indices_stride, top_stride;
  int s_kv, topk;
  int warps;  // of a CTA
};

struct SelectStorage {
  int digits[2][kMaxSelectWarps][SelectConfig::kDigits];
  struct {
    int above, equal;  // scores above the threshold, and equal ones
  } of_warp[kMaxSelectWarps];
};

// A query's scores, and what is written for it.
struct QueryRow {
  const float* scores;  // of visible keys
  int* indices;
  float* top_scores;
  int first_key, visible;  // of so many keys
};
HOPWELL_DEVICE QueryRow row_of(const SelectParams& p, int query) {
  const KeyRange visible = p.visibility.keys(p.first_query + query, p.s_kv);
  return {p.scores + query * p.pitch + visible.first, p.indices + (p.first_query + query) * p.indices_stride,
          p.top_scores ? p.top_scores + (p.first_query + query) * p.top_stride : nullptr, int(visible.first),
          int(visible.count)};
}

// Entry i of what is written for a query that sees no more keys than are asked for.
HOPWELL_DEVICE void write_visible(const QueryRow& row, int i) {
  row.indices[i] = i < row.visible ? row.first_key + i : -1;
  if (row.top_scores) row.top_scores[i] = i < row.visible ? row.scores[i] : -INFINITY;
}

// Numbers in the order of the floats.
HOPWELL_DEVICE uint32_t order_of(float x) {
  const auto bits = arch::bit_cast<uint32_t>(x);
  return bits >> 31 ? ~bits : bits | 0x80000000U;
}

// Selected are scores of higher order, and the first `equal` of the same.
struct Threshold {
  uint32_t order;
  int equal;
};

// The scores of 32 keys from `begin` on, a lane a key, then `step` further …: visit(key, score, whether it exists). Eight
// loads at a time.
template <class Visit>
HOPWELL_DEVICE void for_each_score(const float* scores, int begin, int end, int step, Visit visit) {
  constexpr int kTogether = 8;
  for (int first = begin; first < end; first += kTogether * step) {
    const int key = first + arch::lane_index();
    float score[kTogether];
    HOPWELL_UNROLL
    for (int i = 0; i < kTogether; ++i) score[i] = key + i * step < end ? scores[key + i * step] : 0;
    HOPWELL_UNROLL
    for (int i = 0; i < kTogether; ++i) {
      if (first + i * step >= end) break;
      visit(key + i * step, score[i], key + i * step < end);
    }
  }
}

// How often digit lane % 16 at `shift` comes among this warp's scores that begin with `prefix`.
HOPWELL_DEVICE int count_digit(const SelectParams& p, const QueryRow& row, uint32_t prefix, int shift) {
  const uint32_t lane = uint32_t(arch::lane_index());
  uint32_t unlike[SelectConfig::kDigitBits];  // all ones where this lane's digit has a zero
  HOPWELL_UNROLL
  for (int bit = 0; bit < SelectConfig::kDigitBits; ++bit) unlike[bit] = lane >> bit & 1 ? 0 : 0xffffffff;
  int count = 0;
  for_each_score(row.scores, 32 * arch::warp_index(), row.visible, 32 * p.warps, [&](int, float score, bool exists) {
    const uint32_t order = order_of(score), digit = order >> shift;
    uint32_t same = arch::ballot(exists && digit >> SelectConfig::kDigitBits == prefix);
    if (same == 0) return;
    HOPWELL_UNROLL
    for (int bit = 0; bit < SelectConfig::kDigitBits; ++bit) same &= arch::ballot(digit >> bit & 1) ^ unlike[bit];
    count += std::popcount(same);
  });
  return count;
}

HOPWELL_DEVICE Threshold find_threshold(const SelectParams& p, SelectStorage& s, const QueryRow& row) {
  const int lane = arch::lane_index(), warp = arch::warp_index();
  Threshold threshold{0, p.topk};
  for (int shift = 32 - SelectConfig::kDigitBits, turn = 0; shift >= 0; shift -= SelectConfig::kDigitBits, turn ^= 1) {
    const int own = count_digit(p, row, threshold.order, shift);
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
      return {(threshold.order << shift) - 1, 0};  // all that begin like this are selected
  }
  return threshold;
}

// Each warp has a range of the row, 32 keys at a time.
HOPWELL_DEVICE void write_topk(const SelectParams& p, SelectStorage& s, const QueryRow& row,
                               const Threshold& threshold) {
  const int lane = arch::lane_index(), warp = arch::warp_index(), n = row.visible;
  const int each = (n + 32 * p.warps - 1) / (32 * p.warps) * 32;
  const int begin = warp * each, end = begin + each < n ? begin + each : n;
  int above = 0, equal = 0;
  for_each_score(row.scores, begin, end, 32, [&](int, float score, bool exists) {
    const uint32_t order = order_of(score);
    above += std::popcount(arch::ballot(exists && order > threshold.order));
    equal += std::popcount(arch::ballot(exists && order == threshold.order));
  });
  if (lane == 0) s.of_warp[warp] = {above, equal};
  arch::syncthreads();
  above = equal = 0;
  for (int w = 0; w < warp; ++w) above += s.of_warp[w].above, equal += s.of_warp[w].equal;
  for_each_score(row.scores, begin, end, 32, [&](int key, float score, bool exists) {
    const uint32_t order = order_of(score), lanes_before = (1U << lane) - 1;
    const uint32_t are_above = arch::ballot(exists && order > threshold.order),
                   are_equal = arch::ballot(exists && order == threshold.order);
    const int equal_before = equal + std::popcount(are_equal & lanes_before);
    const bool taken = (are_above >> lane & 1) || ((are_equal >> lane & 1) && equal_before < threshold.equal);
    const int at = above + std::popcount(are_above & lanes_before) +
                   (equal_before < threshold.equal ? equal_before : threshold.equal);
    if (taken && unsigned(at) < unsigned(p.topk)) {  // always; were a barrier lost, places would still be of the row
      row.indices[at] = row.first_key + key;
      if (row.top_scores) row.top_scores[at] = score;
    }
    above += std::popcount(are_above), equal += std::popcount(are_equal);
  });
}

__global__ void __launch_bounds__(32 * kMaxSelectWarps) select_keys(const __grid_constant__ SelectParams p) {
  auto& s = arch::dynamic_smem<SelectStorage>();
  const QueryRow row = row_of(p, arch::block_index());
  if (row.visible > p.topk) return write_topk(p, s, row, find_threshold(p, s, row));
  for (int i = arch::thread_index(); i < p.topk; i += 32 * p.warps) write_visible(row, i);
}

SelectParams select_params(const Problem& problem, std::int64_t first_query, int warps) {
  SelectParams p{};
  p.visibility = problem.visibility;
  p.scores = static_cast<const float*>(problem.workspace), p.first_query = first_query, p.pitch = problem.s_kv;
  p.indices = problem.indices.as<int>(), p.indices_stride = problem.indices.stride[0];
  p.top_scores = problem.scores.as<float>(), p.top_stride = problem.scores.stride[0];
  p.s_kv = static_cast<int>(problem.s_kv), p.topk = static_cast<int>(problem.topk);
  p.warps = warps;
  return p;
}

// For `count` queries from `first` on.
void launch_select(const Problem& problem, std::int64_t first, std::int64_t count, Stream stream) {
  const SelectPlan plan = plan_select(problem, count);
  runtime::launch(kName, select_keys,
                  {.grid = {static_cast<std::uint32_t>(count)},
                   .threads = 32 * static_cast<std::uint32_t>(plan.warps),
                   .shared_bytes = sizeof(SelectStorage)},
                  stream, select_params(problem, first, plan.warps));
}

}  // namespace hopwell::ops::lightning_indexer::HOPWELL_TARGET
