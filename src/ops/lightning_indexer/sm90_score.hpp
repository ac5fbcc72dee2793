// lightning_indexer for Hopper: the index scores of some queries against all keys, bf16.
//
//     score[s,t] = Σ_j w[s,j] · relu(q[s,j,:] · k[t,:])        a NaN becomes −inf
//
// Tile      384 keys a CTA, against 64 rows of q at a time, an item: the heads of one or several queries, or of more heads
//           a part
// Roles     warpgroups 0, 1, 2   math     128 keys each, which stay in registers as wgmma's A; sums over the heads
//           warp 12              rows     the CTA's keys, then item after item of q, by the copy engine
//           warps 13, 14, 15     numbers  weights of every third item, and what its queries see, loaded an item of theirs ahead
// Timeline  rows     k k k k k k │ q0 │ q1 │ q2 …      eight stages of 64 rows, each for keys or q
//           math 0   P0 ▓▓▓ P0' ▓▓▓ │ P1 ▓▓▓           products of 64 keys each; the relu and the sums of one run under the
//                           Σ0      Σ0'     Σ1         products of the other, and of the other warpgroups
//           math 1     P0 ▓▓▓ P0' ▓▓▓ …
// Sums      over the heads in a lane first, then over the quad: always in the same order
// Budget    shared: 8 × (16,384 rows + 256 weights + 4) + 128 of barriers, 134,144 B with gaps
//           registers: math 64 of keys + 64 products + 8 sums + ~20 (160), others 32
// Bound     an item costs the tensor cores 1,536 clocks, 64 heads × 384 keys × 128 at 2,048 a clock; relu and weighing two
//           instructions a product, 384 of the 1,536 issue slots that each quarter of the SM has; q 11 B a clock
#pragma once

#include "arch/sm80/convert.hpp"
#include "arch/sm90/cluster.hpp"
#include "arch/sm90/tma.hpp"
#include "arch/sm90/wgmma.hpp"
#include "ops/lightning_indexer/op.hpp"
#include "ops/lightning_indexer/sm80_operands.hpp"
#include "tile/gpu/gather.hpp"
#include "tile/gpu/ring.hpp"

namespace hopwell::ops::lightning_indexer {
namespace {

struct HopperConfig {
  static constexpr int kGroups = 3, kHalves = 2, kRows = 64, kStages = 8, kSteps = kColumns / 16, kNumberWarps = 3;
  static constexpr int kKeys = kGroups * kHalves * kRows, kKeyItems = kGroups * kHalves;
  static constexpr int kThreads = 128 * (kGroups + 1), kMathRegisters = 160, kOtherRegisters = 32;
  static constexpr uint32_t kStageBytes = 2 * tile::kPanelBytes;
};

struct HopperScoreParams {
  arch::TensorMap q, k;  // boxes of 64 columns and 64 rows
  const void* weights;
  int64_t weights_stride;
  bool weights_bf16;
  Causality causality;
  float* scores;  // [queries, pitch]
  int64_t first_query, pitch;
  int queries, heads, s_kv;
  int padded_heads;            // of a query in an item: 8, 16, 32 or 64
  int queries_of_item, parts;  // a query with more than 64 heads has several parts
  int items, items_of_slice;   // items of all queries; of a CTA
};

struct HopperScoreStorage {
  alignas(1024) unsigned char rows[HopperConfig::kStages][HopperConfig::kStageBytes];
  float weights[HopperConfig::kStages][HopperConfig::kRows];
  int visible[HopperConfig::kStages];  // keys that any of the item's queries sees
  tile::RingBarriers<HopperConfig::kStages> ring;
};

// The CTA's items: from the first part of a query on.
struct Slice {
  int first, end;
};
HOPWELL_DEVICE Slice slice_of(const HopperScoreParams& p) {
  const int first = arch::block_index_3d().y * p.items_of_slice;
  return {first, first + p.items_of_slice < p.items ? first + p.items_of_slice : p.items};
}

// Tiles of keys and of q go through the ring one after another.
struct ScoreSlot : tile::RingSlot<HopperConfig::kStages> {
  HopperScoreStorage& s;

  HOPWELL_DEVICE ScoreSlot(HopperScoreStorage& s, int item) : RingSlot{s.ring, item}, s(s) {}
  HOPWELL_DEVICE uint32_t rows() const { return arch::shared_address(s.rows[stage()]); }
};

// Items one after another.
struct Walk {
  int item, query, part = 0;  // the item, its first query, its part of the heads

