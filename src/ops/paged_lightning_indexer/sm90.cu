// paged_lightning_indexer for Hopper: list of kernels.
//
//     paged_lightning_indexer_score_few_sm90   scores of sequences with few queries, to the workspace; fp8 only:
//                                              sm90/few_queries.hpp
//     paged_lightning_indexer_score_sm90       … of other sequences
//     lightning_indexer_select_cluster         the best positions of each query, for few queries
//     lightning_indexer_select_sampled         … for other rows of at least 4,096 keys
//     lightning_indexer_select                 … for shorter rows
//
// The roles of warps in paged_lightning_indexer_score_sm90: see lightning_indexer/sm90/score.hpp. In addition, the warp
// that copies q describes the items to all other warps, and each of the three warps that load weights copies a third of
// an item's keys.
#include "ops/lightning_indexer/cluster_select.hpp"
#include "ops/paged_lightning_indexer/select.hpp"
#include "ops/paged_lightning_indexer/sm90/few_queries.hpp"

namespace hopwell::ops::paged_lightning_indexer::HOPWELL_TARGET {

// Of the keys of a slot of the ring.
struct KeyScales {
  alignas(16) float of_row[64];
  uint32_t absent;  // bit i: rows 8 i to 8 i + 7 have no page, and no scales
};

struct PagedPart : indexer::ScorePart {
  uint32_t slot;  // of the ring: its first key tile
};
HOPWELL_DEVICE uint32_t first_slot(const PagedPart& part) { return part.slot; }

// A work item as the producer of q describes it to all warps, in shared memory to save registers.
template <class T>
struct Sm90Item : SequenceTask {
  const Sm90Params<T>* launch;
  PagedPart part;
  int of_pass;   // the sequence
  bool is_last;  // of this CTA
};

constexpr int kItems = 4;  // of the ring of items: pages of later items are looked up while earlier keys arrive
template <class T>
struct Sm90Storage : indexer::ScoreStorage<T> {
  static constexpr int kWarps = indexer::ScoreConfig<T>::kThreads / 32;
  WorkStorage<kWarps> work;
  KeyScales scales[indexer::ScoreConfig<T>::kStages];
  Sm90Item<T> items[kItems];
  tile::RingBarriers<kItems> item_ring;  // full: the producer of q has written an item; empty: all others are done
};

template <class T>
HOPWELL_DEVICE KeyScales& scales_of(indexer::ScoreStorage<T>& s, const indexer::ScoreSlot<T>& slot) {
  return static_cast<Sm90Storage<T>&>(s).scales[slot.stage()];
}

template <class T>
HOPWELL_DEVICE void load_queries(const Sm90Item<T>& p, uint32_t to, int column, int head, int query,
                                 arch::mbarrier& full) {
  arch::tma_load<4>(to, p.launch->q, {column, head, int(p.first_query) + query, int(p.sequence)}, full);
}

// Copies a box of keys and their scales to rows of a slot from `row` on. Returns the box's bits of
// KeyScales::absent, one for each 8 rows.
template <class T>
HOPWELL_DEVICE uint32_t copy_box(const Sm90Item<T>& p, const indexer::ScoreSlot<T>& slot, KeyScales& scales, int row,
                                 const Box& box) {
  using Config = indexer::ScoreConfig<T>;
  constexpr int kColumns = 128 / sizeof(T);  // of a panel
  const Sm90Params<T>& launch = *p.launch;
  arch::mbarrier& full = slot.full();
  if (box.page >= 0) {
    arch::mbarrier_expect_tx(full, uint32_t(launch.box_rows) * uint32_t(sizeof(float)));
    copy_scales(launch, scales.of_row + row, box, full);
  }
  for (int panel = 0; panel < Config::kPanels; ++panel)
    copy_rows(launch, slot.rows() + uint32_t(panel) * tile::kPanelBytes + uint32_t(row) * 128, kColumns * panel, box,
              full);
  return box.page >= 0 ? 0 : ((1U << launch.box_rows / 8) - 1) << row / 8;
}

// Copies a third of an item's key tiles. A warp looks up the pages of all boxes together, then lane 0 copies one box
// after another. Each of the three producers of weights has keys of every item, so none waits for a slot that is two
// rounds of the ring away.
template <class T>
HOPWELL_DEVICE void produce_keys(const Sm90Item<T>& p, indexer::ScoreStorage<T>& s, const PagedPart& part, int third) {
  using Config = indexer::ScoreConfig<T>;
  constexpr int kTiles = Config::kKeyTiles / Config::kWeightWarps, kRows = Config::kRows;
  static_assert(kTiles * kRows / 8 <= 32, "a lane has one box");
  const int lane = arch::lane_index(), box_rows = p.launch->box_rows, first_tile = kTiles * third;
  const bool has_box = lane * box_rows < kTiles * kRows;
  const Box own = has_box ? box_of(p, part.first_key + first_tile * kRows + lane * box_rows, p.s_kv) : Box{};
  uint32_t absent = 0;
  HOPWELL_NO_UNROLL
  for (int key = 0, at = 0; key < kTiles * kRows; key += box_rows, ++at) {
    const Box box{arch::shuffle(own.page, at), arch::shuffle(own.row, at)};
    if (lane > 0) continue;
    const int row = key % kRows;
    const indexer::ScoreSlot<T> slot(s, part.slot + uint32_t(first_tile + key / kRows));
    KeyScales& scales = scales_of(s, slot);
    if (row == 0) {
      slot.wait_empty();
      arch::mbarrier_arrive_expect_tx(slot.full(), Config::kStageBytes);
      absent = 0;
    }
    absent |= copy_box(p, slot, scales, row, box);
    if (row + box_rows < kRows) continue;
    scales.absent = absent;
    arch::mbarrier_arrive(slot.full());  // in place of the weights, which keys do not have
  }
}

template <class T>
HOPWELL_DEVICE indexer::StoredKey<T> stored_key(const Sm90Item<T>& p, indexer::ScoreStorage<T>& s,
                                                const PagedPart& part, int group) {
  using Config = indexer::ScoreConfig<T>;
  const int first = group * Config::kHalves, row = indexer::StoredKey<T>::row(), of_tile = row % Config::kRows;
  const indexer::ScoreSlot<T> slot(s, part.slot + uint32_t(first + row / Config::kRows));
  const KeyScales& scales = scales_of(s, slot);
  const int key = part.first_key + first * Config::kRows + row;
  const bool exists = (scales.absent >> of_tile / 8 & 1) == 0;
  return {key, key < p.s_kv, exists, exists ? scales.of_row[of_tile] : 1};
}

// The producer of q, which also describes the items.
template <class T>
HOPWELL_DEVICE void produce_items(const Sm90Params<T>& p, Sm90Storage<T>& s) {
  using Config = indexer::ScoreConfig<T>;
  uint32_t slot = 0;
  WorkItem work = s.work.item;
  HOPWELL_NO_UNROLL
  for (int n = 0;; ++n) {
    const tile::RingSlot<kItems> at(s.item_ring, n);
    Sm90Item<T>& item = s.items[n % kItems];
    if (arch::lane_index() == 0) {
      if (n > 0) advance<Config::kKeys>(p.task, work);
      at.wait_empty();  // kept: the ring of tiles is shorter today
      if (n < kItems || item.of_pass != work.sequence) {
        set_item<T>(static_cast<SequenceTask&>(item), p.task, work);
        item.launch = &p, item.of_pass = work.sequence;
      }
      item.is_last = work.left == 1;
      item.part.first_key = work.block * Config::kKeys, item.part.tiles = {0, item.tiles}, item.part.slot = slot;
    }
    at.commit();
    indexer::produce_tiles<T>(item, s, item.part);
    if (n == 0) tile::launch_dependents();  // the selection. Before the first copies, the launch would delay them
    if (item.is_last) return;
    slot += uint32_t(Config::kKeyTiles + item.tiles);
  }
}

// Calls run(item, n) for the items of this CTA, one after another.
template <class T, class Run>
HOPWELL_DEVICE void for_each_item(Sm90Storage<T>& s, Run run) {
  HOPWELL_NO_UNROLL
  for (int n = 0;; ++n) {
    const tile::RingSlot<kItems> at(s.item_ring, n);
    at.wait_full();
    const Sm90Item<T>& item = s.items[n % kItems];
    run(item, n);
    const bool is_last = item.is_last;
    at.release();
    if (is_last) return;
  }
}

// kHeads: see query_tiles in lightning_indexer/sm90/score.hpp.
template <int kHeads, bool kRelu, class T>
__global__ void __launch_bounds__(indexer::ScoreConfig<T>::kThreads, 1)
    paged_lightning_indexer_score_sm90(const __grid_constant__ Sm90Params<T> p) {
#if HOPWELL_HAS_SM90A
  using Config = indexer::ScoreConfig<T>;
  auto& s = arch::dynamic_smem<Sm90Storage<T>>();
  if (arch::thread_index() == 0) {
    s.ring.init(2, 4 * Config::kGroups);              // arrivals: rows and weights
    s.item_ring.init(1, Sm90Storage<T>::kWarps - 1);  // kept: barriers of key tiles order the last reads too
    arch::fence_mbarrier_init();
  }
  tile::wait_for_prior_kernels();
  if (first_item<Config::kKeys>(p.task, s.work).left == 0) return;
  const int group = arch::warpgroup_index(), warp = arch::warp_index();
  if (group < Config::kGroups) {
    arch::setmaxnreg_inc<Config::kScoreRegisters>();
    const indexer::Turn<T> turn(group);
    for_each_item(s, [&](const Sm90Item<T>& item, int) {
      indexer::score_tiles<kHeads, true, kRelu, T>(item, s, item.part, group, turn);
    });
  } else {
    arch::setmaxnreg_dec<Config::kOtherRegisters>();
    if (warp == 4 * Config::kGroups) return produce_items(p, s);
    for_each_item(s, [&](const Sm90Item<T>& item, int n) {
      // Mostly an item has a single tile of q. Its weights take longer than a third of the keys, so they go round.
      const int third = warp - 4 * Config::kGroups - 1, first_tile = (third + n) % Config::kWeightWarps;
      indexer::produce_weights<true, T>(item, s, item.part, first_tile,
                                        [&] { produce_keys(item, s, item.part, third); });
    });
  }
#endif
}

namespace {

// The keys as [blocks, block, d_index].
View keys_of(const Problem& p) {
  View keys;
  keys.data = p.cache.data, keys.dtype = p.q.dtype, keys.ndim = 3, keys.present = true;
  keys.shape = {p.cache.blocks, p.cache.block, p.d_index};
  const auto size = static_cast<std::int64_t>(size_of(p.q.dtype));
  keys.stride = {p.cache.stride / size, p.d_index, 1};
  return keys;
}

// Rows of a box: the largest power of two up to 64 that divides a block.
std::uint32_t box_rows(std::int64_t block) {
  return static_cast<std::uint32_t>(std::min<std::int64_t>(block & -block, 64));
}

runtime::PlanOr<Plan> plan(const Problem& p) {
  using runtime::Unsupported;
  // The producers of the kernel for bfloat16 have 32 registers, too few to describe items.
  if (p.q.dtype != DType::kFloat8E4m3) return Unsupported{"needs q_index of float8_e4m3fn"};
  if (!tile::can_map(p.q, {0, 1, 2}))
    return Unsupported{"needs rows of q_index 16-byte aligned, with positive strides"};
  if (p.cache.block % 8 != 0) return Unsupported{"needs a block that is a multiple of 8"};
  if (p.cache.blocks == 0) return Unsupported{"needs a cache with blocks"};
  if (!tile::can_map(keys_of(p), {0, 1}))
    return Unsupported{"needs blocks and rows of cache 16-byte aligned, with positive strides"};
  return plan_of(p);
}

void launch_score(const Problem& problem, const Plan& plan, void* workspace, std::int64_t first, std::int64_t count,
                  Stream stream) {
  using T = few_queries::Config::T;
  using Config = indexer::ScoreConfig<T>;
  Sm90Params<T> p{};
  const unpaged::ScorePlan score = unpaged::plan_wgmma_score(plan.problem, count, Config::kKeys);
  set_params(p.task, problem, plan.problem, score, workspace, first, count);
  constexpr auto kColumns = static_cast<std::uint32_t>(128 / sizeof(T));
  p.q = tile::map_of(problem.q,
                     {{3, kColumns},
                      {2, static_cast<std::uint32_t>(score.queries.padded_heads)},
                      {1, static_cast<std::uint32_t>(score.queries.queries_per_tile)},
                      {0, 1}},
                     arch::Swizzle::bytes128);
  const std::uint32_t rows = box_rows(problem.cache.block);
  p.k = tile::map_of(keys_of(problem), {{2, kColumns}, {1, rows}, {0, 1}}, arch::Swizzle::bytes128);
  p.box_rows = static_cast<int>(rows);
  const std::int64_t tiles =  // of a sequence
      tile::ceil_div(problem.q_len, std::int64_t{score.queries.queries_per_tile}) * score.queries.tiles_per_query;
  const bool has_few = problem.relu && (problem.h_index == 64 || problem.h_index == 32);
  if (has_few && tiles <= few_queries::Config::kMostTiles) {
    const auto few =
        problem.h_index == 64 ? paged_lightning_indexer_score_few_sm90<64> : paged_lightning_indexer_score_few_sm90<32>;
    const std::int64_t ctas = ctas_of(problem, plan.problem, count, few_queries::Config::kKeys, problem.device.sms);
    arch::LaunchShape shape = runtime::shape_of_ctas(ctas, few_queries::Config::kThreads, sizeof(few_queries::Storage));
    shape.programmatic_dependency = true;
    return runtime::launch(kName, few, shape, stream, p);
  }
  // Without relu, which is rare, only the variant for any h_index is compiled.
  const auto kernel = !problem.relu                            ? paged_lightning_indexer_score_sm90<0, false, T>
                      : problem.h_index == 64                  ? paged_lightning_indexer_score_sm90<64, true, T>
                      : problem.h_index == 32                  ? paged_lightning_indexer_score_sm90<32, true, T>
                      : problem.h_index % tile::kHeadTile == 0 ? paged_lightning_indexer_score_sm90<128, true, T>
                                                               : paged_lightning_indexer_score_sm90<0, true, T>;
  const std::int64_t ctas = ctas_of(problem, plan.problem, count, Config::kKeys, problem.device.sms);
  arch::LaunchShape shape = runtime::shape_of_ctas(ctas, Config::kThreads, sizeof(Sm90Storage<T>));
  shape.programmatic_dependency = true;
  runtime::launch(kName, kernel, shape, stream, p);
}

void launch(const Problem& problem, const Plan& plan, void* workspace, Stream stream) {
  for_each_pass(plan, [&](std::int64_t first, std::int64_t count) {
    if (plan.problem.s_kv > 0 && problem.topk > 0) launch_score(problem, plan, workspace, first, count, stream);
    indexer::select_in_rounds(
        plan.problem, plan.of, workspace, count,
        [&](const unpaged::SelectPlan& select) { return select_params(problem, plan, workspace, first, select); },
        [&](const unpaged::Problem& of, std::int64_t rows, auto params) {
          indexer::launch_cluster_select(kName, of, rows, stream, params);
        });
  });
}

const runtime::Registration backend{runtime::kBackend, plan, launch};

}  // namespace
}  // namespace hopwell::ops::paged_lightning_indexer::HOPWELL_TARGET
