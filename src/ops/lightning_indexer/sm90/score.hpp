// lightning_indexer for Hopper: the index scores of some queries and all keys, bf16 or e4m3.
//
//     score[s,t] = k_scale[t] · Σ_j w[s,j] · q_scale[s,j] · relu(q[s,j,:] · k[t,:])        a NaN becomes −inf
//
// or, without relu, of the products themselves.
//
// Tile      a CTA has 384 keys, and tiles of 64 rows of q: the heads of one or several queries, or 64 heads of a query
//           with more heads
// Roles     warpgroups 0, 1, 2   score    128 keys each, in registers as operand A of wgmma; products (e4m3: in
//                                         ping-pong order), and sums over the heads
//           warp 12              tiles    producer: the CTA's keys, then the tiles of q, by the copy engine
//           warps 13, 14, 15     weights  producer: weights of every third tile, times q's scales, and the visible keys
//                                         of its queries, loaded a tile ahead
// Timeline  tiles    k k k k k k │ q0 │ q1 │ q2 …      eight stages of 64 rows, each for keys or q; e4m3: sixteen
//           score 0  P0 ▓▓ ┐ Σ0            P1 ▓▓ ┐ Σ1          P: products of both halves, 64 keys each; Σ: relu,
//           score 1        └ P0 ▓▓ ┐ Σ0          └ P1 ▓▓ ┐     weighting and sums of both, overlapping the
//           score 2                └ P0 ▓▓ ┐ Σ0          └ …   products of the other warpgroups
// Barriers  ring     full: rows and weights of a tile have arrived; empty: all score warps have read them
//           kOrderBarrier + g  ping-pong order barrier, named, e4m3 only: warpgroup g may issue its products, because
//                    the products of the previous warpgroup are complete. A warpgroup that skips a tile, because its
//                    queries do not see its keys, also waits and passes the order on
// Sums      first over the heads in a lane, then over the quad: in a fixed order
// Budget    shared: stages of 64 rows of 256 B (e4m3: 128 B), 320 B of weights and 24: 134,144 B (137,216) with gaps
//           registers: score 64 (e4m3 32) for keys + 64 products + 8 sums + ~20; others 32 (e4m3 56)
// Bound     a tile takes 1,536 clocks of the tensor cores: 64 heads × 384 keys × 128 at 2,048 per clock, or 768 for
//           e4m3. Each quarter of the SM issues relu and weighting, two instructions per 32 products, in 384 slots, and
//           the remaining instructions (issue of products, loads of weights, quad sums, waits) in 270 more, or 306 for
//           bf16. Neither of these bounds e4m3: at each change of warpgroup the tensor cores wait for a barrier and for
//           the next products, which are half as long as bf16's
#pragma once

#include "arch/sm80/convert.hpp"
#include "arch/sm90/cluster.hpp"
#include "arch/sm90/tma.hpp"
#include "arch/sm90/wgmma.hpp"
#include "ops/lightning_indexer/score_task.hpp"
#include "runtime/launch.hpp"
#include "tile/gpu/fragment.hpp"
#include "tile/gpu/panel.hpp"
#include "tile/gpu/ring.hpp"
#include "tile/gpu/tensor_map.hpp"

namespace hopwell::ops::lightning_indexer::HOPWELL_TARGET {

using tile::kHeadTile;

// T: arch::bf16 or arch::e4m3.
template <class T>
struct ScoreConfig {
  static constexpr int kGroups = 3, kHalves = 2, kRows = 64, kWeightWarps = 3;
  static constexpr int kStages = 16 / sizeof(T), kPanels = sizeof(T), kSteps = 128 * sizeof(T) / 32;
  static constexpr int kKeys = kGroups * kHalves * kRows, kKeyTiles = kGroups * kHalves;
  static constexpr int kThreads = 128 * (kGroups + 1), kScoreRegisters = sizeof(T) == 2 ? 160 : 152,
                       kOtherRegisters = sizeof(T) == 2 ? 32 : 56;
  static constexpr uint32_t kStageBytes = kPanels * tile::kPanelBytes;
};

template <class T>
struct ScoreParams : ScoreTask {
  arch::TensorMap q, k;  // boxes of 64 rows and the columns of a panel, 128 bytes
};

// Weights of a tile in the order in which lanes read them: lane t of each quad has products with columns 8 block + 2 t
// and the next, and their weights are consecutive, so that it loads four at a time without bank conflicts.
struct HeadWeights {
  struct alignas(16) Four {
    float of[4];
  } of_lane[4][5];