  // From the first part of a query on.
  HOPWELL_DEVICE Walk(const HopperScoreParams& p, int first)
      : item(first), query(first / p.parts * p.queries_of_item) {}
  HOPWELL_DEVICE ScoreSlot slot(HopperScoreStorage& s, const Slice& slice) const {
    return {s, HopperConfig::kKeyItems + item - slice.first};
  }
  HOPWELL_DEVICE void advance(const HopperScoreParams& p) {
    ++item;
    if (++part == p.parts) part = 0, query += p.queries_of_item;
  }
  // Waits for the first from here on whose queries see `first_key`; frees those in between. False: there is none.
  HOPWELL_DEVICE bool find(const HopperScoreParams& p, HopperScoreStorage& s, const Slice& slice, int first_key) {
    for (; item < slice.end; advance(p)) {
      slot(s, slice).wait_full();
      if (first_key < s.visible[slot(s, slice).stage()]) return true;
      slot(s, slice).release();
    }
    return false;
  }
};

// ---- supply -----------------------------------------------------------------------------------------------------------

// This lane's two rows of an item: their weights, and what the item's queries see.
struct ItemNumbers {
  float weights[2];
  int visible;
};
HOPWELL_DEVICE ItemNumbers numbers_of(const HopperScoreParams& p, const Walk& at) {
  ItemNumbers numbers{{0, 0}, 0};
  HOPWELL_UNROLL
  for (int i = 0; i < 2; ++i) {
    const int row = arch::lane_index() + 32 * i, query = at.query + row / p.padded_heads;
    const int head = at.part * kHeads + row % p.padded_heads;
    if (query >= p.queries) continue;
    const int64_t number = p.first_query + query;
    if (head < p.heads) numbers.weights[i] = load_weight(p.weights, p.weights_bf16, number * p.weights_stride + head);
    const int visible = int(p.causality.visible_keys(number, p.s_kv));
    numbers.visible = visible > numbers.visible ? visible : numbers.visible;
  }
  numbers.visible = tile::max_of_warp(numbers.visible);
  return numbers;
}

// The CTA's keys, then q of every item.
HOPWELL_DEVICE void supply_rows(const HopperScoreParams& p, HopperScoreStorage& s) {
  if (arch::lane_index() != 0) return;
  const Slice slice = slice_of(p);
  const int first_key = arch::block_index() * HopperConfig::kKeys;
  for (int i = 0; i < HopperConfig::kKeyItems; ++i) {
    arch::mbarrier_arrive_expect_tx(s.ring.full[i], HopperConfig::kStageBytes);
    for (int panel = 0; panel < 2; ++panel)
      arch::tma_load<2>(arch::shared_address(s.rows[i]) + uint32_t(panel) * tile::kPanelBytes, p.k,
                        {64 * panel, first_key + HopperConfig::kRows * i}, s.ring.full[i]);
    arch::mbarrier_arrive(s.ring.full[i]);  // for the weights, which keys have not
  }
  Walk at(p, slice.first);
  HOPWELL_NO_UNROLL
  for (; at.item < slice.end; at.advance(p)) {
    const ScoreSlot slot = at.slot(s, slice);
    slot.wait_empty();
    arch::mbarrier& full = slot.full();
    arch::mbarrier_arrive_expect_tx(full, HopperConfig::kStageBytes);
    for (int panel = 0; panel < 2; ++panel)
      arch::tma_load<3>(slot.rows() + uint32_t(panel) * tile::kPanelBytes, p.q,
                        {64 * panel, at.part * kHeads, int(p.first_query) + at.query}, full);
  }
}

// Weights of every third item from `which` on, and what its queries see: a load takes as long as an item.
HOPWELL_DEVICE void supply_numbers(const HopperScoreParams& p, HopperScoreStorage& s, int which) {
  const int lane = arch::lane_index();
  const Slice slice = slice_of(p);
  Walk at(p, slice.first);
  const auto advance = [&](int items) {
    for (int i = 0; i < items; ++i) at.advance(p);
  };
  advance(which);
  ItemNumbers next = numbers_of(p, at);
  HOPWELL_NO_UNROLL
  while (at.item < slice.end) {
    const ScoreSlot slot = at.slot(s, slice);
    const ItemNumbers numbers = next;
    advance(HopperConfig::kNumberWarps);
    next = numbers_of(p, at);
    slot.wait_empty();
    s.weights[slot.stage()][lane] = numbers.weights[0];
    s.weights[slot.stage()][lane + 32] = numbers.weights[1];
    if (lane == 0) s.visible[slot.stage()] = numbers.visible;
    arch::syncwarp();
    if (lane == 0) arch::mbarrier_arrive(slot.full());
  }
}

// ---- math -------------------------------------------------------------------------------------------------------------

// 64 keys, 16 of this warp, as A fragments.
HOPWELL_DEVICE void load_keys(ScoreSlot slot, uint32_t (&keys)[HopperConfig::kSteps][4]) {
  const tile::FragmentLane at;
  tile::load_fragments(at, slot.rows(), keys);
}

// Starts the products of 64 keys and an item.
HOPWELL_DEVICE void start_products(float (&d)[32], const uint32_t (&keys)[HopperConfig::kSteps][4], uint32_t rows) {
  const uint64_t b = arch::at_address(tile::kRowsAlongK, rows);
  arch::wgmma_fence();
  HOPWELL_UNROLL
  for (int step = 0; step < HopperConfig::kSteps; ++step)
    arch::wgmma_rs(d, keys[step], b + tile::columns_on(step), step > 0);
  arch::wgmma_commit();
}

// Sums of this lane's two keys, g and g + 8 of the warp's 16, over some of the heads; even and odd columns.
struct Sums {
  float of[2][2];
};

// Of a quad, lanes 0 and 1 store one key's score each.
HOPWELL_DEVICE void store_scores(const HopperScoreParams& p, int query, int first_key, const Sums& sums) {
  const int lane = arch::lane_index();
  float of_key[2] = {sums.of[0][0] + sums.of[0][1], sums.of[1][0] + sums.of[1][1]};
  tile::share_sums(of_key, 1, 1, lane & 1);
  const float sum = of_key[0] + arch::shuffle_xor(of_key[0], 2);
  const int key = first_key + lane / 4 + 8 * (lane & 1);
  if ((lane & 2) == 0 && key < p.s_kv) p.scores[query * p.pitch + key] = sum == sum ? sum + 0.F : -INFINITY;  // −0 is 0
}

// Adds an item's products with 16 keys to their sums; stores those that are complete.
// kWhole: 64 heads exist, all of one query.
template <bool kWhole>
HOPWELL_DEVICE void add_heads(const HopperScoreParams& p, const float (&d)[32], const float* weights, const Walk& at,
                              int first_key, Sums& sums) {
  const int heads = p.heads - at.part * kHeads, column = arch::lane_index() % 4 * 2;
  const bool last = at.part + 1 == p.parts;
  HOPWELL_UNROLL
  for (int block = 0; block < 8; ++block) {
    HOPWELL_UNROLL
    for (int i = 0; i < 4; ++i) {
      // The product of a head that does not exist may be NaN.
      if (!kWhole && block * 8 % p.padded_heads + column + i % 2 >= heads) continue;
      float& sum = sums.of[i / 2][i % 2];
      sum += weights[8 * block + column + i % 2] * arch::max_nan(d[4 * block + i], 0);
    }
    if (kWhole ? block < 7 || !last : !last || (block + 1) * 8 % p.padded_heads != 0) continue;
    const int query = at.query + (kWhole ? 0 : block * 8 / p.padded_heads);
    if (query < p.queries) store_scores(p, query, first_key, sums);
    sums = {};
  }
}

template <bool kWhole>
HOPWELL_DEVICE void math(const HopperScoreParams& p, HopperScoreStorage& s, int group) {
  const Slice slice = slice_of(p);
  const int first_of_group =
      arch::block_index() * HopperConfig::kKeys + group * HopperConfig::kHalves * HopperConfig::kRows;
  const int first_key = first_of_group + arch::warp_index() % 4 * 16;
  uint32_t keys[2][HopperConfig::kSteps][4];
  // Every warp waits for all of the CTA's keys, of which it reads a few, before it frees any: a stage that is two phases on
  // looks as if it had not been filled yet.
  for (int i = 0; i < HopperConfig::kKeyItems; ++i) ScoreSlot{s, i}.wait_full();
  load_keys({s, 2 * group}, keys[0]);
  load_keys({s, 2 * group + 1}, keys[1]);
  for (int i = 0; i < HopperConfig::kKeyItems; ++i) ScoreSlot{s, i}.release();
  Sums sums[2] = {};
  for (Walk at(p, slice.first); at.find(p, s, slice, first_of_group); at.advance(p)) {
    const ScoreSlot slot = at.slot(s, slice);
    const float* weights = s.weights[slot.stage()];
    float d[2][32];
    start_products(d[0], keys[0], slot.rows());
    start_products(d[1], keys[1], slot.rows());
    arch::wgmma_wait<1>(d[0]);
    add_heads<kWhole>(p, d[0], weights, at, first_key, sums[0]);
    arch::wgmma_wait<0>(d[1]);
    add_heads<kWhole>(p, d[1], weights, at, first_key + HopperConfig::kRows, sums[1]);
    slot.release();
  }
}

// ---- kernel -----------------------------------------------------------------------------------------------------------

// kWhole: h_index is a multiple of 64.
template <bool kWhole>
__global__ void __launch_bounds__(HopperConfig::kThreads, 1) score_keys(const __grid_constant__ HopperScoreParams p) {
#if HOPWELL_HAS_SM90A
  auto& s = arch::dynamic_smem<HopperScoreStorage>();
  if (arch::thread_index() == 0) {
    s.ring.init(2, 4 * HopperConfig::kGroups);  // rows and numbers
    arch::fence_mbarrier_init();
  }
  arch::syncthreads();
  const int group = arch::warpgroup_index(), warp = arch::warp_index();
  if (group < HopperConfig::kGroups) {
    arch::setmaxnreg_inc<HopperConfig::kMathRegisters>();
    math<kWhole>(p, s, group);
  } else {
    arch::setmaxnreg_dec<HopperConfig::kOtherRegisters>();
    if (warp == 4 * HopperConfig::kGroups) supply_rows(p, s);
    if (warp > 4 * HopperConfig::kGroups) supply_numbers(p, s, warp - 4 * HopperConfig::kGroups - 1);
  }
#endif
}

}  // namespace
}  // namespace hopwell::ops::lightning_indexer
