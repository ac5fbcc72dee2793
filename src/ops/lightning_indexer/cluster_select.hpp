// lightning_indexer for few queries with long rows: a cluster of CTAs selects the topk best keys of a query, ties to
// the smaller key, in ascending order of key.
//
// Tile      a cluster of 8 CTAs has a query's row of visible scores. A lane has 32 scores in shared memory, as sortable
//           keys (here `order`); a warp has a range of 1,024 keys. Loops over a lane's scores are not unrolled, so
//           that a launch loads less code: 4,100 instructions instead of 6,200, and 1 µs less for 64 K keys (H200)
// Timeline  load │ every CTA estimates the same bounds of the threshold, as in sampled_select.hpp │ every warp counts
//           its scores above the bounds and broadcasts the counts to the cluster │ barrier │ broadcasts its scores
//           between the bounds │ barrier │ every CTA finds the threshold among these │ each warp broadcasts the number
//           of its selected keys │ barrier │ writes them.
//           If the estimate fails, new bounds enclose all scores: every warp broadcasts how many of its scores reach
//           each of three values between the bounds │ barrier │ the distance of the bounds becomes a quarter │ …
//           until exactly topk scores reach the lower bound, or the bounds are adjacent
// Order     counts are integers: same inputs, same bits
// Budget    shared: 3 × 256 × 8 B, 25 KiB for the estimate, and 4 KiB of scores for each warp
#pragma once

#include "arch/sm90/cluster.hpp"
#include "ops/lightning_indexer/sampled_select.hpp"
#include "tile/gpu/warp.hpp"

namespace hopwell::ops::lightning_indexer::HOPWELL_TARGET {

struct ClusterSelectConfig {
  static constexpr int kScores = kKeysPerSelectWarp / 32;                  // of a lane
  static constexpr int kUnroll = 4;                                        // scores at a time
  static constexpr uint32_t kLowest = 0x007fffff, kAboveAll = 0xff800001;  // key of −inf; above the key of inf
};

// Number of a warp's scores (at most 1,024) that reach each of three values.
struct BoundCounts {
  int reach[3];
};

struct ClusterSelectStorage {
  // Per warp of the cluster. Two buffers alternate; the third has the numbers of selected keys.
  struct Packed {
    uint32_t first_two, third;  // two counts of 16 bits, and one
  } counts[3][kMaxSelectWarps * kSelectCluster];
  SampledSelectStorage guess;  // without its bits. The warps' scores follow in their place

  static constexpr HOPWELL_HOST_DEVICE uint32_t scores_at() {
    return offsetof(ClusterSelectStorage, guess) + offsetof(SampledSelectStorage, bits);
  }
  static constexpr uint32_t bytes(int warps) { return scores_at() + uint32_t(warps) * kKeysPerSelectWarp * 4; }
  HOPWELL_DEVICE uint32_t* scores_of_warp(int warp) {
    return reinterpret_cast<uint32_t*>(reinterpret_cast<unsigned char*>(this) + scores_at()) +
           warp * kKeysPerSelectWarp;
  }
};
static_assert(ClusterSelectStorage::scores_at() % 4 == 0);

struct WarpScores {
  uint32_t* of_lane;  // in shared memory
  int first;          // key
  int warp, warps;    // index and number of warps in the cluster

