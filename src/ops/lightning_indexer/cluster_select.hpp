// lightning_indexer for few queries with rows of at least 4,096 keys: a cluster of CTAs selects the topk best keys of a
// query, ties to the smaller key, in ascending order of key.
//
// Tile      a cluster of 2, 4 or 8 CTAs with 16 warps each has a query's row of visible scores, an equal range of keys
//           for each warp. Scores are in shared memory, as sortable keys (here `order`). A row of at most 2,048 keys
//           needs no sample: all of its scores are between the bounds
// Timeline  load │ every CTA estimates the same bounds of the threshold, as in sampled_select.hpp │ every warp lists its
//           candidates, which are the keys above the lower bound, and counts them; every CTA lists its scores between
//           the bounds │ barrier of the cluster │ every CTA reads the counts and lists of all CTAs, finds the threshold,
//           counts the selected keys of the CTAs before it and of its own warps, and writes its keys.
//           If the threshold is outside the bounds, new bounds enclose all scores. Then, or if there are too many scores
//           for the list: every CTA counts how many of its scores reach each of two values between the bounds │ barrier
//           of the cluster │ the distance of the bounds becomes a third │ … until exactly topk scores reach the lower
//           bound, or the bounds are adjacent
// Order     counts are integers: same inputs, same bits
// Budget    shared: 25 KiB, and 6 B for each key of the CTA
#pragma once

#include "arch/sm90/cluster.hpp"
#include "ops/lightning_indexer/sampled_select.hpp"
#include "tile/gpu/warp.hpp"

namespace hopwell::ops::lightning_indexer::HOPWELL_TARGET {

struct ClusterSelectConfig {
  static constexpr int kWarps = kClusterSelectWarps, kThreads = 32 * kWarps;
  static constexpr int kUnroll = 16;                                       // scores of a lane at a time
  static constexpr uint32_t kLowest = 0x007fffff, kAboveAll = 0xff800001;  // key of −inf; above the key of inf
};

// Two numbers of scores. A CTA has at most 32,768 scores, so both fit in 32 bits.
struct Counts {
  int first, second;

  [[nodiscard]] HOPWELL_DEVICE uint32_t packed() const { return uint32_t(first | second << 16); }
  static HOPWELL_DEVICE Counts unpack(uint32_t packed) { return {int(packed & 0xffff), int(packed >> 16)}; }
};

struct ClusterSelectStorage {
  uint32_t of_cta[2];  // packed counts of this CTA for the other ones; two buffers alternate
  uint32_t of_warp[ClusterSelectConfig::kWarps], of_lists[ClusterSelectConfig::kWarps];  // packed counts
  SampledSelectStorage guess;  // up to its member `bits`. From there on: an order and a candidate for each key

  static constexpr uint32_t orders_at() {
    return offsetof(ClusterSelectStorage, guess) + offsetof(SampledSelectStorage, bits);
  }
  // Scores of a lane for a row of `keys` and a cluster of `ctas`, and the scores for which it has room.
  static HOPWELL_HOST_DEVICE int scores_of_lane(int keys, int ctas) {
    const int threads = ctas * ClusterSelectConfig::kThreads;
    return (keys + threads - 1) / threads;
  }
  static HOPWELL_HOST_DEVICE int room_of_lane(int keys, int ctas) {
    constexpr int kUnroll = ClusterSelectConfig::kUnroll;
    return (scores_of_lane(keys, ctas) + kUnroll - 1) / kUnroll * kUnroll;
  }
  static uint32_t bytes(int64_t keys, int ctas) {
    return orders_at() + uint32_t(room_of_lane(int(keys), ctas)) *
                             uint32_t(ClusterSelectConfig::kThreads * (sizeof(uint32_t) + sizeof(uint16_t)));
  }
  HOPWELL_DEVICE uint32_t* orders() {
    return reinterpret_cast<uint32_t*>(reinterpret_cast<unsigned char*>(this) + orders_at());
  }
};
static_assert(ClusterSelectStorage::orders_at() % 4 == 0);

// Number of bits of a ballot that are set before the bit of this lane.
HOPWELL_DEVICE int lanes_before(uint32_t bits) { return std::popcount(bits & ((1U << arch::lane_index()) - 1)); }

// The range of keys of a warp, 32 · count from `first` on.
struct WarpScores {
  uint32_t* orders;      // of these keys, in shared memory; 0: no such key
  uint16_t* candidates;  // numbers of keys in the range, ascending
  int first, count;