  // Stores the weights of rows `lane` and lane + 32.
  HOPWELL_DEVICE void store(uint32_t lane, const float (&of_rows)[2]) {
    HOPWELL_UNROLL
    for (uint32_t i = 0; i < 2; ++i)
      of_lane[lane / 2 % 4][lane / 16 + 2 * i].of[lane / 8 % 2 * 2 + lane % 2] = of_rows[i];
  }
};

template <class T>
struct ScoreStorage {
  using Config = ScoreConfig<T>;
  alignas(1024) unsigned char rows[Config::kStages][Config::kStageBytes];
  HeadWeights weights[Config::kStages];
  Span visible[Config::kStages];  // from the first to the last key visible to any of the tile's queries; if masked
  Span of_warp[2][Config::kThreads / 32];
  ScorePart part;  // in shared memory to save registers
  tile::RingBarriers<Config::kStages> ring;
};

// Slot of a tile in the ring: tiles of keys, then tiles of q. Indices are unsigned, so divisions are shifts.
template <class T>
struct ScoreSlot : tile::RingUse<tile::RingBarriers<ScoreConfig<T>::kStages>, tile::RingRound> {
  static constexpr uint32_t kStages = ScoreConfig<T>::kStages;
  ScoreStorage<T>& s;

  HOPWELL_DEVICE ScoreSlot(ScoreStorage<T>& s, uint32_t item)
      : tile::RingUse<tile::RingBarriers<ScoreConfig<T>::kStages>, tile::RingRound>{
            s.ring, {int(item % kStages), item / kStages % 2}},
        s(s) {}
  HOPWELL_DEVICE uint32_t rows() const { return arch::shared_address(s.rows[this->stage()]); }
};

// Mapping of queries to tiles, as far as known at compile time. kHeads 64, 32, 16: h_index has this value, and a tile
// has one, two or four queries. 128: h_index is a larger multiple of 64. 0: any other h_index; then the end of a
// query's rows is tested for each product, which takes twice as long.
template <int kHeads>
HOPWELL_DEVICE QueryTiles query_tiles(const ScoreTask& p) {
  QueryTiles tiles = p;
  if (kHeads > 0) tiles.padded_heads = kHeads < kHeadTile ? kHeads : kHeadTile;
  if (kHeads > 0) tiles.queries_per_tile = kHeadTile / tiles.padded_heads;
  if (kHeads > 0 && kHeads <= kHeadTile) tiles.tiles_per_query = 1;
  return tiles;
}

// The ring's slot of the first key tile of a part. A CTA with several parts goes on in the ring, with parameters that
// have an overload of this.
HOPWELL_DEVICE uint32_t first_slot(const ScorePart& /*part*/) { return 0; }

// Iterates over the tiles of q.
struct TileCursor {
  int tile, query, head_tile = 0;  // the tile, its first query, and its index among the query's tiles

