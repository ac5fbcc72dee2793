// attention_distribution for Blackwell: the attention that each selected key gets, summed over all heads.
//
//     attn[s,i] = Σ_h exp2(score[s,h,i] · scale_log2 − lse[s,h] · log2 e)          0 if entry i is not valid
//
// Tile      one query, 64 keys and 128 heads, whose queries are in tensor memory: scores [128 lanes][64 columns] by
//           tcgen05.mma with M 128, N 64. Fewer heads: padded with zeros. More heads: 128 at a time, one after another.
// Roles     warp 0      gather    producer: keys without their last 128 columns, four rows per instruction; queries,
//                                 as boxes
//           warp 1      issue     mma: queries to tensor memory, all products
//           warp 2      store     epilogue: adds the warps' sums in a fixed order, writes, normalises
//           warp 3      copy      producer: the keys' last 128 columns, 16 bytes per lane
//           warps 4-7   math      softmax: exp2 of scores, sums over a warp's 32 heads
//           CTAs are persistent; plan.hpp describes their work tiles.
// Timeline  gather   Q0 Q1 Q2 K0 ▒▒▒▒│ K1 ▒▒▒▒│ K2 ▒▒▒▒│ …      three stages in the ring, for parts of Q and for keys
//           issue             cp ▓▓│ S0 ▓▓▓│ S1 ▓▓▓│ S2 ▓▓▓ …    three tiles of scores in tensor memory
//           math                            exp Σ 0 │ exp Σ 1 │ …
//           store                                      a0        a1
// Budget    shared: 3 × 73,728 rows + 4 × 4 × 64 × 4 sums + barriers = 225,450 B; tensor memory: Q 288 + 3 × 64 = 480
//           columns
// Bound     the gather: 73,728 B per 64 keys, 1,475 cycles at 50 B per cycle. A gather of four rows and 64 columns
//           takes 12 cycles, so all columns would take 1,728 cycles this way; without the last 128 they take 1,344.
//           Products 1,152, exponentials 512. So 128 heads can reach 0.78 of the matmul rate, 64 heads 0.39. The copy
//           of a tile's queries to tensor memory takes 2,590 cycles, as long as two tiles of keys.
// Order     No order of additions depends on timing: same inputs, same bits.
#pragma once

#include <cmath>

#include "arch/sm90/cluster.hpp"
#include "ops/attention_distribution/params.hpp"
#include "ops/attention_distribution/store.hpp"
#include "tile/gpu/gather.hpp"
#include "tile/gpu/ring.hpp"
#include "tile/gpu/tcgen05_panel.hpp"
#include "tile/gpu/tensor_memory.hpp"
#include "tile/gpu/warp.hpp"