  HOPWELL_DEVICE WarpScores(ClusterSelectStorage& s, int visible, int ctas)
      : count(ClusterSelectStorage::scores_of_lane(visible, ctas)) {
    const int warp = arch::warp_index(), room = 32 * ClusterSelectStorage::room_of_lane(visible, ctas);
    first = (int(arch::cluster_rank()) * ClusterSelectConfig::kWarps + warp) * 32 * count;
    orders = s.orders() + warp * room;
    candidates = reinterpret_cast<uint16_t*>(s.orders() + ClusterSelectConfig::kWarps * room) + warp * room;
  }
  /// Calls run(i, order) for the lane's keys i of the range, and for places without a key behind them.
  template <class Run>
  HOPWELL_DEVICE void for_each(const Run& run) const {
    constexpr int kUnroll = ClusterSelectConfig::kUnroll;
    HOPWELL_NO_UNROLL
    for (int at = 0; at < count; at += kUnroll) {
      const int own = 32 * at + arch::lane_index();
      uint32_t order[kUnroll];
      HOPWELL_UNROLL
      for (int i = 0; i < kUnroll; ++i) order[i] = orders[own + 32 * i];
      HOPWELL_UNROLL
      for (int i = 0; i < kUnroll; ++i) run(own + 32 * i, order[i]);
    }
  }
  HOPWELL_DEVICE void load(const QueryRow& row) const {
    constexpr int kUnroll = ClusterSelectConfig::kUnroll;
    const int left = row.visible - first, keys = left < 32 * count ? left : 32 * count;
    HOPWELL_NO_UNROLL
    for (int at = 0; at < count; at += kUnroll) {
      const int own = 32 * at + arch::lane_index();
      float loaded[kUnroll];  // all on their way together
      HOPWELL_UNROLL
      for (int i = 0; i < kUnroll; ++i) loaded[i] = own + 32 * i < keys ? row.scores[first + own + 32 * i] : 0;
      HOPWELL_UNROLL
      for (int i = 0; i < kUnroll; ++i) orders[own + 32 * i] = own + 32 * i < keys ? sortable_key(loaded[i]) : 0;
    }
  }
  /// Lists the keys whose orders are at least `low`, and for 0 also places without a key. Returns their number.
  [[nodiscard]] HOPWELL_DEVICE int list_candidates(uint32_t low) const {
    int listed = 0;
    for_each([&](int key, uint32_t order) {
      const uint32_t reach = arch::ballot(order >= low);
      if (order >= low) candidates[listed + lanes_before(reach)] = uint16_t(key);
      listed += std::popcount(reach);
    });
    arch::syncwarp();
    return listed;
  }
};

// Sum of the packed counts of the first `warps` warps.
HOPWELL_DEVICE Counts sum_of_warps(const uint32_t (&of_warp)[ClusterSelectConfig::kWarps], int warps) {
  const int lane = arch::lane_index();
  return Counts::unpack(tile::sum_of_warp(lane < warps ? of_warp[lane] : 0));
}

// Adds up counts over the CTA and over the cluster.
class ClusterCounter {
 public:
  HOPWELL_DEVICE ClusterCounter(ClusterSelectStorage& s, int ctas) : s_(s), ctas_(ctas) {}

  [[nodiscard]] HOPWELL_DEVICE int ctas() const { return ctas_; }  // of the cluster

  /// own: of this warp. Returns the sum of the warps before it in the CTA.
  HOPWELL_DEVICE Counts before_in_cta(const Counts& own) const {
    const int warp = arch::warp_index();
    if (arch::lane_index() == 0) s_.of_warp[warp] = own.packed();
    arch::syncthreads();
    return sum_of_warps(s_.of_warp, warp);
  }
  /// The counts of before_in_cta(): lane i has the sum of CTA i. Has a barrier of the cluster. Afterwards other CTAs may
  /// still read this CTA's sum, so the kernel ends with a barrier of the cluster.
  HOPWELL_DEVICE Counts of_ranks() {
    uint32_t& of_cta = s_.of_cta[turn_];
    turn_ ^= 1;
    if (arch::warp_index() == 0) {
      const Counts all = sum_of_warps(s_.of_warp, ClusterSelectConfig::kWarps);
      if (arch::lane_index() == 0) of_cta = all.packed();
    }
    arch::cluster_sync();
    const int rank = arch::lane_index();
    return Counts::unpack(
        rank < ctas_ ? arch::load_cluster(arch::map_to_rank(arch::shared_address(&of_cta), uint32_t(rank))) : 0);
  }

