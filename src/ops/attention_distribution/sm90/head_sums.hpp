// attention_distribution for Hopper: the attention that each selected key gets, summed over all heads.
//
//     attn[s,i] = Σ_h exp2(score[s,h,i] · scale_log2 − lse[s,h] · log2 e)          0 if entry i is not valid
//
// Tile      one query, 64 keys, and 128 heads, 64 for each of two warpgroups that both read every tile; or up to 64
//           heads, the same in both warpgroups, which alternate between tiles. More heads: 128 at a time.
// Roles     warpgroups 0, 1   math     queries in registers, as A fragments; scores, exp2, sums over their heads
//           warps 8, 9, 10    gather   producer: a third of the columns of every tile each, by cp.async, for keys and
//                             queries
//           warp 11           store    epilogue: adds the warps' sums in a fixed order, writes, normalises
//           CTAs are persistent; plan.hpp describes their work tiles.
// Timeline  gather   K3 ▒▒▒▒│ K4 ▒▒▒▒│ K5 …            three tiles in the ring; each third of a stage is filled again
//           math 0   S0 ▓▓▓ exp Σ    S1 ▓▓▓ exp Σ      as soon as the products have read it
//           math 1          S0 ▓▓▓ exp Σ    S1 ▓▓▓     products of one warpgroup overlap exponentials of the other
//           store           a0              a1
// Budget    shared: 3 × 64 × 1,152 rows + 4 × 8 × 64 × 4 sums + 352 barriers = 229,728 B
//           registers: math 144 for Q + 32 scores + ~30 (208), gather and store 88
// Bound     128 heads: tensor pipe and exponentials; 64: the gather, 73,728 B per 64 keys
// Order     No order of additions depends on timing: same inputs, same bits. kOrdered: rows are sorted by key, and CTAs
//           may be throttled, if keys do not fit in L2: plan.hpp.
//
// Memory order. The copies of a third arrive at its mbarrier themselves, so that no gather warp ever waits for them. A
// warp that has waited for that arrival executes fence.proxy.async before the products read the data.
#pragma once

#include <cmath>

#include "arch/sm80/convert.hpp"
#include "arch/sm90/cluster.hpp"
#include "arch/sm90/wgmma.hpp"
#include "ops/attention_distribution/params.hpp"
#include "ops/attention_distribution/store.hpp"
#include "tile/gpu/fragment.hpp"
#include "tile/gpu/gather.hpp"
#include "tile/gpu/ring.hpp"
#include "tile/gpu/warp.hpp"

namespace hopwell::ops::attention_distribution::HOPWELL_TARGET {

struct Config {
  static constexpr int kStages = 3, kParts = 3, kThreads = 384;
  static constexpr int kMathWarps = 8, kMathRegisters = 208, kOtherRegisters = 88;
  static constexpr int kPartColumns = 192;       // 3 panels; the last part has the rest of a row
  static constexpr int kBarriers = 2 * kStages;  // item i uses stage i % 3 and barriers i % 6
};
enum WarpRole { kGather = Config::kMathWarps, kStore = kGather + Config::kParts };
enum NamedBarrier {
  kOrderBarrier = 1
};  // ping-pong order barrier kOrderBarrier + g: warpgroup g may start its products

template <int kDqk>
struct SharedStorage {
  alignas(1024) unsigned char rows[Config::kStages][kTileKeys * kDqk * 2];
  float sums[kSumStages][Config::kMathWarps][kTileKeys];  // over a warp's 16 heads
  tile::RingBarriers<Config::kBarriers, Config::kParts, Config::kParts> row_barriers;
  SumBarriers sum_barriers;
};
static_assert(sizeof(SharedStorage<576>) <= arch::sm90::kMaxSharedBytes);

// Tiles of heads and of keys pass through the ring, in parts. Item i uses stage i % 3 and barriers i % 6: when the
// warpgroups alternate, each barrier belongs to one warpgroup, and neither waits for tiles that it does not read. A
// wait for item i follows a wait for an item that was copied after item i - 6 had been read, so the barrier has already
// passed the earlier phase with the same parity.
template <int kDqk>
struct RowSlot : tile::RingSlot<Config::kBarriers, Config::kParts, Config::kParts> {
  SharedStorage<kDqk>& s;
  int item;

