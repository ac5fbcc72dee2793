// lightning_indexer for Hopper: the index scores of some queries against all keys, bf16.
//
//     score[s,t] = Σ_j w[s,j] · relu(q[s,j,:] · k[t,:])        a NaN becomes −inf
//
// Tile      384 keys a CTA, against tiles of 64 rows of q: the heads of one or several queries, or 64 heads of a query that
//           has more
// Roles     warpgroups 0, 1, 2   score    128 keys each, which stay in registers as wgmma's A; sums over the heads
//           warp 12              tiles    the CTA's keys, then tile after tile of q, by the copy engine
//           warps 13, 14, 15     weights  of every third tile, and which keys its queries see, loaded a tile of theirs ahead
// Timeline  tiles    k k k k k k │ q0 │ q1 │ q2 …      eight stages of 64 rows, each for keys or q
//           score 0  P0 ▓▓▓ P0' ▓▓▓ │ P1 ▓▓▓           products of 64 keys each; the relu and the sums of one run under the
//                           Σ0      Σ0'     Σ1         products of the other, and of the other warpgroups
//           score 1    P0 ▓▓▓ P0' ▓▓▓ …
// Sums      over the heads in a lane first, then over the quad: always in the same order
// Budget    shared: 8 × (16,384 rows + 256 weights + 8) + 128 of barriers, 134,144 B with gaps
//           registers: score 64 of keys + 64 products + 8 sums + ~20 (160), others 32
// Bound     a tile costs the tensor cores 1,536 clocks, 64 heads × 384 keys × 128 at 2,048 a clock; relu and weighing two
//           instructions a product, 384 of the 1,536 issue slots that each quarter of the SM has; q 11 B a clock
#pragma once

#include "arch/sm80/convert.hpp"
#include "arch/sm90/cluster.hpp"
#include "arch/sm90/make_tensor_map.hpp"
#include "arch/sm90/tma.hpp"
#include "arch/sm90/wgmma.hpp"
#include "ops/lightning_indexer/score_task.hpp"
#include "runtime/launch.hpp"
#include "tile/gpu/panel.hpp"
#include "tile/gpu/ring.hpp"

namespace hopwell::ops::lightning_indexer::HOPWELL_TARGET {

using tile::kHeadTile;

struct ScoreConfig {
  static constexpr int kGroups = 3, kHalves = 2, kRows = 64, kStages = 8, kSteps = 128 / 16, kWeightWarps = 3;
  static constexpr int kKeys = kGroups * kHalves * kRows, kKeyTiles = kGroups * kHalves;
  static constexpr int kThreads = 128 * (kGroups + 1), kScoreRegisters = 160, kOtherRegisters = 32;
  static constexpr uint32_t kStageBytes = 2 * tile::kPanelBytes;
};

struct ScoreParams : ScoreTask {
  arch::TensorMap q, k;  // boxes of 64 columns and 64 rows
};

struct ScoreStorage {
  alignas(1024) unsigned char rows[ScoreConfig::kStages][ScoreConfig::kStageBytes];
  float weights[ScoreConfig::kStages][ScoreConfig::kRows];
  Span visible[ScoreConfig::kStages];  // from the first to the last key that any of the tile's queries sees
  Span of_warp[2][ScoreConfig::kThreads / 32];
  ScorePart part;  // here for want of registers
  tile::RingBarriers<ScoreConfig::kStages> ring;
};

// Tiles of keys and of q go through the ring one after another.
struct ScoreSlot : tile::RingSlot<ScoreConfig::kStages> {
  ScoreStorage& s;

  HOPWELL_DEVICE ScoreSlot(ScoreStorage& s, int item) : RingSlot{s.ring, item}, s(s) {}
  HOPWELL_DEVICE uint32_t rows() const { return arch::shared_address(s.rows[stage()]); }
};

// Goes from tile to tile of q.
struct TileCursor {
  int tile, query, head_tile = 0;  // the tile, its first query, and which of the query's tiles it is

