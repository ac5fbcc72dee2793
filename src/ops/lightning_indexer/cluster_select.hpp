// lightning_indexer where CTAs form clusters: the topk best keys of a query, of equal ones the smaller, in ascending order.
//
// Tile      a cluster of 1 to 8 CTAs has a query's row of scores, visible ones only: 32 scores a lane, in registers, as
//           numbers in their order; a warp a range of 1,024 keys. Where its first CTA has room for them, only the warps that
//           have keys stay
// Timeline  load │ bounds of the threshold, a quarter as far apart each time: every warp counts what reaches three numbers in
//           between, and broadcasts the counts to the cluster │ barrier │ … until as many as are wanted reach the lower bound,
//           or there is one number left; then each warp broadcasts how many it selects │ barrier │ writes them
// Order     counts are integers: same inputs, same bits
// Budget    registers: 32 of scores, 64 in all; shared 3 × 256 × 8 B
#pragma once

#include "arch/sm90/cluster.hpp"
#include "ops/lightning_indexer/select.hpp"
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
  } counts[3][kMaxSelectWarps * kMaxSelectCluster];
};

struct WarpScores {
  uint32_t order[ClusterSelectConfig::kScores];  // of keys first + 32 i + lane; 0: no such key
  int first;                                     // key
  int warp, warps;                               // of the CTAs that have this query
};

// Waits for all warps that have this query. kFew: some of a CTA, which have a barrier of their own: behind it the compiler takes
// no warp to be together any more, and every vote and shuffle costs more. Otherwise all warps of the cluster.
template <bool kFew>
HOPWELL_DEVICE void sync_query(int warps_of_cta, int warps) {
  if constexpr (kFew)
    arch::barrier_sync(1, 32 * warps);
  else if (warps == warps_of_cta)
    arch::syncthreads();
  else
    arch::cluster_sync();
}

// Writes this warp's counts to all CTAs that have this query.
template <bool kFew>
HOPWELL_DEVICE void broadcast_counts(ClusterSelectStorage& s, int buffer, const WarpScores& scores,
                                     const BoundCounts& counts) {
  const uint32_t rank = uint32_t(arch::lane_index());
  if (rank >= (kFew ? 1 : arch::cluster_size())) return;
  const uint32_t to = arch::map_to_rank(arch::shared_address(&s.counts[buffer][scores.warp]), rank);
  arch::store_cluster(to, uint32_t(counts.reach[0] | counts.reach[1] << 16));
  arch::store_cluster(to + 4, uint32_t(counts.reach[2]));
}

// Sums of the counts that the query's first `warps` warps have broadcast.
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

template <bool kFew>
HOPWELL_DEVICE Threshold find_threshold(const SelectParams& p, ClusterSelectStorage& s, const WarpScores& scores) {
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
    broadcast_counts<kFew>(s, turn, scores, own);
    sync_query<kFew>(p.warps, scores.warps);
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

template <bool kFew>
HOPWELL_DEVICE void write_topk(const SelectParams& p, ClusterSelectStorage& s, const QueryRow& row,
                               const WarpScores& scores, const Threshold& threshold) {
  const int lane = arch::lane_index();
  BoundCounts own{};
  HOPWELL_UNROLL
  for (const uint32_t order : scores.order) {
    own.reach[0] += order > threshold.order;
    own.reach[1] += order == threshold.order;
  }
  const int packed = tile::sum_of_warp(own.reach[0] | own.reach[1] << 16);
  broadcast_counts<kFew>(s, 2, scores, {packed & 0xffff, packed >> 16, 0});
  sync_query<kFew>(p.warps, scores.warps);
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

// kFew: the first CTA of the cluster has warps for all keys that the query sees; those that have none leave.
template <bool kFew>
HOPWELL_DEVICE void select_topk(const SelectParams& p, ClusterSelectStorage& s, const QueryRow& row, int warps) {
  const int lane = arch::lane_index();
  WarpScores scores;
  scores.warp = int(arch::cluster_rank()) * p.warps + arch::warp_index(), scores.warps = warps;
  if (kFew && scores.warp >= scores.warps) return;
  if (!kFew) arch::cluster_arrive_relaxed();  // kept: see the wait
  scores.first = scores.warp * kKeysPerSelectWarp;
  HOPWELL_UNROLL
  for (int i = 0; i < ClusterSelectConfig::kScores; ++i) {
    const int key = scores.first + 32 * i + lane;
    scores.order[i] = key < row.visible ? order_of(row.scores[key]) : 0;
  }
  if (!kFew) arch::cluster_wait();  // kept: before counts are broadcast, all CTAs of the cluster have started
  write_topk<kFew>(p, s, row, scores, find_threshold<kFew>(p, s, scores));
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
  const int needed = (row.visible + kKeysPerSelectWarp - 1) / kKeysPerSelectWarp, all = size * p.warps;
  if (needed <= p.warps && needed < all)
    select_topk<true>(p, s, row, needed);
  else
    select_topk<false>(p, s, row, all);
#endif
}

// Whether the device holds all CTAs of such a cluster at a time, also those of most warps.
bool cluster_select_fits(const runtime::Device& device, const SelectPlan& plan) {
  if (plan.cluster <= 1) return plan.cluster == 1;
  const arch::LaunchShape largest{
      .threads = 32 * kMaxSelectWarps, .cluster = plan.cluster, .shared_bytes = sizeof(ClusterSelectStorage)};
  return runtime::clusters_that_fit<select_keys_in_cluster>(device, largest) > 0;
}

// For `count` queries from `first` on; without clusters where the row is too long for one, or none fits on the device.
void launch_cluster_select(const Problem& problem, std::int64_t first, std::int64_t count, Stream stream) {
  const SelectPlan plan = plan_cluster_select(problem);
  if (!cluster_select_fits(problem.device, plan)) return launch_select(problem, first, count, stream);
  runtime::launch(kName, select_keys_in_cluster,
                  {.grid = {static_cast<std::uint32_t>(count) * plan.cluster},
                   .threads = 32 * static_cast<std::uint32_t>(plan.warps),
                   .cluster = plan.cluster,
                   .shared_bytes = sizeof(ClusterSelectStorage)},
                  stream, select_params(problem, first, plan.warps));
}

}  // namespace hopwell::ops::lightning_indexer::HOPWELL_TARGET
