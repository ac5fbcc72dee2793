// lightning_indexer of few queries of long rows, where CTAs form clusters: the topk best keys of a query, of equal ones the smaller, in ascending order.
//
// Tile      a cluster of 8 CTAs has a query's row of scores, visible ones only: 32 scores a lane, in registers, as
//           numbers in their order; a warp a range of 1,024 keys
// Timeline  load │ bounds of the threshold, a quarter as far apart each time: every warp counts what reaches three numbers in
//           between, and broadcasts the counts to the cluster │ barrier │ … until as many as are wanted reach the lower bound,
//           or there is one number left; then each warp broadcasts how many it selects │ barrier │ writes them
// Order     counts are integers: same inputs, same bits
// Budget    registers: 32 of scores, 64 in all; shared 3 × 256 × 8 B
#pragma once

#include "arch/sm90/cluster.hpp"
#include "ops/lightning_indexer/sampled_select.hpp"
#include "tile/gpu/warp.hpp"

namespace hopwell::ops::lightning_indexer::HOPWELL_TARGET {

struct ClusterSelectConfig {
  static constexpr int kScores = kKeysPerSelectWarp / 32;                  // of a lane
  static constexpr uint32_t kLowest = 0x007fffff, kAboveAll = 0xff800001;  // order of −inf; above that of inf
};

// How many of a warp's scores, at most 1,024, reach each of three numbers.
struct BoundCounts {
  int reach[3];
};

struct ClusterSelectStorage {
  // Of each warp of the cluster. The first two buffers take turns; the last is of what warps select.
  struct Packed {
    uint32_t first_two, third;  // twice 16 bits, and one
  } counts[3][kMaxSelectWarps * kSelectCluster];
};

struct WarpScores {
  uint32_t order[ClusterSelectConfig::kScores];  // of keys first + 32 i + lane; 0: no such key
  int first;                                     // key
  int warp, warps;                               // of the cluster
};

// Writes this warp's counts to all CTAs of the cluster.
HOPWELL_DEVICE void broadcast_counts(ClusterSelectStorage& s, int buffer, const WarpScores& scores,
                                     const BoundCounts& counts) {
  const uint32_t rank = uint32_t(arch::lane_index());
  if (rank >= arch::cluster_size()) return;
  const uint32_t to = arch::map_to_rank(arch::shared_address(&s.counts[buffer][scores.warp]), rank);
  arch::store_cluster(to, uint32_t(counts.reach[0] | counts.reach[1] << 16));
  arch::store_cluster(to + 4, uint32_t(counts.reach[2]));
}

// Sums of the counts that the first `warps` warps have broadcast.
HOPWELL_DEVICE BoundCounts sum_counts(const ClusterSelectStorage& s, int buffer, int warps) {
  BoundCounts sums{};
  for (int w = arch::lane_index(); w < warps; w += 32) {
    const ClusterSelectStorage::Packed& counts = s.counts[buffer][w];
    sums.reach[0] += int(counts.first_two & 0xffff), sums.reach[1] += int(counts.first_two >> 16);
    sums.reach[2] += int(counts.third);
  }
  HOPWELL_UNROLL
  for (int& sum : sums.reach) sum = tile::sum_of_warp(sum);
  return sums;
}

// Selected are scores of higher order, and the first `equal` of the same.
struct ClusterThreshold {
  uint32_t order;
  int equal;
};

HOPWELL_DEVICE ClusterThreshold find_threshold(const SelectParams& p, ClusterSelectStorage& s,
                                               const WarpScores& scores) {
  uint32_t low = ClusterSelectConfig::kLowest,
           high = ClusterSelectConfig::kAboveAll;  // reached by at least topk; by fewer
  int above = 0;                                   // how many reach `high`
  for (int turn = 0; high - low > 1; turn ^= 1) {
    const uint32_t step = high - low < 4 ? 1 : (high - low) / 4;
    uint32_t bound[3];
    HOPWELL_UNROLL
    for (uint32_t i = 0; i < 3; ++i) bound[i] = low + (i + 1) * step < high ? low + (i + 1) * step : high;
    BoundCounts own{};
    HOPWELL_UNROLL
    for (int i = 0; i < ClusterSelectConfig::kScores; ++i) {
      HOPWELL_UNROLL
      for (int j = 0; j < 3; ++j) own.reach[j] += scores.order[i] >= bound[j];
    }
    const int packed = tile::sum_of_warp(own.reach[0] | own.reach[1] << 16);
    own = {packed & 0xffff, packed >> 16, tile::sum_of_warp(own.reach[2])};
    broadcast_counts(s, turn, scores, own);
    arch::cluster_sync();
    const BoundCounts counts = sum_counts(s, turn, scores.warps);
    int at_low = 0;
    HOPWELL_UNROLL
    for (int j = 0; j < 3; ++j)
      if (counts.reach[j] >= p.topk) low = bound[j], at_low = counts.reach[j];
    HOPWELL_UNROLL
    for (int j = 2; j >= 0; --j)
      if (counts.reach[j] < p.topk) high = bound[j], above = counts.reach[j];
    if (at_low == p.topk) return {low - 1, 0};
  }
  return {low, p.topk - above};
}

HOPWELL_DEVICE float score_of(uint32_t order) {
  return arch::bit_cast<float>(order >> 31 ? order & 0x7fffffff : ~order);
}

HOPWELL_DEVICE void write_topk(const SelectParams& p, ClusterSelectStorage& s, const QueryRow& row,
                               const WarpScores& scores, const ClusterThreshold& threshold) {
  const int lane = arch::lane_index();
  BoundCounts own{};
  HOPWELL_UNROLL
  for (const uint32_t order : scores.order) {
    own.reach[0] += order > threshold.order;
    own.reach[1] += order == threshold.order;
  }
  const int packed = tile::sum_of_warp(own.reach[0] | own.reach[1] << 16);
  broadcast_counts(s, 2, scores, {packed & 0xffff, packed >> 16, 0});
  arch::cluster_sync();
  const BoundCounts before = sum_counts(s, 2, scores.warp);
  int above = before.reach[0], equal = before.reach[1];
  HOPWELL_UNROLL
  for (int i = 0; i < ClusterSelectConfig::kScores; ++i) {
    const uint32_t order = scores.order[i];
    const uint32_t lanes_before = (1U << lane) - 1;
    const uint32_t are_above = arch::ballot(order > threshold.order),
                   are_equal = arch::ballot(order == threshold.order);
    const int equal_before = equal + std::popcount(are_equal & lanes_before);
    const bool taken = (are_above >> lane & 1) || ((are_equal >> lane & 1) && equal_before < threshold.equal);
    const int at = above + std::popcount(are_above & lanes_before) +
                   (equal_before < threshold.equal ? equal_before : threshold.equal);
    if (taken && unsigned(at) < unsigned(p.topk)) {  // were a barrier lost, it would still be a place in the row
      row.indices[at] = row.first_key + scores.first + 32 * i + lane;
      if (row.top_scores) row.top_scores[at] = score_of(order);
    }
    above += std::popcount(are_above), equal += std::popcount(are_equal);
  }
}

__global__ void __launch_bounds__(32 * kMaxSelectWarps) select_keys_in_cluster(const __grid_constant__ SelectParams p) {
#if HOPWELL_HAS_SM90A
  auto& s = arch::dynamic_smem<ClusterSelectStorage>();
  const int size = int(arch::cluster_size()), rank = int(arch::cluster_rank());
  const QueryRow row = row_of(p, arch::block_index() / size);
  if (row.visible <= p.topk) {
    for (int i = rank * 32 * p.warps + arch::thread_index(); i < p.topk; i += 32 * p.warps * size)
      write_visible(row, i);
    return;
  }
  arch::cluster_arrive_relaxed();  // kept: see the wait
  WarpScores scores;
  scores.warp = rank * p.warps + arch::warp_index(), scores.warps = size * p.warps;
  scores.first = scores.warp * kKeysPerSelectWarp;
  HOPWELL_UNROLL
  for (int i = 0; i < ClusterSelectConfig::kScores; ++i) {
    const int key = scores.first + 32 * i + arch::lane_index();
    scores.order[i] = key < row.visible ? order_of(row.scores[key]) : 0;
  }
  arch::cluster_wait();  // kept: before counts are broadcast, all CTAs of the cluster have started
  write_topk(p, s, row, scores, find_threshold(p, s, scores));
#endif
}

// Whether the device holds all CTAs of such a cluster at a time, also those of most warps.
bool cluster_fits(const runtime::Device& device, const SelectPlan& plan) {
  const arch::LaunchShape largest{
      .threads = 32 * kMaxSelectWarps, .cluster = plan.cluster, .shared_bytes = sizeof(ClusterSelectStorage)};
  return runtime::clusters_that_fit<select_keys_in_cluster>(device, largest) > 0;
}

// For `count` queries from `first` on; by clusters where that is planned and the device has room for one.
void launch_cluster_select(const Problem& problem, std::int64_t first, std::int64_t count, Stream stream) {
  const SelectPlan plan = plan_cluster_select(problem, count);
  if (plan.cluster == 0 || !cluster_fits(problem.device, plan))
    return launch_sampled_select(problem, first, count, stream);
  runtime::launch(kName, select_keys_in_cluster,
                  {.grid = {static_cast<std::uint32_t>(count) * plan.cluster},
                   .threads = 32 * static_cast<std::uint32_t>(plan.warps),
                   .cluster = plan.cluster,
                   .shared_bytes = sizeof(ClusterSelectStorage)},
                  stream, select_params(problem, first, plan));
}

}  // namespace hopwell::ops::lightning_indexer::HOPWELL_TARGET