namespace hopwell::ops::attention_distribution::HOPWELL_TARGET {

struct Config {
  static constexpr int kStages = 3, kScoreStages = 3, kThreads = 256, kMathWarps = 4, kFirstMathWarp = 4;
  static constexpr int kCopiedPanels = 2;                   // of keys, the last ones
  static constexpr int kQPanels = 4;                        // per item of queries: 64 columns of all heads each
  static constexpr uint32_t kQPanel = kHeadsAtATime * 128;  // bytes
};
enum WarpRole { kGather, kIssue, kStore, kCopy };  // and the math warps
struct Tmem {
  static constexpr int kQ = 0, kScores = 288, kColumns = 512;
};

template <int kDqk>
struct SharedStorage {
  static constexpr int kPanels = kDqk / 64, kQItems = (kPanels + Config::kQPanels - 1) / Config::kQPanels;
  static constexpr int kGatheredPanels = kPanels - Config::kCopiedPanels;
  alignas(1024) unsigned char rows[Config::kStages][kTileKeys * kDqk * 2];
  float sums[kSumStages][Config::kMathWarps][kTileKeys];  // over a warp's 32 heads
  tile::RingBarriers<Config::kStages> row_barriers;
  tile::RingBarriers<Config::kScoreStages> score_barriers;
  SumBarriers sum_barriers;
  tile::TensorMemory<Tmem::kColumns> tmem;
};
static_assert(sizeof(SharedStorage<576>) <= arch::sm90::kMaxSharedBytes);
static_assert(Config::kQPanels * Config::kQPanel <= sizeof(SharedStorage<512>::rows[0]));

// Parameters, with tensor maps of the rows.
struct GatherParams : Params {
  arch::TensorMap keys;     // [s_kv, d_qk]: 64 columns of a row
  arch::TensorMap queries;  // [s_q, h_q, d_qk]: 64 columns of 128 heads
};

#if HOPWELL_HAS_SM100A

using RowSlot = tile::RingSlot<Config::kStages>;
using ScoreSlot = tile::RingSlot<Config::kScoreStages>;

// ---- gather

// Executed by one lane.
template <int kDqk>
HOPWELL_DEVICE void load_queries(const GatherParams& p, SharedStorage<kDqk>& s, int64_t query, int pass, int q_item,
                                 const RowSlot& slot) {
  constexpr int kPanels = SharedStorage<kDqk>::kPanels;
  const int first = q_item * Config::kQPanels, left = kPanels - first,
            panels = left < Config::kQPanels ? left : Config::kQPanels;
  slot.wait_empty();
  arch::mbarrier_arrive_expect_tx(slot.full(), uint32_t(panels) * Config::kQPanel);
  for (int i = 0; i < panels; ++i)
    arch::tma_load(arch::shared_address(s.rows[slot.stage()]) + uint32_t(i) * Config::kQPanel, p.queries,
                   {64 * (first + i), kHeadsAtATime * pass, int(query)}, slot.full());
}

// Executed by one warp; its first lane copies queries.
template <int kDqk>
HOPWELL_DEVICE void gather(const GatherParams& p, SharedStorage<kDqk>& s) {
  const int lane = arch::lane_index();
  int item = 0;
  for_each_pass(p, [&](int64_t query, const Entries& entries, int tiles, int pass) {
    int keys[4];
    tile::load_gathered_keys(keys, entries, 0, lane);
    for (int i = 0; i < SharedStorage<kDqk>::kQItems; ++i, ++item)
      if (lane == 0) load_queries(p, s, query, pass, i, {s.row_barriers, item});
    HOPWELL_NO_UNROLL
    for (int tile = 0; tile < tiles; ++tile, ++item) {
      const RowSlot slot{s.row_barriers, item};
      tile::gather_tile<SharedStorage<kDqk>::kGatheredPanels>(slot, s.rows[slot.stage()], p.keys, keys);
      tile::load_gathered_keys(keys, entries, (tile + 1) * kTileKeys, lane);
    }
  });
}

// Executed by one warp. For queries it only arrives, because it copies none of them.
template <int kDqk>
HOPWELL_DEVICE void copy_last_panels(const Params& p, SharedStorage<kDqk>& s) {
  constexpr int kFirst = SharedStorage<kDqk>::kGatheredPanels;
  const int lane = arch::lane_index();
  int item = 0;
  for_each_pass(p, [&](int64_t, const Entries& entries, int tiles, int) {
    tile::RowIndices rows{entries.at(lane), entries.at(lane + 32), entries.visible};
    for (int i = 0; i < SharedStorage<kDqk>::kQItems; ++i, ++item) {
      const RowSlot slot{s.row_barriers, item};
      slot.wait_empty();
      tile::arrive_warp(slot.full(), 32);
    }
    HOPWELL_NO_UNROLL
    for (int tile = 0; tile < tiles; ++tile, ++item) {
      const RowSlot slot{s.row_barriers, item};
      slot.wait_empty();
      tile::gather_rows<64 * Config::kCopiedPanels, 4>(
          arch::shared_address(s.rows[slot.stage()]) + kFirst * tile::kPanelBytes, p.kv + 64 * kFirst, p.kv_stride_s,
          rows);
      tile::arrive_after_copies<true>(slot.full());
      const int next = (tile + 1) * kTileKeys + lane;
      rows.low = entries.at(next), rows.high = entries.at(next + 32);
    }
  });
}

// ---- issue

// Copies 16 columns of all heads per instruction to eight columns of tensor memory. Copies and products of a thread
// execute in order, so the products of the previous pass have read the old queries.
template <int kDqk>
HOPWELL_DEVICE void copy_queries(SharedStorage<kDqk>& s, int q_item, const RowSlot& slot) {
  constexpr int kPanels = SharedStorage<kDqk>::kPanels;
  const int first = q_item * Config::kQPanels, left = kPanels - first,
            panels = left < Config::kQPanels ? left : Config::kQPanels;
  slot.wait_full();
  for (int i = 0; i < panels; ++i) {
    const uint32_t panel = arch::shared_address(s.rows[slot.stage()]) + uint32_t(i) * Config::kQPanel;
    HOPWELL_UNROLL
    for (int k = 0; k < 4; ++k)
      arch::tcgen05_copy<1, arch::CopyShape::b128x256>(
          arch::tmem_address(s.tmem, 0, Tmem::kQ + 32 * (first + i) + 8 * k),
          arch::at_address(tile::kTcgen05RowsAlongK, panel + uint32_t(32 * k)));
  }
  arch::tcgen05_commit<1>(slot.empty());
}

template <int kDqk>
HOPWELL_DEVICE void multiply(SharedStorage<kDqk>& s, const RowSlot& rows, const ScoreSlot& scores) {
  constexpr uint32_t kShape = arch::instruction_descriptor({.m = kHeadsAtATime, .n = kTileKeys});
  const uint32_t d = arch::tmem_address(s.tmem, 0, Tmem::kScores + kTileKeys * scores.stage());
  scores.wait_empty();
  rows.wait_full();
  arch::fence_proxy_async();  // for the copies by threads
  arch::tcgen05_fence_after_thread_sync();
  HOPWELL_NO_UNROLL
  for (int panel = 0; panel < SharedStorage<kDqk>::kPanels; ++panel) {
    const uint32_t keys = arch::shared_address(s.rows[rows.stage()]) + uint32_t(panel) * tile::kPanelBytes;
    HOPWELL_UNROLL
    for (int k = 0; k < 4; ++k)
      arch::tcgen05_mma_f16_ts<1>(d, arch::tmem_address(s.tmem, 0, Tmem::kQ + 32 * panel + 8 * k),
                                  arch::at_address(tile::kTcgen05RowsAlongK, keys + uint32_t(32 * k)), kShape,
                                  panel + k > 0);
  }
  arch::tcgen05_commit<1>(rows.empty());
  arch::tcgen05_commit<1>(scores.full());
}

// Executed by one thread. Math waits for its last commit, so that the CTA does not exit before its products end.
template <int kDqk>
HOPWELL_DEVICE void issue(const Params& p, SharedStorage<kDqk>& s) {
  int item = 0, key_tile = 0;
  for_each_pass(p, [&](int64_t, const Entries&, int tiles, int) {
    for (int i = 0; i < SharedStorage<kDqk>::kQItems; ++i, ++item) copy_queries(s, i, {s.row_barriers, item});
    HOPWELL_NO_UNROLL
    for (int tile = 0; tile < tiles; ++tile, ++item, ++key_tile)
      multiply(s, {s.row_barriers, item}, {s.score_barriers, key_tile});
  });
}

// ---- math

// exp2 of a warp's [32 heads][64 keys], one head per lane, summed over the heads: the sum of key l + 32 i is in lane l.
HOPWELL_DEVICE void sum_heads(float (&sums)[2], const uint32_t (&scores)[64], float scale_log2, float lse) {
  const int lane = arch::lane_index();
  HOPWELL_UNROLL
  for (int half = 0; half < 2; ++half) {
    float x[32];
    HOPWELL_UNROLL
    for (int i = 0; i < 32; ++i) {
      const float e = arch::exp2_approx(arch::bit_cast<float>(scores[32 * half + i]) * scale_log2 - lse);
      x[i] = lse == INFINITY ? 0 : e;
    }
    sums[half] = tile::share_sums_of_warp(x);
  }
}

template <int kDqk>
HOPWELL_DEVICE void math(const Params& p, SharedStorage<kDqk>& s) {
  const int warp = arch::warp_index() % 4, lane = arch::lane_index();
  const uint32_t tmem = arch::tmem_address(s.tmem, 32 * warp, Tmem::kScores);
  int key_tile = 0;
  for_each_pass(p, [&](int64_t query, const Entries&, int tiles, int pass) {
    const float lse = lse_of(p, query, kHeadsAtATime * pass + 32 * warp + lane);
    HOPWELL_NO_UNROLL
    for (int tile = 0; tile < tiles; ++tile, ++key_tile) {
      const ScoreSlot scores{s.score_barriers, key_tile};
      const SumSlot slot{s.sum_barriers, key_tile};
      uint32_t loaded[64];
      float sums[2];
      scores.wait_full();
      arch::tcgen05_fence_after_thread_sync();
      tile::load_tensor_memory(loaded, tmem + uint32_t(kTileKeys * scores.stage()));
      arch::tcgen05_fence_before_thread_sync();
      scores.release();
      sum_heads(sums, loaded, p.scale_log2, lse);
      slot.wait_empty();
      float* to = s.sums[slot.stage()][warp];
      to[lane] = sums[0], to[lane + 32] = sums[1];
      slot.commit();
    }
  });
}

#endif

// ---- kernel

template <int kDqk>
__global__ void __launch_bounds__(Config::kThreads, 1)
    attention_distribution_sm100(const __grid_constant__ GatherParams p) {
#if HOPWELL_HAS_SM100A
  auto& s = arch::dynamic_smem<SharedStorage<kDqk>>();
  const int warp = arch::warp_index();
  if (arch::thread_index() == 0) {
    s.row_barriers.init(1 + 32, 1);
    s.score_barriers.init(1, Config::kMathWarps);
    s.sum_barriers.init(Config::kMathWarps, 1);
    arch::fence_mbarrier_init();
  }
  arch::syncwarp();  // kept: a lane has diverged
  if (warp == kIssue) s.tmem.allocate();
  arch::syncthreads();
  if (warp == kGather) gather(p, s);
  if (warp == kIssue && arch::elect_one()) issue(p, s);
  if (warp == kStore) store<Config::kMathWarps>(p, s.sums, s.sum_barriers);
  if (warp == kCopy) copy_last_panels(p, s);
  if (warp >= Config::kFirstMathWarp) math(p, s);
  arch::syncwarp();  // kept: lanes have diverged
  arch::syncthreads();
  if (warp == kIssue) s.tmem.free();
#endif
}

}  // namespace hopwell::ops::attention_distribution::HOPWELL_TARGET