  // Starts at the first tile of a query.
  HOPWELL_DEVICE TileCursor(const ScoreTask& p, int first)
      : tile(first), query(first / p.tiles_per_query * p.queries_per_tile) {}
  template <class T, class Part>
  HOPWELL_DEVICE ScoreSlot<T> slot(ScoreStorage<T>& s, const Part& part) const {
    return {s, first_slot(part) + uint32_t(ScoreConfig<T>::kKeyTiles + tile - part.tiles.first)};
  }
  HOPWELL_DEVICE void advance(const QueryTiles& p) {
    ++tile;
    if (++head_tile == p.tiles_per_query) head_tile = 0, query += p.queries_per_tile;
  }
};

// ---- producers ------------------------------------------------------------------------------------------------------

// This lane's two rows of a tile: their weights, and the keys visible to the tile's queries.
struct TileWeights {
  float weights[2];
  Span visible;  // to any of the queries; if masked
};
template <bool kMasked, class Params>
HOPWELL_DEVICE Span visible_to_tile(const Params& p, const TileCursor& at) {
  if constexpr (!kMasked) return {};
  const int lane = arch::lane_index(), query = at.query + lane;
  return span_of_warp(lane < p.queries_per_tile && query < p.queries ? visible_to(p, query) : Span{});
}
template <bool kMasked, class T, class Params>
HOPWELL_DEVICE TileWeights load_tile_weights(const Params& p, const TileCursor& at) {
  TileWeights loaded{{0, 0}, visible_to_tile<kMasked>(p, at)};
  HOPWELL_UNROLL
  for (int i = 0; i < 2; ++i) {
    const int row = arch::lane_index() + 32 * i, query = at.query + row / p.padded_heads;
    const int head = at.head_tile * kHeadTile + row % p.padded_heads;
    if (query < p.queries && head < p.heads) loaded.weights[i] = weight_of<T>(p, p.first_query + query, head);
  }
  return loaded;
}

// The CTA's keys.
template <class T>
HOPWELL_DEVICE void produce_keys(const ScoreParams<T>& p, ScoreStorage<T>& s, const ScorePart& part) {
  using Config = ScoreConfig<T>;
  constexpr int kColumns = 128 / sizeof(T);  // of a panel
  if (arch::lane_index() != 0) return;
  for (int i = 0; i < Config::kKeyTiles; ++i) {
    arch::mbarrier_arrive_expect_tx(s.ring.full[i], Config::kStageBytes);
    for (int panel = 0; panel < Config::kPanels; ++panel)
      arch::tma_load<2>(arch::shared_address(s.rows[i]) + uint32_t(panel) * tile::kPanelBytes, p.k,
                        {kColumns * panel, part.first_key + Config::kRows * i}, s.ring.full[i]);
    arch::mbarrier_arrive(s.ring.full[i]);  // in place of the weights, which keys do not have
  }
}
// A panel of a tile of q, from a column, a head and a query of the pass on.
template <class T>
HOPWELL_DEVICE void load_queries(const ScoreParams<T>& p, uint32_t to, int column, int head, int query,
                                 arch::mbarrier& full) {
  arch::tma_load<3>(to, p.q, {column, head, int(p.first_query) + query}, full);
}

// Every tile of q.
template <class T, class Params, class Part>
HOPWELL_DEVICE void produce_tiles(const Params& p, ScoreStorage<T>& s, const Part& part) {
  using Config = ScoreConfig<T>;
  constexpr int kColumns = 128 / sizeof(T);  // of a panel
  if (arch::lane_index() != 0) return;
  TileCursor at(p, part.tiles.first);
  HOPWELL_NO_UNROLL
  for (; at.tile < part.tiles.end; at.advance(p)) {
    const ScoreSlot<T> slot = at.slot(s, part);
    slot.wait_empty();
    arch::mbarrier& full = slot.full();
    arch::mbarrier_arrive_expect_tx(full, Config::kStageBytes);
    for (int panel = 0; panel < Config::kPanels; ++panel)
      load_queries<T>(p, slot.rows() + uint32_t(panel) * tile::kPanelBytes, kColumns * panel, at.head_tile * kHeadTile,
                      at.query, full);
  }
}

// Weights of every third tile from `first` on, and the visible keys of its queries. A load takes as long as a tile.
// `meanwhile` is called while the first weights are loaded.
template <bool kMasked, class T, class Params, class Part, class Meanwhile>
HOPWELL_DEVICE void produce_weights(const Params& p, ScoreStorage<T>& s, const Part& part, int first,
                                    Meanwhile meanwhile) {
  const int lane = arch::lane_index();
  TileCursor at(p, part.tiles.first);
  const auto advance = [&](int tiles) {
    for (int i = 0; i < tiles; ++i) at.advance(p);
  };
  advance(first);
  // e4m3: only of tiles that exist. bf16 had no gain.
  const auto load = [&]() -> TileWeights {
    if (sizeof(T) == 1 && at.tile >= part.tiles.end) return {};
    return load_tile_weights<kMasked, T>(p, at);
  };
  TileWeights next = load();
  meanwhile();
  HOPWELL_NO_UNROLL
  while (at.tile < part.tiles.end) {
    const ScoreSlot<T> slot = at.slot(s, part);
    const TileWeights loaded = next;
    advance(ScoreConfig<T>::kWeightWarps);
    next = load();
    slot.wait_empty();
    s.weights[slot.stage()].store(uint32_t(lane), loaded.weights);
    if (kMasked && lane == 0) s.visible[slot.stage()] = loaded.visible;
    arch::syncwarp();
    if (lane == 0) arch::mbarrier_arrive(slot.full());
  }
}

// ---- scores ---------------------------------------------------------------------------------------------------------

// 64 keys, 16 of them in this warp, as A fragments: 32 bytes of a row per step, for either type.
template <class T>
using ScoreKeys = uint32_t[ScoreConfig<T>::kSteps][4];

// Starts the products of 64 keys and a tile of q.
template <class T>
HOPWELL_DEVICE void start_products(float (&d)[32], const ScoreKeys<T>& keys, uint32_t rows) {
  constexpr arch::WgmmaOptions kOptions{.type = sizeof(T) == 2 ? arch::WgmmaType::bf16 : arch::WgmmaType::e4m3};
  const uint64_t b = arch::at_address(tile::kRowsAlongK, rows);
  arch::wgmma_fence();
  HOPWELL_UNROLL
  for (int step = 0; step < ScoreConfig<T>::kSteps; ++step)
    arch::wgmma_rs<kOptions>(d, keys[step], b + tile::columns_on(step), step > 0);
  arch::wgmma_commit();
}

// Ping-pong order for e4m3: warpgroups issue their products one after another, tile by tile. A warpgroup
// passes the order on when its products are complete, so that its sums overlap with the products of the others. bf16
// products take twice as long, and there the order only costs time (measured).
enum NamedBarrier {
  kOrderBarrier = 1
};  // kOrderBarrier + g: warpgroup g may issue its products; joined by g and the previous warpgroup
template <class T>
struct Turn {
  static constexpr int kGroups = ScoreConfig<T>::kGroups;
  static constexpr bool kTaken = sizeof(T) == 1;
  int group;