 private:
  ClusterSelectStorage& s_;
  int ctas_;
  int turn_ = 0;
};

// Of numbers that lane i has for CTA i of the cluster: the sum, and the sum over the CTAs before this CTA.
HOPWELL_DEVICE int sum_of_ranks(int of_rank) {
  return arch::shuffle(tile::reduce<kMostClusterCtas / 2, 1>(of_rank, tile::Plus{}), 0);
}
HOPWELL_DEVICE int sum_of_lower_ranks(int of_rank) {
  return sum_of_ranks(uint32_t(arch::lane_index()) < arch::cluster_rank() ? of_rank : 0);
}

// The smallest sortable key of a score.
HOPWELL_DEVICE uint32_t lowest_order(const SelectParams& /*p*/) { return ClusterSelectConfig::kLowest; }

// At least topk scores reach `low`. Fewer reach `high`, `above` in number.
struct SearchRange {
  uint32_t low, high;
  int above;
};

// Finds the threshold by narrowing the range.
template <class Params>
HOPWELL_DEVICE SplitTies search_threshold(const Params& p, ClusterCounter& counter, const WarpScores& scores,
                                          const SearchRange& range) {
  auto [low, high, above] = range;
  HOPWELL_NO_UNROLL
  while (high - low > 1) {
    const uint32_t step = high - low < 3 ? 1 : (high - low) / 3, lower = low + step, upper = high - step;
    Counts own{};
    scores.for_each([&](int, uint32_t order) { own.first += order >= lower, own.second += order >= upper; });
    own = Counts::unpack(tile::sum_of_warp(own.packed()));
    counter.before_in_cta(own);
    const Counts of_rank = counter.of_ranks();
    const int reach_lower = sum_of_ranks(of_rank.first), reach_upper = sum_of_ranks(of_rank.second);
    if (reach_lower < p.topk) {
      high = lower, above = reach_lower;
    } else if (reach_upper < p.topk) {
      low = lower, high = upper, above = reach_upper;
      if (reach_lower == p.topk) return {low - 1, 0};
    } else {
      low = upper;
      if (reach_upper == p.topk) return {low - 1, 0};
    }
  }
  return {low, p.topk - above};
}

// Calls run(key, order) for the candidates of a warp, 32 at a time; order 0: the lane has none.
template <class Run>
HOPWELL_DEVICE void for_each_candidate(const WarpScores& scores, int listed, const Run& run) {
  HOPWELL_NO_UNROLL
  for (int first = 0; first < listed; first += 32) {
    const int i = first + arch::lane_index(), key = i < listed ? scores.candidates[i] : 0;
    run(key, i < listed ? scores.orders[key] : 0);
  }
}

// Counts the warp's candidates above the bounds and between them, and lists the orders between them in s.keys, as far as
// there is room.
HOPWELL_DEVICE void list_between(SampledSelectStorage& s, const ClusterCounter& counter, const WarpScores& scores,
                                 int listed, const Bounds& bounds) {
  int above = 0;
  for_each_candidate(scores, listed,
                     [&](int, uint32_t order) { above += std::popcount(arch::ballot(order >= bounds.high)); });
  int at = counter.before_in_cta({above, listed - above}).second;
  for_each_candidate(scores, listed, [&](int, uint32_t order) {
    const bool is_between = order >= bounds.low && order < bounds.high;
    const uint32_t between = arch::ballot(is_between);
    const int place = at + lanes_before(between);
    if (is_between && place < SampledSelectConfig::kListed) s.keys[place] = int(order);
    at += std::popcount(between);
  });
}

// Copies the lists of all CTAs to s.orders, in the order of their ranks, and counts the bucket (sortable key − low) >>
// shift of each score. of_rank: lane i has the length of CTA i's list. Returns the length of the lists of lower ranks.
HOPWELL_DEVICE int gather_lists(SampledSelectStorage& s, int ctas, int of_rank, uint32_t low, uint32_t shift) {
  constexpr int kAtOnce = 4;
  const int warps = ClusterSelectConfig::kWarps / ctas, threads = 32 * warps;  // for a list
  const int rank = arch::warp_index() / warps, part = arch::warp_index() % warps;
  const int first_of_rank = tile::sum_up_to_lane(of_rank) - of_rank;
  const int first = arch::shuffle(first_of_rank, rank), count = arch::shuffle(of_rank, rank);
  const uint32_t list = arch::map_to_rank(arch::shared_address(s.keys), uint32_t(rank)),
                 counts = arch::shared_address(s.counts);
  HOPWELL_NO_UNROLL
  for (int at = 32 * part + arch::lane_index(); at < count; at += kAtOnce * threads) {
    uint32_t order[kAtOnce];  // all on their way together
    HOPWELL_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      const int from = at + i * threads;
      order[i] = arch::load_cluster(list + 4 * uint32_t(from < count ? from : at));
    }
    HOPWELL_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      const int from = at + i * threads;
      if (from < count) s.orders[first + from] = order[i];
      arch::red_add_shared(from < count, counts + 4 * ((order[i] - low) >> shift), 1);
    }
  }
  return arch::shuffle(first_of_rank, int(arch::cluster_rank()));
}

