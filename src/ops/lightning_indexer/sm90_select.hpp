// lightning_indexer for Hopper: the topk best keys of a query, of equal ones the smaller, in ascending order.
//
// Tile      a cluster of 1 to 8 CTAs has a query's row of scores, visible ones only: 32 scores a lane, in registers, as
//           numbers in their order; a warp a stretch of 1,024 keys
// Timeline  load │ bounds of the threshold, a quarter as far apart each time: every warp counts what reaches three numbers in
//           between, and tells all warps of the cluster │ barrier │ … until as many as are wanted reach the lower bound, or
//           there is one number left; then each warp tells how many it keeps │ barrier │ writes them
// Order     counts are integers: same inputs, same bits
// Budget    registers: 32 of scores, 64 in all; shared 3 × 256 × 8 B
#pragma once

#include "arch/sm90/cluster.hpp"
#include "ops/lightning_indexer/sm80_select.hpp"

namespace hopwell::ops::lightning_indexer {
namespace {

struct ClusterSelectConfig {
  static constexpr int kScores = 32, kMaxWarps = 32, kMaxCluster = 8, kKeysOfWarp = 32 * kScores;
  static constexpr int kMaxKeys = kKeysOfWarp * kMaxWarps * kMaxCluster;
  static constexpr uint32_t kLowest = 0x007fffff, kAboveAll = 0xff800001;  // order of −inf; above that of inf
};

struct ClusterSelectStorage {
  // Of each warp of the cluster: three counts, twice 16 bits and one. In turns; the last is of what warps keep.
  struct Counts {
    uint32_t low_and_middle, high;
  } counts[3][ClusterSelectConfig::kMaxWarps * ClusterSelectConfig::kMaxCluster];
};

struct RowOfWarp {
  uint32_t order[ClusterSelectConfig::kScores];  // of keys first + 32 i + lane; 0: no such key
  int first;                                     // key
  int warp, warps;                               // of the cluster
};

struct Counts3 {
  int of[3];
};

// Waits for all warps that have this query.
HOPWELL_DEVICE void meet(int warps_of_cta, int warps) {
  if (warps == warps_of_cta)
    arch::syncthreads();
  else
    arch::cluster_sync();
}

// Tells three counts of a warp, each at most 1,024, to all CTAs of the cluster.
HOPWELL_DEVICE void tell(ClusterSelectStorage& s, int turn, const RowOfWarp& row, const Counts3& counts) {
  const uint32_t rank = uint32_t(arch::lane_index());
  if (rank >= arch::cluster_size()) return;
  const uint32_t to = arch::map_to_rank(arch::shared_address(&s.counts[turn][row.warp]), rank);
  arch::store_cluster(to, uint32_t(counts.of[0] | counts.of[1] << 16));
  arch::store_cluster(to + 4, uint32_t(counts.of[2]));
}

// Sums of what the cluster's first `warps` warps have told.
HOPWELL_DEVICE Counts3 heard(const ClusterSelectStorage& s, int turn, int warps) {
  Counts3 sums{};
  for (int w = arch::lane_index(); w < warps; w += 32) {
    const ClusterSelectStorage::Counts& counts = s.counts[turn][w];
    sums.of[0] += int(counts.low_and_middle & 0xffff), sums.of[1] += int(counts.low_and_middle >> 16);
    sums.of[2] += int(counts.high);
  }
  HOPWELL_UNROLL
  for (int& sum : sums.of) sum = tile::sum_of_warp(sum);
  return sums;
}

HOPWELL_DEVICE Threshold find_threshold(const SelectParams& p, ClusterSelectStorage& s, const RowOfWarp& row) {
  uint32_t low = ClusterSelectConfig::kLowest,
           high = ClusterSelectConfig::kAboveAll;  // reached by at least topk; by fewer
  int above = 0;                                   // how many reach `high`
  for (int turn = 0; high - low > 1; turn ^= 1) {
    const uint32_t step = high - low < 4 ? 1 : (high - low) / 4;
    uint32_t bound[3];
    HOPWELL_UNROLL
    for (uint32_t i = 0; i < 3; ++i) bound[i] = low + (i + 1) * step < high ? low + (i + 1) * step : high;
    Counts3 own{};
    HOPWELL_UNROLL
    for (int i = 0; i < ClusterSelectConfig::kScores; ++i) {
      HOPWELL_UNROLL
      for (int j = 0; j < 3; ++j) own.of[j] += row.order[i] >= bound[j];
    }
    const int packed = tile::sum_of_warp(own.of[0] | own.of[1] << 16);
    own = {packed & 0xffff, packed >> 16, tile::sum_of_warp(own.of[2])};
    tell(s, turn, row, own);
    meet(p.warps, row.warps);
    const Counts3 counts = heard(s, turn, row.warps);
    int at_low = 0;
    HOPWELL_UNROLL
    for (int j = 0; j < 3; ++j)
      if (counts.of[j] >= p.topk) low = bound[j], at_low = counts.of[j];
    HOPWELL_UNROLL
    for (int j = 2; j >= 0; --j)
      if (counts.of[j] < p.topk) high = bound[j], above = counts.of[j];
    if (at_low == p.topk) return {low - 1, 0};
  }
  return {low, p.topk - above};
}

HOPWELL_DEVICE float score_of(uint32_t order) {
  return arch::bit_cast<float>(order >> 31 ? order & 0x7fffffff : ~order);
}

HOPWELL_DEVICE void write_kept(const SelectParams& p, ClusterSelectStorage& s, const RowOfWarp& row,
                               const Threshold& threshold, int* indices, float* scores) {
  const int lane = arch::lane_index();
  Counts3 kept{};
  HOPWELL_UNROLL
  for (const uint32_t order : row.order) {
    kept.of[0] += order > threshold.order;
    kept.of[1] += order == threshold.order;
  }
  const int packed = tile::sum_of_warp(kept.of[0] | kept.of[1] << 16);
  tell(s, 2, row, {packed & 0xffff, packed >> 16, 0});
  meet(p.warps, row.warps);
  const Counts3 before = heard(s, 2, row.warp);
  int better = before.of[0], equal = before.of[1];
  HOPWELL_UNROLL
  for (int i = 0; i < ClusterSelectConfig::kScores; ++i) {
    const uint32_t order = row.order[i], lanes_before = (1U << lane) - 1;
    const uint32_t are_better = arch::ballot(order > threshold.order),
                   are_equal = arch::ballot(order == threshold.order);
    const int equal_before = equal + std::popcount(are_equal & lanes_before);
    const bool taken = (are_better >> lane & 1) || ((are_equal >> lane & 1) && equal_before < threshold.equal);
    const int at = better + std::popcount(are_better & lanes_before) +
                   (equal_before < threshold.equal ? equal_before : threshold.equal);
    if (taken && unsigned(at) < unsigned(p.topk)) {  // always; were a barrier lost, places would still be of the row
      indices[at] = row.first + 32 * i + lane;
      if (scores) scores[at] = score_of(order);
    }
    better += std::popcount(are_better), equal += std::popcount(are_equal);
  }
}

__global__ void __launch_bounds__(32 * ClusterSelectConfig::kMaxWarps)
    select_keys_in_cluster(const __grid_constant__ SelectParams p) {
#if HOPWELL_HAS_SM90A
  auto& s = arch::dynamic_smem<ClusterSelectStorage>();
  const int size = int(arch::cluster_size()), rank = int(arch::cluster_rank()), lane = arch::lane_index();
  const int query = arch::block_index() / size;
  const float* scores = p.scores + query * p.pitch;
  int* indices = p.indices + (p.first_query + query) * p.indices_stride;
  float* kept = p.kept_scores ? p.kept_scores + (p.first_query + query) * p.kept_stride : nullptr;
  const int n = int(p.causality.visible_keys(p.first_query + query, p.s_kv));
  if (n <= p.topk) {
    for (int i = rank * 32 * p.warps + arch::thread_index(); i < p.topk; i += 32 * p.warps * size) {
      indices[i] = i < n ? i : -1;
      if (kept) kept[i] = i < n ? scores[i] : -INFINITY;
    }
    return;
  }
  arch::cluster_arrive_relaxed();  // kept: see the wait
  RowOfWarp row;
  row.warp = rank * p.warps + arch::warp_index(), row.warps = size * p.warps;
  row.first = row.warp * ClusterSelectConfig::kKeysOfWarp;
  HOPWELL_UNROLL
  for (int i = 0; i < ClusterSelectConfig::kScores; ++i) {
    const int key = row.first + 32 * i + lane;
    row.order[i] = key < n ? order_of(scores[key]) : 0;
  }
  arch::cluster_wait();  // kept: before anything is told, all CTAs of the cluster have started
  write_kept(p, s, row, find_threshold(p, s, row), indices, kept);
#endif
}

}  // namespace
}  // namespace hopwell::ops::lightning_indexer