  HOPWELL_DEVICE explicit Turn(int group) : group(group) {
    if (group == kGroups - 1) pass();
  }
  HOPWELL_DEVICE void take() const {
    if constexpr (kTaken) arch::barrier_sync(kOrderBarrier + group, 256);  // kept: for speed; no result depends on it
  }
  HOPWELL_DEVICE void pass() const {
    if constexpr (kTaken) arch::barrier_arrive(kOrderBarrier + (group + 1) % kGroups, 256);
  }
};

// Sums over some heads for this lane's two keys of a half, g and g + 8 of the warp's 16; even and odd columns
// separately.
struct Sums {
  float of[2][2];
};

// The key whose scores a lane stores: lanes 0 and 1 of a quad store keys of the first half, lanes 2 and 3 of the second
// half.
template <class T>
struct StoredKey {
  int key;
  bool stored;  // else the key is past the last one
  bool exists;
  float scale;

  /// Its number among the keys of the warpgroup.
  static HOPWELL_DEVICE int row() {
    const int lane = arch::lane_index();
    return lane / 2 % 2 * ScoreConfig<T>::kRows + tile::wgmma_row() + lane % 2 * 8;
  }
  HOPWELL_DEVICE void store(const ScoreTask& p, int query, const Sums (&sums)[2]) const {
    const int lane = arch::lane_index();
    float of_half[2];
    HOPWELL_UNROLL
    for (int i = 0; i < 2; ++i) {
      float of_key[2] = {sums[i].of[0][0] + sums[i].of[0][1], sums[i].of[1][0] + sums[i].of[1][1]};
      tile::share_sums(of_key, 1, 1, lane & 1);
      of_half[i] = of_key[0];
    }
    tile::share_sums(of_half, 1, 2, lane & 2);
    if (stored)
      p.scores[int64_t{query} * p.pitch + key] = exists ? tile::index_score(of_half[0] * scale) : absent_score();
  }
};

// Called before the slots of the keys are released. paged_lightning_indexer has an overload.
template <class T, class Params, class Part>
HOPWELL_DEVICE StoredKey<T> stored_key(const Params& p, ScoreStorage<T>& /*s*/, const Part& part, int group) {
  using Config = ScoreConfig<T>;
  const int key = part.first_key + group * Config::kHalves * Config::kRows + StoredKey<T>::row();
  return {key, key < p.s_kv, has_key(p, key), scale_of_key<T>(p, key)};
}

// Adds a tile's products with 16 keys of each half to their sums; stores complete sums. kHeads: see query_tiles.
template <int kHeads, bool kRelu, class T>
HOPWELL_DEVICE void add_heads(const ScoreTask& p, const float (&d)[2][32], const HeadWeights& weights,
                              const TileCursor& at, const StoredKey<T>& stored, Sums (&sums)[2]) {
  const QueryTiles tiles = query_tiles<kHeads>(p);
  const int heads = p.heads - at.head_tile * kHeadTile, lane_of_quad = tile::quad_lane();
  HOPWELL_UNROLL
  for (int block = 0; block < 8; ++block) {
    const HeadWeights::Four four = weights.of_lane[lane_of_quad][block / 2];
    HOPWELL_UNROLL
    for (int i = 0; i < 8; ++i) {
      const int half = i / 4, key = i / 2 % 2, column = i % 2;
      // The product of a padding head may be NaN.
      if (kHeads == 0 && block * 8 % tiles.padded_heads + 2 * lane_of_quad + column >= heads) continue;
      const float product = d[half][4 * block + 2 * key + column];
      sums[half].of[key][column] += four.of[block % 2 * 2 + column] * (kRelu ? arch::max_nan(product, 0) : product);
    }
    if ((block + 1) * 8 % tiles.padded_heads != 0 || at.head_tile + 1 != tiles.tiles_per_query) continue;
    const int query = at.query + block * 8 / tiles.padded_heads;
    if (tiles.queries_per_tile == 1 || query < p.queries) stored.store(p, query, sums);
    sums[0] = sums[1] = {};
  }
}

template <int kHeads, bool kMasked, bool kRelu, class T, class Params, class Part>
HOPWELL_DEVICE void score_tiles(const Params& p, ScoreStorage<T>& s, const Part& part, int group, const Turn<T>& turn) {
  using Config = ScoreConfig<T>;
  constexpr int kKeysOfGroup = Config::kHalves * Config::kRows;
  const int first_of_group = part.first_key + group * kKeysOfGroup;
  ScoreKeys<T> keys[Config::kHalves];
  // Every warp waits for all of the CTA's keys, although it reads only some, before it releases any: a wait for a stage
  // that is two phases ahead would block.
  const uint32_t slot_of_keys = first_slot(part);
  for (uint32_t i = 0; i < Config::kKeyTiles; ++i) ScoreSlot<T>(s, slot_of_keys + i).wait_full();
  const tile::FragmentLane lane;
  HOPWELL_UNROLL
  for (int i = 0; i < Config::kHalves; ++i)
    tile::load_fragments(lane, ScoreSlot<T>(s, slot_of_keys + uint32_t(Config::kHalves * group + i)).rows(), keys[i]);
  const StoredKey<T> stored = stored_key<T>(p, s, part, group);
  for (uint32_t i = 0; i < Config::kKeyTiles; ++i) ScoreSlot<T>(s, slot_of_keys + i).release();
  Sums sums[Config::kHalves] = {};
  HOPWELL_NO_UNROLL
  for (TileCursor at(p, part.tiles.first); at.tile < part.tiles.end; at.advance(query_tiles<kHeads>(p))) {
    const ScoreSlot<T> slot = at.slot(s, part);
    slot.wait_full();
    // A warpgroup that skips a tile also keeps the order.
    const bool visible = !kMasked || s.visible[slot.stage()].overlaps(first_of_group, kKeysOfGroup);
    float d[Config::kHalves][32];
    turn.take();
    if (visible) {
      start_products<T>(d[0], keys[0], slot.rows());
      start_products<T>(d[1], keys[1], slot.rows());
      arch::wgmma_wait<0>(d[0], d[1]);
    }
    turn.pass();
    if (visible) add_heads<kHeads, kRelu>(p, d, s.weights[slot.stage()], at, stored, sums);
    slot.release();
  }
}

// ---- kernel ---------------------------------------------------------------------------------------------------------

// The work of a CTA. If queries may not see all keys, its threads compute it together. Otherwise each thread computes
// it alone, so that no thread waits for shared memory.
template <bool kMasked, class T>
HOPWELL_DEVICE ScorePart part_of_role(const ScoreParams<T>& p, const ScoreStorage<T>& s) {
  if constexpr (kMasked) return s.part;
  return part_of_grid<ScoreConfig<T>::kKeys>(p);
}

// kHeads: see query_tiles.
template <int kHeads, bool kMasked, bool kRelu, class T>
__global__ void __launch_bounds__(ScoreConfig<T>::kThreads, 1)
    lightning_indexer_score_sm90(const __grid_constant__ ScoreParams<T> p) {
#if HOPWELL_HAS_SM90A
  using Config = ScoreConfig<T>;
  auto& s = arch::dynamic_smem<ScoreStorage<T>>();
  if (arch::thread_index() == 0) {
    s.ring.init(2, 4 * Config::kGroups);  // arrivals: rows and weights
    arch::fence_mbarrier_init();
  }
  if constexpr (kMasked) {
    const ScorePart part = visible_part_of_grid<Config::kKeys>(p, s.of_warp, [&](int blocks, int groups) {
      return wgmma_groups_per_slice(blocks, groups, p.tiles_per_query, p.sms);
    });
    if (part.tiles.empty()) return;
    if (arch::thread_index() == 0) s.part = part;
  }
  arch::syncthreads();
  const int group = arch::warpgroup_index(), warp = arch::warp_index();
  if (group < Config::kGroups) {
    arch::setmaxnreg_inc<Config::kScoreRegisters>();
    score_tiles<kHeads, kMasked, kRelu>(p, s, part_of_role<kMasked>(p, s), group, Turn<T>(group));
  } else {
    arch::setmaxnreg_dec<Config::kOtherRegisters>();
    const ScorePart part = part_of_role<kMasked>(p, s);
    if (warp == 4 * Config::kGroups) {
      produce_keys(p, s, part);
      tile::launch_dependents();  // the selection. Before the first copies, the launch would delay them
      produce_tiles(p, s, part);
    }
    if (warp > 4 * Config::kGroups) produce_weights<kMasked>(p, s, part, warp - 4 * Config::kGroups - 1, [] {});
  }
#endif
}

// ---- launch ---------------------------------------------------------------------------------------------------------

// Without relu, which is rare, only the masked variant is compiled; it also handles queries that see all keys.
template <int kHeads, class T>
auto kernel_for(const ScoreParams<T>& p, bool relu) {
  if (!relu) return lightning_indexer_score_sm90<kHeads, true, false, T>;
  return p.masked ? lightning_indexer_score_sm90<kHeads, true, true, T>
                  : lightning_indexer_score_sm90<kHeads, false, true, T>;
}

// Scores of `count` queries from `first` on.
template <class T>
void launch_score(const Problem& problem, void* workspace, std::int64_t first, std::int64_t count, Stream stream) {
  using Config = ScoreConfig<T>;
  const ScorePlan plan = plan_wgmma_score(problem, count, Config::kKeys);
  ScoreParams<T> p{score_task(problem, plan, workspace, first, count)};
  constexpr auto kColumns = static_cast<std::uint32_t>(128 / sizeof(T));
  p.q = tile::map_of(problem.q,
                     {{2, kColumns},
                      {1, static_cast<std::uint32_t>(plan.queries.padded_heads)},
                      {0, static_cast<std::uint32_t>(plan.queries.queries_per_tile)}},
                     arch::Swizzle::bytes128);
  p.k = tile::map_of(problem.k, {{1, kColumns}, {0, Config::kRows}}, arch::Swizzle::bytes128);
  const auto kernel = problem.h_index == 64              ? kernel_for<64>(p, problem.relu)
                      : problem.h_index == 32            ? kernel_for<32>(p, problem.relu)
                      : problem.h_index == 16            ? kernel_for<16>(p, problem.relu)
                      : problem.h_index % kHeadTile == 0 ? kernel_for<128>(p, problem.relu)
                                                         : kernel_for<0>(p, problem.relu);
  runtime::launch(kName, kernel,
                  runtime::shape_of_ctas(plan.key_blocks * plan.slices, Config::kThreads, sizeof(ScoreStorage<T>)),
                  stream, p);
}

}  // namespace hopwell::ops::lightning_indexer::HOPWELL_TARGET