  // From the first tile of a query on.
  HOPWELL_DEVICE TileCursor(const ScoreParams& p, int first)
      : tile(first), query(first / p.tiles_per_query * p.queries_per_tile) {}
  HOPWELL_DEVICE ScoreSlot slot(ScoreStorage& s, const ScorePart& part) const {
    return {s, ScoreConfig::kKeyTiles + tile - part.tiles.first};
  }
  HOPWELL_DEVICE void advance(const ScoreParams& p) {
    ++tile;
    if (++head_tile == p.tiles_per_query) head_tile = 0, query += p.queries_per_tile;
  }
  // Waits for the first tile from here on whose queries may see the warpgroup's keys; frees those in between. False: there
  // is none.
  HOPWELL_DEVICE bool wait_visible(const ScoreParams& p, ScoreStorage& s, const ScorePart& part, int first_key) {
    for (; tile < part.tiles.end; advance(p)) {
      slot(s, part).wait_full();
      if (s.visible[slot(s, part).stage()].overlaps(first_key, ScoreConfig::kHalves * ScoreConfig::kRows)) return true;
      slot(s, part).release();
    }
    return false;
  }
};

// ---- producers --------------------------------------------------------------------------------------------------------

// This lane's two rows of a tile: their weights, and the keys that the tile's queries see.
struct TileWeights {
  float weights[2];
  Span visible;  // to any of the queries
};
template <bool kMasked>
HOPWELL_DEVICE Span visible_to_tile(const ScoreParams& p, const TileCursor& at) {
  if constexpr (!kMasked) return {0, p.s_kv};
  const int lane = arch::lane_index(), query = at.query + lane;
  return span_of_warp(lane < p.queries_per_tile && query < p.queries ? visible_to(p, query) : Span{});
}
template <bool kMasked>
HOPWELL_DEVICE TileWeights load_tile_weights(const ScoreParams& p, const TileCursor& at) {
  TileWeights loaded{{0, 0}, visible_to_tile<kMasked>(p, at)};
  HOPWELL_UNROLL
  for (int i = 0; i < 2; ++i) {
    const int row = arch::lane_index() + 32 * i, query = at.query + row / p.padded_heads;
    const int head = at.head_tile * kHeadTile + row % p.padded_heads;
    if (query < p.queries && head < p.heads)
      loaded.weights[i] = tile::load_fp32(p.weights, p.weights_bf16, (p.first_query + query) * p.weights_stride + head);
  }
  return loaded;
}

// The CTA's keys, then every tile of q.
HOPWELL_DEVICE void produce_tiles(const ScoreParams& p, ScoreStorage& s, const ScorePart& part) {
  if (arch::lane_index() != 0) return;
  for (int i = 0; i < ScoreConfig::kKeyTiles; ++i) {
    arch::mbarrier_arrive_expect_tx(s.ring.full[i], ScoreConfig::kStageBytes);
    for (int panel = 0; panel < 2; ++panel)
      arch::tma_load<2>(arch::shared_address(s.rows[i]) + uint32_t(panel) * tile::kPanelBytes, p.k,
                        {64 * panel, part.first_key + ScoreConfig::kRows * i}, s.ring.full[i]);
    arch::mbarrier_arrive(s.ring.full[i]);  // for the weights, which keys have not
  }
  TileCursor at(p, part.tiles.first);
  HOPWELL_NO_UNROLL
  for (; at.tile < part.tiles.end; at.advance(p)) {
    const ScoreSlot slot = at.slot(s, part);
    slot.wait_empty();
    arch::mbarrier& full = slot.full();
    arch::mbarrier_arrive_expect_tx(full, ScoreConfig::kStageBytes);
    for (int panel = 0; panel < 2; ++panel)
      arch::tma_load<3>(slot.rows() + uint32_t(panel) * tile::kPanelBytes, p.q,
                        {64 * panel, at.head_tile * kHeadTile, int(p.first_query) + at.query}, full);
  }
}

// Weights of every third tile from `first` on, and which keys its queries see: a load takes as long as a tile.
template <bool kMasked>
HOPWELL_DEVICE void produce_weights(const ScoreParams& p, ScoreStorage& s, const ScorePart& part, int first) {
  const int lane = arch::lane_index();
  TileCursor at(p, part.tiles.first);
  const auto advance = [&](int tiles) {
    for (int i = 0; i < tiles; ++i) at.advance(p);
  };
  advance(first);
  TileWeights next = load_tile_weights<kMasked>(p, at);
  HOPWELL_NO_UNROLL
  while (at.tile < part.tiles.end) {
    const ScoreSlot slot = at.slot(s, part);
    const TileWeights loaded = next;
    advance(ScoreConfig::kWeightWarps);
    next = load_tile_weights<kMasked>(p, at);
    slot.wait_empty();
    s.weights[slot.stage()][lane] = loaded.weights[0];
    s.weights[slot.stage()][lane + 32] = loaded.weights[1];
    if (lane == 0) s.visible[slot.stage()] = loaded.visible;
    arch::syncwarp();
    if (lane == 0) arch::mbarrier_arrive(slot.full());
  }
}

// ---- scores -----------------------------------------------------------------------------------------------------------

// 64 keys, 16 of this warp, as A fragments.
HOPWELL_DEVICE void load_keys(ScoreSlot slot, uint32_t (&keys)[ScoreConfig::kSteps][4]) {
  const tile::FragmentLane at;
  tile::load_fragments(at, slot.rows(), keys);
}

// Starts the products of 64 keys and a tile of q.
HOPWELL_DEVICE void start_products(float (&d)[32], const uint32_t (&keys)[ScoreConfig::kSteps][4], uint32_t rows) {
  const uint64_t b = arch::at_address(tile::kRowsAlongK, rows);
  arch::wgmma_fence();
  HOPWELL_UNROLL
  for (int step = 0; step < ScoreConfig::kSteps; ++step)
    arch::wgmma_rs(d, keys[step], b + tile::columns_on(step), step > 0);
  arch::wgmma_commit();
}

// Sums of this lane's two keys, g and g + 8 of the warp's 16, over some of the heads; even and odd columns.
struct Sums {
  float of[2][2];
};

// Of a quad, lanes 0 and 1 store one key's score each.
HOPWELL_DEVICE void store_scores(const ScoreParams& p, int query, int first_key, const Sums& sums) {
  const int lane = arch::lane_index();
  float of_key[2] = {sums.of[0][0] + sums.of[0][1], sums.of[1][0] + sums.of[1][1]};
  tile::share_sums(of_key, 1, 1, lane & 1);
  const float sum = of_key[0] + arch::shuffle_xor(of_key[0], 2);
  const int key = first_key + lane / 4 + 8 * (lane & 1);
  if ((lane & 2) == 0 && key < p.s_kv) p.scores[query * p.pitch + key] = tile::index_score(sum);
}

// Adds a tile's products with 16 keys to their sums; stores those that are complete.
// kHeads: 64: h_index is a multiple of 64, and a tile has heads of one query; 32, 16: it is that, and a tile has two or four
// queries; 0: it is another number, and where a query's rows end is found out product by product, which takes twice as long.
template <int kHeads>
HOPWELL_DEVICE void add_heads(const ScoreParams& p, const float (&d)[32], const float* weights, const TileCursor& at,
                              int first_key, Sums& sums) {
  const int heads = p.heads - at.head_tile * kHeadTile, column = arch::lane_index() % 4 * 2;
  const int rows_of_query = kHeads > 0 ? kHeads : p.padded_heads;
  const bool last = (kHeads > 0 && kHeads < kHeadTile) || at.head_tile + 1 == p.tiles_per_query;
  HOPWELL_UNROLL
  for (int block = 0; block < 8; ++block) {
    HOPWELL_UNROLL
    for (int i = 0; i < 4; ++i) {
      // The product of a head that does not exist may be NaN.
      if (kHeads == 0 && block * 8 % rows_of_query + column + i % 2 >= heads) continue;
      float& sum = sums.of[i / 2][i % 2];
      sum += weights[8 * block + column + i % 2] * arch::max_nan(d[4 * block + i], 0);
    }
    if ((block + 1) * 8 % rows_of_query != 0 || !last) continue;
    const int query = at.query + (kHeads == kHeadTile ? 0 : block * 8 / rows_of_query);
    if (query < p.queries) store_scores(p, query, first_key, sums);
    sums = {};
  }
}

template <int kHeads>
HOPWELL_DEVICE void score_tiles(const ScoreParams& p, ScoreStorage& s, const ScorePart& part, int group) {
  const int first_of_group = part.first_key + group * ScoreConfig::kHalves * ScoreConfig::kRows;
  const int first_key = first_of_group + arch::warp_index() % 4 * 16;
  uint32_t keys[2][ScoreConfig::kSteps][4];
  // Every warp waits for all of the CTA's keys, of which it reads a few, before it frees any: a stage that is two phases on
  // looks as if it had not been filled yet.
  for (int i = 0; i < ScoreConfig::kKeyTiles; ++i) ScoreSlot{s, i}.wait_full();
  load_keys({s, 2 * group}, keys[0]);
  load_keys({s, 2 * group + 1}, keys[1]);
  for (int i = 0; i < ScoreConfig::kKeyTiles; ++i) ScoreSlot{s, i}.release();
  Sums sums[2] = {};
  for (TileCursor at(p, part.tiles.first); at.wait_visible(p, s, part, first_of_group); at.advance(p)) {
    const ScoreSlot slot = at.slot(s, part);
    const float* weights = s.weights[slot.stage()];
    float d[2][32];
    start_products(d[0], keys[0], slot.rows());
    start_products(d[1], keys[1], slot.rows());
    arch::wgmma_wait<1>(d[0]);
    add_heads<kHeads>(p, d[0], weights, at, first_key, sums[0]);
    arch::wgmma_wait<0>(d[1]);
    add_heads<kHeads>(p, d[1], weights, at, first_key + ScoreConfig::kRows, sums[1]);
    slot.release();
  }
}

// ---- kernel -----------------------------------------------------------------------------------------------------------

// What a CTA does. Where queries may not see all keys its threads find it out together; else each by itself, so that nobody
// waits for shared memory.
template <bool kMasked>
HOPWELL_DEVICE ScorePart part_of_role(const ScoreParams& p, const ScoreStorage& s) {
  if constexpr (kMasked) return s.part;
  return part_of_grid<ScoreConfig::kKeys>(p);
}

// kHeads: see add_heads.
template <int kHeads, bool kMasked>
__global__ void __launch_bounds__(ScoreConfig::kThreads, 1) score_keys(const __grid_constant__ ScoreParams p) {
#if HOPWELL_HAS_SM90A
  auto& s = arch::dynamic_smem<ScoreStorage>();
  if (arch::thread_index() == 0) {
    s.ring.init(2, 4 * ScoreConfig::kGroups);  // rows and weights
    arch::fence_mbarrier_init();
  }
  if constexpr (kMasked) {
    const ScorePart part = visible_part_of_grid<ScoreConfig::kKeys>(p, s.of_warp, [&](int blocks, int groups) {
      return wgmma_groups_per_slice(blocks, groups, p.tiles_per_query, p.sms);
    });
    if (part.tiles.empty()) return;
    if (arch::thread_index() == 0) s.part = part;
  }
  arch::syncthreads();
  const int group = arch::warpgroup_index(), warp = arch::warp_index();
  if (group < ScoreConfig::kGroups) {
    arch::setmaxnreg_inc<ScoreConfig::kScoreRegisters>();
    score_tiles<kHeads>(p, s, part_of_role<kMasked>(p, s), group);
  } else {
    arch::setmaxnreg_dec<ScoreConfig::kOtherRegisters>();
    const ScorePart part = part_of_role<kMasked>(p, s);
    if (warp == 4 * ScoreConfig::kGroups) produce_tiles(p, s, part);
    if (warp > 4 * ScoreConfig::kGroups) produce_weights<kMasked>(p, s, part, warp - 4 * ScoreConfig::kGroups - 1);
  }
#endif
}

// ---- launch -----------------------------------------------------------------------------------------------------------

// Whether the copy engine can read it: rows of whole chunks of 16 bytes.
bool can_copy(const View& view, std::size_t dims) {
  constexpr std::int64_t kMost = std::int64_t{1} << 38;  // elements
  bool can = reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0;
  for (std::size_t i = 0; i < dims; ++i)
    can &= view.shape[i] <= 1 || (view.stride[i] > 0 && view.stride[i] < kMost && view.stride[i] % 8 == 0);
  return can;
}

// The dimensions of a view in boxes of 64 columns and so many of the others.
arch::TensorMap map_of(const View& view, std::size_t dims, const std::uint32_t (&box)[2]) {
  arch::TensorMapRequest request{.address = view.data,
                                 .element = arch::TensorElement::bf16,
                                 .rank = static_cast<int>(dims) + 1,
                                 .extent = {static_cast<std::uint64_t>(view.shape[dims])},
                                 .box = {tile::kPanelColumns},
                                 .swizzle = arch::Swizzle::bytes128};
  for (std::size_t i = 1; i <= dims; ++i) {
    const std::size_t dim = dims - i;
    request.extent[i] = static_cast<std::uint64_t>(view.shape[dim]);
    request.stride_bytes[i - 1] = view.shape[dim] > 1 ? 2 * static_cast<std::uint64_t>(view.stride[dim]) : 16;
    request.box[i] = box[i - 1];
  }
  return arch::make_tensor_map(request);
}

template <int kHeads>
auto kernel_for(const ScoreParams& p) {
  return p.masked ? score_keys<kHeads, true> : score_keys<kHeads, false>;
}

// Scores of `count` queries from `first` on.
void launch_score(const Problem& problem, std::int64_t first, std::int64_t count, Stream stream) {
  const ScorePlan plan = plan_wgmma_score(problem, count, ScoreConfig::kKeys);
  ScoreParams p{score_task(problem, plan, first, count)};
  p.q = map_of(problem.q, 2,
               {static_cast<std::uint32_t>(plan.queries.padded_heads),
                static_cast<std::uint32_t>(plan.queries.queries_per_tile)});
  p.k = map_of(problem.k, 1, {ScoreConfig::kRows, 1});
  const auto kernel = problem.h_index % kHeadTile == 0 ? kernel_for<kHeadTile>(p)
                      : problem.h_index == 32          ? kernel_for<32>(p)
                      : problem.h_index == 16          ? kernel_for<16>(p)
                                                       : kernel_for<0>(p);
  runtime::launch(kName, kernel,
                  {.grid = {static_cast<std::uint32_t>(plan.key_blocks * plan.slices)},
                   .threads = ScoreConfig::kThreads,
                   .shared_bytes = sizeof(ScoreStorage)},
                  stream, p);
}

}  // namespace hopwell::ops::lightning_indexer::HOPWELL_TARGET