// Numbers of scores above a threshold and equal to it: among the candidates of a warp; and in a warp's share of the
// first `listed` of s.orders.
HOPWELL_DEVICE Counts count_candidates(const WarpScores& scores, int listed, uint32_t threshold) {
  Counts counts{};
  for_each_candidate(scores, listed, [&](int, uint32_t order) {
    counts.first += std::popcount(arch::ballot(order > threshold));
    counts.second += std::popcount(arch::ballot(order == threshold));
  });
  return counts;
}
HOPWELL_DEVICE Counts count_orders(const SampledSelectStorage& s, int listed, uint32_t threshold) {
  Counts counts{};
  HOPWELL_NO_UNROLL
  for (int i = arch::thread_index(); i < listed; i += ClusterSelectConfig::kThreads)
    counts.first += s.orders[i] > threshold, counts.second += s.orders[i] == threshold;
  return Counts::unpack(tile::sum_of_warp(counts.packed()));
}

struct ClusterThreshold {
  SplitTies ties;
  int candidates;  // of this warp. All of its selected keys are among them
  // Of the CTAs before this one: length of their part of s.orders, which is not counted yet, and counts of their other
  // scores.
  int orders_before, above_before, equal_before;
};
template <class Params>
HOPWELL_DEVICE ClusterThreshold find_threshold(const Params& p, SampledSelectStorage& s, ClusterCounter& counter,
                                               const WarpScores& scores, const Bounds& bounds) {
  SearchRange range{lowest_order(p), ClusterSelectConfig::kAboveAll, 0};
  if (bounds.low < bounds.high && !selects_absent(p, bounds.low)) {
    const int listed = scores.list_candidates(bounds.low);
    list_between(s, counter, scores, listed, bounds);
    const Counts of_rank = counter.of_ranks();
    const Between between{sum_of_ranks(of_rank.first), sum_of_ranks(of_rank.second)};
    if (guessed_right(between, p.topk)) {
      const uint32_t shift = bucket_shift(bounds.high - bounds.low - 1);
      const int orders = gather_lists(s, counter.ctas(), of_rank.second, bounds.low, shift);
      const SplitTies ties =
          find_last<ClusterSelectConfig::kWarps, true>(s, bounds.low, shift, between.count, p.topk - between.above);
      return {ties, listed, orders, sum_of_lower_ranks(of_rank.first), 0};
    }
    if (between.above < p.topk && p.topk <= between.above + between.count)
      range = {bounds.low, bounds.high, between.above};  // too many scores for the list
  }
  const SplitTies ties = search_threshold(p, counter, scores, range);
  if (selects_absent(p, ties.order)) return {ties, 0, 0, 0, 0};
  const int listed = scores.list_candidates(ties.order);
  counter.before_in_cta(count_candidates(scores, listed, ties.order));
  const Counts of_rank = counter.of_ranks();
  return {ties, listed, 0, sum_of_lower_ranks(of_rank.first), sum_of_lower_ranks(of_rank.second)};
}

HOPWELL_DEVICE float score_of(uint32_t order) {
  return arch::bit_cast<float>(order >> 31 ? order & 0x7fffffff : ~order);
}

// Writes the selected keys.
template <class Row>
HOPWELL_DEVICE void write_topk(const SelectParams& p, ClusterSelectStorage& s, const ClusterCounter& counter,
                               const Row& row, const WarpScores& scores, const ClusterThreshold& threshold) {
  const auto [ties, candidates, orders, above, equal] = threshold;
  const uint32_t of_orders = count_orders(s.guess, orders, ties.order).packed();
  const int warp = arch::warp_index();
  if (arch::lane_index() == 0) s.of_lists[warp] = of_orders;
  const Counts before = counter.before_in_cta(count_candidates(scores, candidates, ties.order));
  const Counts of_lists = sum_of_warps(s.of_lists, ClusterSelectConfig::kWarps);
  int above_before = above + of_lists.first + before.first, equal_before = equal + of_lists.second + before.second;
  for_each_candidate(scores, candidates, [&](int key, uint32_t order) {
    const bool is_above = order > ties.order, is_equal = order == ties.order;
    const uint32_t are_above = arch::ballot(is_above), are_equal = arch::ballot(is_equal);
    const int tie = equal_before + lanes_before(are_equal);
    const int at = above_before + lanes_before(are_above) + (tie < ties.equal ? tie : ties.equal);
    // The comparison keeps the address inside the row when a test leaves out a barrier.
    if ((is_above || (is_equal && tie < ties.equal)) && unsigned(at) < unsigned(p.topk)) {
      row.indices[at] = row.index(scores.first + key);
      if (row.top_scores) row.top_scores[at] = score_of(order);
    }
    above_before += std::popcount(are_above), equal_before += std::popcount(are_equal);
  });
}