  /// The sortable key of key first + 32 i + lane; 0: no such key.
  HOPWELL_DEVICE uint32_t& order(int i) const { return of_lane[32 * i]; }
  /// Calls run(i) for each of the lane's scores.
  template <class Run>
  HOPWELL_DEVICE void for_each(const Run& run) const {
    HOPWELL_NO_UNROLL
    for (int first_of_some = 0; first_of_some < ClusterSelectConfig::kScores;
         first_of_some += ClusterSelectConfig::kUnroll) {
      HOPWELL_UNROLL
      for (int i = 0; i < ClusterSelectConfig::kUnroll; ++i) run(first_of_some + i);
    }
  }
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

// The smallest sortable key of a score.
HOPWELL_DEVICE uint32_t lowest_order(const SelectParams& /*p*/) { return ClusterSelectConfig::kLowest; }

// Finds the threshold by narrowing the bounds.
template <class Params>
HOPWELL_DEVICE SplitTies search_threshold(const Params& p, ClusterSelectStorage& s, const WarpScores& scores) {
  uint32_t low = lowest_order(p),
           high = ClusterSelectConfig::kAboveAll;  // reached by at least topk scores; by fewer
  int above = 0;                                   // number of scores that reach `high`
  for (int turn = 0; high - low > 1; turn ^= 1) {
    const uint32_t step = high - low < 4 ? 1 : (high - low) / 4;
    uint32_t bound[3];
    HOPWELL_UNROLL
    for (uint32_t i = 0; i < 3; ++i) bound[i] = low + (i + 1) * step < high ? low + (i + 1) * step : high;
    BoundCounts own{};
    scores.for_each([&](int i) {
      HOPWELL_UNROLL
      for (int j = 0; j < 3; ++j) own.reach[j] += scores.order(i) >= bound[j];
    });
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

// Number of scores between and above the bounds, over all warps, and number between them in the warps before this one.
struct ClusterBetween {
  Between all;
  int before;
};
HOPWELL_DEVICE ClusterBetween count_between(ClusterSelectStorage& s, const WarpScores& scores, const Bounds& bounds) {
  int reach_low = 0, reach_high = 0;
  scores.for_each([&](int i) {
    const uint32_t order = scores.order(i);
    reach_low += order >= bounds.low, reach_high += order >= bounds.high;
  });
  const int packed = tile::sum_of_warp(reach_low | reach_high << 16);
  broadcast_counts(s, 1, scores, {packed & 0xffff, packed >> 16, 0});
  arch::cluster_sync();
  const BoundCounts all = sum_counts(s, 1, scores.warps), before = sum_counts(s, 1, scores.warp);
  return {{all.reach[1], all.reach[0] - all.reach[1]}, before.reach[0] - before.reach[1]};
}

// Writes the warp's scores between the bounds to the lists of all CTAs of the cluster, in ascending order of key.
HOPWELL_DEVICE void broadcast_between(SampledSelectStorage& s, const WarpScores& scores, const Bounds& bounds, int at) {
  const int lane = arch::lane_index(), first = at;
  scores.for_each([&](int i) {
    const uint32_t order = scores.order(i), between = arch::ballot(order >= bounds.low && order < bounds.high);
    if (between >> lane & 1) s.orders[at + std::popcount(between & ((1U << lane) - 1))] = order;
    at += std::popcount(between);
  });
  arch::syncwarp();
  for (int i = first + lane; i < at; i += 32) {
    const uint32_t order = s.orders[i], own = arch::shared_address(&s.orders[i]);
    for (uint32_t rank = 0; rank < arch::cluster_size(); ++rank)
      if (rank != arch::cluster_rank()) arch::store_cluster(arch::map_to_rank(own, rank), order);
  }
}

template <int kWarps, class Params>
HOPWELL_DEVICE SplitTies find_threshold(const Params& p, ClusterSelectStorage& s, const QueryRow& row,
                                        const WarpScores& scores) {
  const Bounds bounds = guess_bounds<kWarps>(p, s.guess, row);
  if (bounds.low >= bounds.high || selects_absent(p, bounds.low)) return search_threshold(p, s, scores);
  const ClusterBetween between = count_between(s, scores, bounds);
  if (!guessed_right(between.all, p.topk)) return search_threshold(p, s, scores);
  broadcast_between(s.guess, scores, bounds, between.before);
  arch::cluster_sync();
  const uint32_t counts = arch::shared_address(s.guess.counts), shift = bucket_shift(bounds.high - bounds.low - 1);
  for (int i = arch::thread_index(); i < between.all.count; i += 32 * kWarps)
    arch::red_add_shared(true, counts + 4 * ((s.guess.orders[i] - bounds.low) >> shift), 1);
  return find_last<kWarps>(s.guess, bounds.low, shift, between.all.count, p.topk - between.all.above);
}

HOPWELL_DEVICE float score_of(uint32_t order) {
  return arch::bit_cast<float>(order >> 31 ? order & 0x7fffffff : ~order);
}

// Writes the selected keys. Lane i has the scores of keys first + 32 i … first + 32 i + 31 as bits, and writes these
// keys.
template <class Row>
HOPWELL_DEVICE void write_topk(const SelectParams& p, ClusterSelectStorage& s, const Row& row, const WarpScores& scores,
                               const SplitTies& threshold) {
  const int lane = arch::lane_index();
  uint32_t above = 0, equal = 0;
  scores.for_each([&](int i) {
    const uint32_t order = scores.order(i), are_above = arch::ballot(order > threshold.order),
                   are_equal = arch::ballot(order == threshold.order);
    if (lane == i) above = are_above, equal = are_equal;
  });
  const int own_above = std::popcount(above), own_equal = std::popcount(equal);
  const int up_to_lane = tile::sum_up_to_lane(own_above | own_equal << 16);
  const int packed = arch::shuffle(up_to_lane, 31);
  broadcast_counts(s, 2, scores, {packed & 0xffff, packed >> 16, 0});
  arch::cluster_sync();
  const BoundCounts before = sum_counts(s, 2, scores.warp);
  int above_before = before.reach[0] + (up_to_lane & 0xffff) - own_above,
      equal_before = before.reach[1] + (up_to_lane >> 16) - own_equal;
  const int first = scores.first + 32 * lane;
  for (uint32_t left = above | equal; left != 0; left &= left - 1) {
    const int bit = tile::lowest_bit(left), key = first + bit;
    const bool is_above = (above >> bit & 1) != 0;
    const int at = above_before + (equal_before < threshold.equal ? equal_before : threshold.equal);
    const bool taken = is_above || equal_before < threshold.equal;
    // The comparison keeps the address inside the row when a test leaves out a barrier.
    if (taken && unsigned(at) < unsigned(p.topk)) {
      row.indices[at] = row.index(key);
      if (row.top_scores) row.top_scores[at] = score_of(sortable_key(row.scores[key]));
    }
    above_before += is_above, equal_before += !is_above;
  }
}

template <int kWarps, class Params>
__global__ void __launch_bounds__(32 * kWarps, 1) lightning_indexer_select_cluster(const __grid_constant__ Params p) {
#if HOPWELL_HAS_SM90A
  auto& s = arch::dynamic_smem<ClusterSelectStorage>();
  const int size = int(arch::cluster_size()), rank = int(arch::cluster_rank());
  const auto row = row_of(p, arch::block_index() / size);
  if (row.visible <= p.topk) return write_visible(p, s.guess.of_warp[0], row, {rank, size});
  arch::cluster_arrive_relaxed();  // kept: see the wait
  WarpScores scores;
  scores.warp = rank * kWarps + arch::warp_index(), scores.warps = size * kWarps;
  scores.first = scores.warp * kKeysPerSelectWarp;
  scores.of_lane = s.scores_of_warp(arch::warp_index()) + arch::lane_index();
  const int own = scores.first + arch::lane_index();
  float loaded[ClusterSelectConfig::kScores];  // all on their way together
  HOPWELL_UNROLL
  for (int i = 0; i < ClusterSelectConfig::kScores; ++i)
    loaded[i] = own + 32 * i < row.visible ? row.scores[own + 32 * i] : 0;
  HOPWELL_UNROLL
  for (int i = 0; i < ClusterSelectConfig::kScores; ++i) scores.order(i) = arch::bit_cast<uint32_t>(loaded[i]);
  scores.for_each([&](int i) {
    const float score = arch::bit_cast<float>(scores.order(i));
    scores.order(i) = own + 32 * i < row.visible ? sortable_key(score) : 0;
  });
  arch::cluster_wait();  // kept: all CTAs of the cluster must have started before counts are broadcast
  const SplitTies threshold = find_threshold<kWarps>(p, s, row, scores);
  if (selects_absent(p, threshold.order)) {
    arch::syncthreads();  // kept: write_visible() reuses what find_buckets() reads; a case that shows it takes minutes
    return write_visible(p, s.guess.of_warp[0], row, {rank, size});
  }
  write_topk(p, s, row, scores, threshold);
  if (rank == 0) note_count(p, row, p.topk);
#endif
}

// Launches CTAs of kWarps warps, if the device can hold all CTAs of a cluster at the same time. Else returns false.
template <int kWarps, class Params>
bool launch_in_clusters(const char* name, const Problem& problem, const SelectPlan& plan, std::int64_t count,
                        Stream stream, const Params& params) {
  const arch::LaunchShape shape{.grid = {static_cast<std::uint32_t>(count) * plan.cluster},
                                .threads = 32 * kWarps,
                                .cluster = plan.cluster,
                                .shared_bytes = ClusterSelectStorage::bytes(kWarps)};
  if (runtime::clusters_that_fit<lightning_indexer_select_cluster<kWarps, Params>>(problem.device, shape) == 0)
    return false;
  runtime::launch(name, lightning_indexer_select_cluster<kWarps, Params>, shape, stream, params);
  return true;
}

// Selects for `count` queries; in clusters if planned and if a cluster fits on the device. See launch_select.
template <class ParamsOf>
void launch_cluster_select(const char* name, const Problem& problem, std::int64_t count, Stream stream,
                           ParamsOf params) {
  const SelectPlan plan = plan_cluster_select(problem, count);
  using Params = decltype(params(plan));
  const auto launch = plan.warps == 8    ? launch_in_clusters<8, Params>
                      : plan.warps == 16 ? launch_in_clusters<16, Params>
                                         : launch_in_clusters<32, Params>;
  if (plan.cluster == 0 || !launch(name, problem, plan, count, stream, params(plan)))
    launch_sampled_select(name, problem, count, stream, params);
}

}  // namespace hopwell::ops::lightning_indexer::HOPWELL_TARGET
