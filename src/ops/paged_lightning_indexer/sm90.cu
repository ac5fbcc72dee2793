// paged_lightning_indexer for Hopper: list of kernels.
//
//     paged_lightning_indexer_score_sm90    scores of some queries and their keys, to the workspace
//     lightning_indexer_select_cluster      the best positions of each query, for few queries with long rows
//     lightning_indexer_select_sampled      … for other rows of at least 4,096 keys
//     lightning_indexer_select              … for shorter rows, and rows too long for the others
//
// The copy engine loads keys in boxes of up to 64 rows of one block. A page that does not exist has a coordinate outside of
// the cache, for which the engine writes zeros and reads nothing.
#include "ops/lightning_indexer/cluster_select.hpp"
#include "ops/lightning_indexer/sm90/score.hpp"
#include "ops/paged_lightning_indexer/score_work.hpp"
#include "ops/paged_lightning_indexer/select.hpp"

namespace hopwell::ops::paged_lightning_indexer::HOPWELL_TARGET {

// `k` is a map of [blocks, block, d_index], with boxes of box_rows rows.
template <class T>
struct Sm90Base : indexer::ScoreParams<T> {
  int box_rows;
};
template <class T>
using Sm90Params = PagedScoreParams<Sm90Base<T>>;

struct PagedPart : indexer::ScorePart {
  uint32_t slot;  // of the ring: its first key tile
};
HOPWELL_DEVICE uint32_t first_slot(const PagedPart& part) { return part.slot; }

template <class T>
HOPWELL_DEVICE int row_in_map(const Sm90Params<T>& p, int query) {
  return int(p.sequence * p.positions.q_len + p.first_query) + query;
}

template <class T>
HOPWELL_DEVICE void produce_keys(const Sm90Params<T>& p, indexer::ScoreStorage<T>& s, const PagedPart& part) {
  using Config = indexer::ScoreConfig<T>;
  constexpr int kColumns = 128 / sizeof(T);  // of a panel
  HOPWELL_NO_UNROLL
  for (int i = 0; i < Config::kKeyTiles; ++i) {
    const indexer::ScoreSlot<T> slot(s, part.slot + uint32_t(i));
    slot.wait_empty();
    arch::mbarrier& full = slot.full();
    arch::mbarrier_arrive_expect_tx(full, Config::kStageBytes);
    HOPWELL_NO_UNROLL
    for (int row = 0; row < Config::kRows; row += p.box_rows) {
      const int key = part.first_key + Config::kRows * i + row;
      const CachePage page = page_of(p, key, key < p.s_kv);
      const int block = page.exists ? page.number : int(p.positions.blocks);
      for (int panel = 0; panel < Config::kPanels; ++panel)
        arch::tma_load<3>(slot.rows() + uint32_t(panel) * tile::kPanelBytes + uint32_t(row) * 128, p.k,
                          {kColumns * panel, page.row, block}, full);
    }
    arch::mbarrier_arrive(full);  // in place of the weights, which keys do not have
  }
}

template <class T>
struct Sm90Storage : indexer::ScoreStorage<T> {
  WorkStorage<indexer::ScoreConfig<T>::kThreads / 32> work;
};

// Calls run(parameters, part) for the items of this CTA. Every role does that for itself.
template <class T, class Run>
HOPWELL_DEVICE void for_each_item(const Sm90Params<T>& p, const Sm90Storage<T>& s, Run run) {
  using Config = indexer::ScoreConfig<T>;
  uint32_t slot = 0;
  HOPWELL_NO_UNROLL
  for (WorkItem item = s.work.item; item.left > 0; advance<Config::kKeys>(p, item)) {
    const Sm90Params<T> of = params_of_item<T>(p, item);
    run(of, PagedPart{{item.block * Config::kKeys, {0, of.tiles}}, slot});
    slot += uint32_t(Config::kKeyTiles + of.tiles);
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
    s.ring.init(2, 4 * Config::kGroups);  // arrivals: rows and weights
    arch::fence_mbarrier_init();
  }
  if (first_item<Config::kKeys>(p, s.work).left == 0) return;
  const int group = arch::warpgroup_index(), warp = arch::warp_index();
  if (group < Config::kGroups) {
    arch::setmaxnreg_inc<Config::kScoreRegisters>();
    const indexer::Turn<T> turn(group);
    for_each_item(p, s, [&](const Sm90Params<T>& of, const PagedPart& part) {
      indexer::score_tiles<kHeads, true, kRelu, T>(of, s, part, group, turn);
    });
  } else {
    arch::setmaxnreg_dec<Config::kOtherRegisters>();
    for_each_item(p, s, [&](const Sm90Params<T>& of, const PagedPart& part) {
      if (warp == 4 * Config::kGroups)
        indexer::produce_tiles<T>(of, s, part);
      else
        indexer::produce_weights<true, T>(of, s, part, warp - 4 * Config::kGroups - 1);
    });
  }
#endif
}

namespace {

// [b, q_len, h, d] as [b · q_len, h, d], if its queries have one distance.
std::optional<View> as_queries(const View& view) {
  const std::int64_t b = view.shape[0], q_len = view.shape[1];
  if (b > 1 && q_len > 1 && view.stride[0] != q_len * view.stride[1]) return std::nullopt;
  const std::int64_t stride = q_len > 1 ? view.stride[1] : view.stride[0];
  View queries = view.squeezed(1);
  queries.shape[0] = b * q_len, queries.stride[0] = stride;
  return queries;
}

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
  if (p.q.dtype == DType::kFloat32) return Unsupported{"needs q_index of bfloat16 or float8_e4m3fn"};
  const auto q = as_queries(p.q);
  if (!q) return Unsupported{"needs q_index with equal distances between all queries"};
  if (!tile::can_map(*q, {0, 1})) return Unsupported{"needs rows of q_index 16-byte aligned, with positive strides"};
  if (p.cache.block % 8 != 0) return Unsupported{"needs a block that is a multiple of 8"};
  if (p.cache.blocks == 0) return Unsupported{"needs a cache with blocks"};
  if (!tile::can_map(keys_of(p), {0, 1}))
    return Unsupported{"needs blocks and rows of cache 16-byte aligned, with positive strides"};
  return plan_of(p);
}

template <class T>
void launch_score(const Problem& problem, const Plan& plan, void* workspace, std::int64_t first, std::int64_t count,
                  Stream stream) {
  using Config = indexer::ScoreConfig<T>;
  Sm90Params<T> p{};
  const unpaged::ScorePlan score = unpaged::plan_wgmma_score(plan.problem, count, Config::kKeys);
  set_params(p, problem, plan.problem, score, workspace, first, count);
  constexpr auto kColumns = static_cast<std::uint32_t>(128 / sizeof(T));
  p.q = tile::map_of(*as_queries(problem.q),
                     {{2, kColumns},
                      {1, static_cast<std::uint32_t>(score.queries.padded_heads)},
                      {0, static_cast<std::uint32_t>(score.queries.queries_per_tile)}},
                     arch::Swizzle::bytes128);
  const std::uint32_t rows = box_rows(problem.cache.block);
  p.k = tile::map_of(keys_of(problem), {{2, kColumns}, {1, rows}, {0, 1}}, arch::Swizzle::bytes128);
  p.box_rows = static_cast<int>(rows);
  const auto choose = [&]<int kHeads>(std::integral_constant<int, kHeads>) {
    return problem.relu ? paged_lightning_indexer_score_sm90<kHeads, true, T>
                        : paged_lightning_indexer_score_sm90<kHeads, false, T>;
  };
  const auto kernel = problem.h_index == 64                    ? choose(std::integral_constant<int, 64>{})
                      : problem.h_index == 32                  ? choose(std::integral_constant<int, 32>{})
                      : problem.h_index % tile::kHeadTile == 0 ? choose(std::integral_constant<int, 128>{})
                                                               : choose(std::integral_constant<int, 0>{});
  const std::int64_t ctas = ctas_of(problem, plan.problem, count, Config::kKeys, problem.device.sms);
  runtime::launch(kName, kernel, runtime::shape_of_ctas(ctas, Config::kThreads, sizeof(Sm90Storage<T>)), stream, p);
}

void launch(const Problem& problem, const Plan& plan, void* workspace, Stream stream) {
  const auto score = problem.q.dtype == DType::kBFloat16 ? launch_score<arch::bf16> : launch_score<arch::e4m3>;
  for_each_pass(plan, [&](std::int64_t first, std::int64_t count) {
    if (plan.problem.s_kv > 0 && problem.topk > 0) score(problem, plan, workspace, first, count, stream);
    indexer::launch_cluster_select(kName, plan.problem, count, stream, [&](const unpaged::SelectPlan& select) {
      return select_params(problem, plan, workspace, first, select);
    });
  });
}

const runtime::Registration backend{runtime::kBackend, plan, launch};

}  // namespace
}  // namespace hopwell::ops::paged_lightning_indexer::HOPWELL_TARGET