template <int kCtas, class Params>
__global__ void __launch_bounds__(ClusterSelectConfig::kThreads, 1)
    lightning_indexer_select_cluster(const __grid_constant__ Params p) {
#if HOPWELL_HAS_SM90A
  constexpr int kWarps = ClusterSelectConfig::kWarps;
  auto& s = arch::dynamic_smem<ClusterSelectStorage>();
  const int rank = int(arch::cluster_rank());
  // Reads inputs only. They are complete: the kernel before this one has waited for all earlier kernels.
  const auto row = row_of(p, arch::block_index() / kCtas);
  tile::wait_for_prior_kernels();
  tile::launch_dependents();
  if (row.visible <= p.topk) return write_visible(p, s.guess.of_warp[0], row, {rank, kCtas});
  const WarpScores scores(s, row.visible, kCtas);
  Bounds bounds{ClusterSelectConfig::kLowest,
                ClusterSelectConfig::kAboveAll};  // the list holds all scores of short rows
  if (row.visible > SampledSelectConfig::kListed) {
    const SampleRounds rounds = rounds_of<kWarps>(row);
    const Samples samples = load_samples<kWarps>(row, rounds, 0);  // on their way together with the scores
    scores.load(row);
    bounds = guess_bounds<kWarps>(p, s.guess, row, rounds, samples);
    if (s.guess.scale.width == 0) {  // samples of one value: the threshold may be that value
      const uint32_t order = sortable_key(s.guess.scale.first);
      bounds = {order, order + 1};
    }
  } else {
    scores.load(row);
    clear_counts<kWarps>(s.guess);
  }
  ClusterCounter counter(s, kCtas);
  const ClusterThreshold threshold = find_threshold(p, s.guess, counter, scores, bounds);
  arch::cluster_arrive_relaxed();  // the other CTAs' counts and lists have been read, and the values used
  if (selects_absent(p, threshold.ties.order)) {
    arch::syncthreads();  // kept: write_visible() reuses what find_buckets() reads; a case that shows it takes minutes
    write_visible(p, s.guess.of_warp[0], row, {rank, kCtas});
  } else {
    write_topk(p, s, counter, row, scores, threshold);
    if (rank == 0) note_count(p, row, p.topk);
  }
  arch::cluster_wait();
#endif
}

// The kernel for clusters of 2, 4 or 8 CTAs.
template <class Params>
auto cluster_kernel(int ctas) {
  static_assert(kMostClusterCtas == 8);
  return ctas == 8   ? lightning_indexer_select_cluster<8, Params>
         : ctas == 4 ? lightning_indexer_select_cluster<4, Params>
                     : lightning_indexer_select_cluster<2, Params>;
}

// Selects for `count` queries; in clusters if planned. See launch_select.
template <class ParamsOf>
void launch_cluster_select(const char* name, const Problem& problem, std::int64_t count, Stream stream,
                           ParamsOf params) {
  using Params = decltype(params(SelectPlan{}));
  const auto shape_of = [&](int ctas, std::int64_t keys) {
    return arch::LaunchShape{.grid = {static_cast<std::uint32_t>(count * ctas)},
                             .threads = ClusterSelectConfig::kThreads,
                             .cluster = static_cast<std::uint32_t>(ctas),
                             .shared_bytes = ClusterSelectStorage::bytes(keys, ctas),
                             .programmatic_dependency = problem.device.has_dependent_launches()};
  };
  const SelectPlan plan = plan_cluster_select(problem, count, [&](int ctas) {
    // All of these kernels have a CTA an SM.
    constexpr auto kernel = lightning_indexer_select_cluster<kMostClusterCtas, Params>;
    const std::int64_t most_keys = std::int64_t{ctas} * kMostKeysOfClusterCta;
    return runtime::clusters_that_fit<kernel>(problem.device, shape_of(ctas, most_keys));
  });
  if (plan.cluster == 0) return launch_sampled_select(name, problem, count, stream, params);
  const int ctas = static_cast<int>(plan.cluster);
  runtime::launch(name, cluster_kernel<Params>(ctas), shape_of(ctas, problem.s_kv), stream, params(plan));
}

}  // namespace hopwell::ops::lightning_indexer::HOPWELL_TARGET