  HOPWELL_DEVICE RowSlot(SharedStorage<kDqk>& s, int item) : RingSlot(s.row_barriers, item), s(s), item(item) {}
  HOPWELL_DEVICE uint32_t rows() const { return arch::shared_address(s.rows[item % Config::kStages]); }
  /// Waits for the previous item in this stage, i - 3, which used the barriers of item i + 3 one phase earlier.
  HOPWELL_DEVICE void wait_empty(int part) const {
    const RowSlot later{s, item + Config::kStages};
    later.RingSlot::wait_empty(part);
  }
  HOPWELL_DEVICE void wait_full(int part) const {
    RingSlot::wait_full(part);
    arch::fence_proxy_async();
  }
  /// A part is free after eight arrivals, one per math warp. If only half of the warps read it, each arrives twice.
  HOPWELL_DEVICE void release(int part, uint32_t arrivals) const { tile::arrive_warp(empty(part), arrivals); }
};

// ---- gather ---------------------------------------------------------------------------------------------------------

// A warp copies its part of the columns of all rows. It never waits for its copies, which arrive at the mbarrier
// themselves.
template <int kDqk, int kUnroll>
HOPWELL_DEVICE void copy_part(RowSlot<kDqk> slot, int part, bool aligned, const bf16* data, int64_t stride,
                              tile::RowIndices indices) {
  constexpr int kColumns = Config::kPartColumns, kLast = kDqk - (Config::kParts - 1) * kColumns;
  const uint32_t to = slot.rows() + uint32_t(part) * (kColumns / tile::kPanelColumns) * tile::kPanelBytes;
  data += part * kColumns;
  slot.wait_empty(part);
  if (!aligned) {
    if (part < Config::kParts - 1)
      tile::copy_rows<kColumns>(to, data, stride, indices);
    else
      tile::copy_rows<kLast>(to, data, stride, indices);
    tile::arrive_after_copies<false>(slot.full(part));
    return;
  }
  if (kLast == kColumns || part < Config::kParts - 1)
    tile::gather_rows<kColumns, kUnroll>(to, data, stride, indices);
  else
    tile::gather_rows<kLast, kUnroll>(to, data, stride, indices);
  tile::arrive_after_copies<true>(slot.full(part));
}

HOPWELL_DEVICE tile::RowIndices keys_of(const Entries& entries, int tile) {
  const int i = kTileKeys * tile + arch::lane_index();
  return {entries.at(i), entries.at(i + 32), entries.visible};
}

template <int kDqk, bool kAlternate, bool kOrdered>
HOPWELL_DEVICE void gather(const Params& p, SharedStorage<kDqk>& s, int part) {
  // The gather is the bottleneck with up to 64 heads; otherwise bursts of copies delay products and sums.
  constexpr int kUnroll = kAlternate ? 16 : 2;
  int item = 0;
  uint32_t seen = 0;  // throttle progress; the other parts follow this part through the ring
  for_each_pass(p, [&](int64_t query, const Entries& entries, int tiles, int pass) {
    const bool throttled = kOrdered && part == 0 && p.throttle.has(int(query));
    const bf16* q = p.q + query * p.q_stride_s;
    // Indices are loaded two tiles ahead and first used at their copy, because a load takes as long as a tile.
    tile::RowIndices next = keys_of(entries, 0), second = keys_of(entries, 1);
    for (int i = 0; i < (kAlternate ? 1 : 2); ++i, ++item) {
      const int head = kHeadsAtATime * pass + kTileHeads * i + arch::lane_index();
      copy_part<kDqk, 1>({s, item}, part, p.aligned, q, p.q_stride_h, {head, head + 32, {0, unsigned(p.h_q)}});
    }
    HOPWELL_NO_UNROLL
    for (int tile = 0; tile < tiles; ++tile, ++item) {
      const tile::RowIndices keys = next;
      next = second;
      second = keys_of(entries, tile + 2);
      if (throttled && tile % kThrottleTiles == 0) p.throttle.before_step(int(query), seen, tile / kThrottleTiles);
      copy_part<kDqk, kUnroll>({s, item}, part, p.aligned, p.kv, p.kv_stride_s, keys);
    }
  });
  arch::cp_async_wait_all();  // no thread exits before its copies complete
}

// ---- math -----------------------------------------------------------------------------------------------------------

// This warp's 16 heads as A fragments, one per 16 columns.
template <int kDqk>
HOPWELL_DEVICE void load_q(RowSlot<kDqk> slot, uint32_t arrivals, uint32_t (&q)[kDqk / 16][4]) {
  const tile::FragmentLane at;
  for (int part = 0; part < Config::kParts; ++part) slot.wait_full(part);
  tile::load_fragments(at, slot.rows(), q);
  for (int part = 0; part < Config::kParts; ++part) slot.release(part, arrivals);
}

// Starts one part of the columns' contribution to the scores of 64 heads and 64 keys.
template <int kSteps>
HOPWELL_DEVICE void start_part(float (&scores)[32], const uint32_t (&q)[kSteps][4], uint32_t rows, int part) {
  constexpr int kPartSteps = Config::kPartColumns / 16;
  const uint64_t b = arch::at_address(tile::kRowsAlongK, rows);
  arch::wgmma_fence();
  HOPWELL_UNROLL
  for (int step = part * kPartSteps; step < (part + 1) * kPartSteps && step < kSteps; ++step)
    arch::wgmma_rs(scores, q[step], b + tile::columns_on(step), step > 0);
  arch::wgmma_commit();
}

// All scores of 64 heads and 64 keys. The products of the two warpgroups follow one another, so that the exponentials
// of each overlap with the products of the other.
template <int kDqk>
HOPWELL_DEVICE void multiply(float (&scores)[32], const uint32_t (&q)[kDqk / 16][4], RowSlot<kDqk> slot,
                             uint32_t arrivals, int group) {
  arch::barrier_sync(kOrderBarrier + group, 256);  // kept: the order is for speed; no result depends on it
  HOPWELL_UNROLL
  for (int part = 0; part < Config::kParts; ++part) {
    slot.wait_full(part);
    start_part(scores, q, slot.rows(), part);
  }
  arch::wgmma_wait<2>();
  slot.release(0, arrivals);
  arch::wgmma_wait<1>();
  slot.release(1, arrivals);
  arch::barrier_arrive(kOrderBarrier + (group ^ 1), 256);
  arch::wgmma_wait<0>(scores);
  slot.release(2, arrivals);
}

// lse of a thread's two heads, rows of its accumulators.
HOPWELL_DEVICE void load_lse(const Params& p, int64_t query, int first_head, float (&lse)[2]) {
  const int head = first_head + tile::wgmma_row();
  HOPWELL_UNROLL
  for (int r = 0; r < 2; ++r) lse[r] = lse_of(p, query, head + 8 * r);
}

// Padding heads and heads with lse +inf must add 0 for any score: if a warp has such heads, their scores are cleared.
HOPWELL_DEVICE void clear_scores(float (&scores)[32], const float (&lse)[2]) {
  if (arch::ballot(lse[0] == INFINITY || lse[1] == INFINITY) == 0) return;
  HOPWELL_UNROLL
  for (int i = 0; i < 32; ++i) scores[i] = lse[i / 2 % 2] == INFINITY ? 0 : scores[i];
}

// exp2 of a warp's [16 heads][64 keys], summed over the heads, passed to the store warp.
template <int kDqk>
HOPWELL_DEVICE void sum_heads(const Params& p, SharedStorage<kDqk>& s, const float (&scores)[32], const float (&lse)[2],
                              int key_tile, int warp) {
  const int lane = arch::lane_index();
  const SumSlot slot{s.sum_barriers, key_tile};
  float c[16];
  HOPWELL_UNROLL
  for (int i = 0; i < 16; ++i) {
    const int at = i / 2 * 4 + i % 2;
    c[i] = arch::exp2_approx(scores[at] * p.scale_log2 - lse[0]) +
           arch::exp2_approx(scores[at + 2] * p.scale_log2 - lse[1]);
  }
  tile::share_sums(c, 8, 16, arch::lane_index() & 16);
  tile::share_sums(c, 4, 8, arch::lane_index() & 8);
  tile::share_sums(c, 2, 4, arch::lane_index() & 4);
  slot.wait_empty();
  const int group = lane / 16 * 4 + lane / 8 % 2 * 2 + lane / 4 % 2;
  float* sums = s.sums[slot.stage()][warp] + 8 * group + tile::fragment_column(lane);
  sums[0] = c[0], sums[1] = c[1];
  slot.commit();
}

// More than 64 heads: each warpgroup has 64 of them, and both read every tile of keys. Otherwise both have the same
// heads and alternate between tiles.
template <int kDqk, bool kAlternate>
HOPWELL_DEVICE void math(const Params& p, SharedStorage<kDqk>& s, int group) {
  constexpr int kHeadTiles = kAlternate ? 1 : 2;
  const int warp = arch::warp_index() % (kAlternate ? 4 : 8);
  int item = 0, key_tile = 0;
  if (group == 1) arch::barrier_arrive(kOrderBarrier, 256);  // warpgroup 0 starts
  for_each_pass(p, [&](int64_t query, const Entries&, int tiles, int pass) {
    const int head_tile = kAlternate ? 0 : group;
    float lse[2];
    load_lse(p, query, kHeadsAtATime * pass + kTileHeads * head_tile, lse);
    uint32_t q[kDqk / 16][4];
    load_q<kDqk>({s, item + head_tile}, kAlternate ? 1 : 2, q);
    if (kAlternate && (item & 1) == group) {  // it would be this warpgroup's turn: pass it on
      arch::barrier_sync(kOrderBarrier + group, 256);
      arch::barrier_arrive(kOrderBarrier + (group ^ 1), 256);
    }
    item += kHeadTiles;
    HOPWELL_NO_UNROLL
    for (int tile = kAlternate ? (item ^ group) & 1 : 0; tile < tiles; tile += kAlternate ? 2 : 1) {
      float scores[32];
      multiply<kDqk>(scores, q, {s, item + tile}, kAlternate ? 2 : 1, group);
      clear_scores(scores, lse);
      sum_heads(p, s, scores, lse, key_tile + tile, warp);
    }
    item += tiles, key_tile += tiles;
  });
}

// ---- kernel ---------------------------------------------------------------------------------------------------------

template <int kDqk, bool kAlternate, bool kOrdered>
__global__ void __launch_bounds__(Config::kThreads, 1) attention_distribution_sm90(const __grid_constant__ Params p) {
#if HOPWELL_HAS_SM90A
  auto& s = arch::dynamic_smem<SharedStorage<kDqk>>();
  if (arch::thread_index() == 0) {
    s.row_barriers.init(32, Config::kMathWarps);
    s.sum_barriers.init(kAlternate ? Config::kMathWarps / 2 : Config::kMathWarps, 1);
    arch::fence_mbarrier_init();
  }
  arch::syncthreads();
  const int group = arch::warpgroup_index(), warp = arch::warp_index();
  if (group < 2) {
    arch::setmaxnreg_inc<Config::kMathRegisters>();
    math<kDqk, kAlternate>(p, s, group);
  } else {
    arch::setmaxnreg_dec<Config::kOtherRegisters>();
    if (warp == kStore)
      store<kAlternate ? Config::kMathWarps / 2 : Config::kMathWarps, kOrdered>(p, s.sums, s.sum_barriers);
    else
      gather<kDqk, kAlternate, kOrdered>(p, s, warp - kGather);
  }
#endif
}

}  // namespace hopwell::ops::attention_distribution::HOPWELL_TARGET
