// sparse_mla_backward on Hopper: the kernel for one query and 64 heads. One pass over the selected keys; their
// gradients are added to global memory.
//
//     P  = exp2(Q Kᵀ · sm_scale · log2e − lse'·log2e)      lse' = log(exp(lse) + exp(attn_sink))
//     dS = P (dO Vᵀ − delta) sm_scale                      V = K[:, :512], delta = Σ_d out · d_out
//     dQ = dS K            dKV[keys] += dSᵀ Q, and Pᵀ dO to the first 512 columns
//     d_sink = −Σ_s exp(attn_sink − lse') delta
//
// Tile      one query, 64 heads, 64 keys per step; d_qk 576 or 512. Operands are panels of 64 columns, 128B-swizzled.
// Roles     warpgroup 0  S → P    │ both: half of dQ's columns in registers, and the same columns of the next keys by
//           warpgroup 1  dP → dS  │ cp.async; d_qk 576: both multiply with the middle panel, which warpgroup 0 copies
//           warpgroup 2  dKV: multiplies half a panel while it adds the previous half, so it adds at all times. In
//                         fixed point warpgroups 0 and 1 add two panels each, while their keys arrive
// Timeline  step 0                                           step 1
//           0     S ▓▓▓▓▓ │ P │········│ dQ ▓▓▓▓ │ keys 1 …… │ S ▓▓▓▓▓ │ P │…
//           1     dP ▓▓▓▓ │···│ dS     │ dQ ▓▓▓▓ │ keys 1 …… │ dP ▓▓▓▓ │···│ dS
//           2                          │ dKV 0a ▓ 0b ▓ add 0a 1a ▓ add 0b … add 8a │ add 8b, 0a ▓ …
// Budget    shared: (Q 9 + dO 8 + keys 9 + P 1 + dS 1) panels of 8,192 B = 229,376, vectors 3,016    (of 232,448)
//           registers: dQ 144 + S or dP 32 + 32 others = 208 in warpgroups 0 and 1, 88 in warpgroup 2 (of 3 · 168)
// Bound     s_q · topk · 2,304 B of additions in L2 while dkv_accum fits there. If it does not fit, sorted rows and
//           throttled CTAs keep the current rows of dkv_accum in L2, and every other wave descends, so that it begins
//           with rows in L2
//
// Keys of invalid entries are −1, their rows are zeros, and P is 0 for them. Their zero sums are added to the query's
// last key, because a conditional addition is a branch. In fixed point nothing is added for them and P is not cleared;
// the exponent is clamped, so that its product with the scale, 0, is 0. Padding heads have Q = dO = 0 and lse = +inf.
//
// P: WindowParams for queries with window keys, which precede the selected keys in a query's list of entries
// (tile/gpu/window.hpp). Their rows are gathered, and their gradients added, like rows of selected keys.
//
// kMerged: the tile is a group of adjacent queries with few heads, the keys are the union of their keys
// (tile/gpu/merge_rows.hpp), and P is 0 where a query lacks the key.
#pragma once

#include <cmath>

#include "ops/sparse_mla_backward/sm90/tile.hpp"

namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET {

// Panels of dKV that each score warpgroup adds while its keys arrive. Measured: none is fastest, except in fixed point,
// where an addition costs more instructions.
template <bool kFixed>
constexpr int kPanelsBeside = kFixed ? 2 : 0;

// Number of 16-head blocks whose dS warpgroup 2 keeps in registers next to P: the largest that does not spill. If that
// is all of dS, the space of dS is free at the same time as the space of P.
template <int kHeadSteps>
constexpr int kDsStepsHeld = kHeadSteps < 3 ? kHeadSteps : 3;
template <int kHeadSteps>
constexpr bool kHoldsDs = kDsStepsHeld<kHeadSteps> == kHeadSteps;

template <int kDqk>
struct SharedStorage {
  static constexpr int kPanels = kDqk / 64;
  Panel q[kPanels], d_out[Config::kPanelsV], keys[kPanels], p, ds;
  HeadValues<Config::kHeads> heads;
  float head_sums[4][Config::kKeys];  // of attn, by warp
  int key[2][Config::kKeys];          // of this step and the next; negative if invalid
  alignas(4) bool lacks_keys[2][4];   // whether any key is invalid among those that a warp of warpgroup 0 copies
  int last_valid[Config::kWarps];
  uint32_t seen[128];                           // of throttle_step, for threads of warpgroup 2, to save registers
  uint16_t member_masks[2][Config::kKeys / 2];  // member masks of the keys of this step and the next, a byte each
  arch::CachePolicy policy;                     // L2 policy of rows of kv; in shared memory to save registers
  arch::mbarrier heads_full;                    // Q and dO have arrived by TMA
};
static_assert(sizeof(SharedStorage<576>) <= arch::sm90::kMaxSharedBytes);

enum NamedBarrier : int {
  kKeysFull = 1,
  kPFull,
  kDsFull,
  kPdsFull,
  kPEmpty,
  kDsEmpty,
  kMiddleRead,
  kLowStaged,
  kHighStaged
};

template <class P>
HOPWELL_DEVICE WorkTile work_of(const P& p) {
  return tile_of(p, arch::block_index(), Config::kHeads);
}

#if HOPWELL_HAS_SM90A

// Half 0 or 1 of the columns: four panels, and half of the middle panel if there is one.
template <int kDqk, int kHalf>
constexpr int kFirstPanel = kHalf == 0 ? 0 : kDqk / 64 - 4;

// ---- warpgroups 0 and 1

// Starts the copies of kCount panels of 64 keys, executed by a warpgroup.
template <int kFirst, int kCount, int kDqk, class P>
HOPWELL_DEVICE void copy_panels(const P& p, SharedStorage<kDqk>& s, const int (&keys)[4], arch::CachePolicy policy,
                                int t) {
  const int chunk = t & 7;
  HOPWELL_UNROLL
  for (int m = 0; m < 4; ++m) {
    const int bytes = keys[m] < 0 ? 0 : 16;
    const bf16* source = p.kv + (keys[m] < 0 ? 0 : row_offset(p, keys[m])) + 8 * chunk;
    const uint32_t target = arch::shared_address(s.keys) + tile::swizzled(t / 8 + 16 * m, chunk);
    HOPWELL_UNROLL
    for (int panel = kFirst; panel < kFirst + kCount; ++panel)
      arch::cp_async_cached(target + uint32_t(panel) * tile::kPanelBytes, source + 64 * panel, bytes, policy);
  }
}

// Copies the panels of half of the columns. Half 0 publishes the keys for the additions.
template <int kDqk, int kHalf, class P>
HOPWELL_DEVICE void gather(const P& p, SharedStorage<kDqk>& s, const int (&keys)[4], arch::CachePolicy policy, int step,
                           int t) {
  if constexpr (kHalf == 0) {
    publish_keys(s.key, keys, step, t);
    const bool lacks_key = arch::ballot((keys[0] | keys[1] | keys[2] | keys[3]) < 0) != 0;
    if (t % 32 == 0) s.lacks_keys[step % 2][t / 32] = lacks_key;
  }
  copy_panels<kFirstPanel<kDqk, kHalf>, 4>(p, s, keys, policy, t);
}
// The panel that both halves multiply with; half 0 copies it in whole lines.
template <int kDqk, class P>
HOPWELL_DEVICE void gather_middle(const P& p, SharedStorage<kDqk>& s, const int (&keys)[4], arch::CachePolicy policy,
                                  int t) {
  if constexpr (kHasMiddle<kDqk>) copy_panels<4, 1>(p, s, keys, policy, t);
}

// Member mask of key t of a step, for threads 0 to 63.
HOPWELL_DEVICE uint8_t load_member_mask(const Params& p, const Entries& entries, int step, int t) {
  const int at = step * Config::kKeys + t;
  return t < Config::kKeys && at < entries.length ? p.member_masks[entries.row - p.selection.indices + at] : uint8_t{0};
}
HOPWELL_DEVICE void publish_member_mask(uint16_t (&member_masks)[2][Config::kKeys / 2], uint8_t of_key, int step,
                                        int t) {
  if (t < Config::kKeys) reinterpret_cast<uint8_t*>(member_masks[step % 2])[t] = of_key;
  arch::syncwarp();  // kept: lanes have diverged
}

// prefetch_dkv_accum: prefetches the same half of the rows of dkv_accum to L2 before the additions. Not inside
// `gather`: the test alone slows the copies by a few per cent.
template <int kDqk, int kHalf>
HOPWELL_DEVICE void prefetch_dkv_rows(const Params& p, const int (&keys)[4], int t) {
  constexpr int kLines = kDqk / 64;  // of 128 bytes
  HOPWELL_UNROLL
  for (int m = 0; m < 4; ++m) {
    if (keys[m] < 0) continue;
    const void* row = p.dkv ? static_cast<const void*>(p.dkv + int64_t{keys[m]} * p.dkv_stride)
                            : static_cast<const void*>(p.fixed_dkv + int64_t{keys[m]} * (kDqk / 2));
    for (int line = t & 7; line < kLines; line += 8)
      arch::prefetch_l2(static_cast<const char*>(row) + 128 * (kHalf * kLines + line));
  }
}

// Stages dQ in this half's columns of the key buffer, then stores whole lines, or panels by TMA if no panel is shared.
template <int kDqk, int kHalf>
HOPWELL_DEVICE void store_dq(const Params& p, const HeadMaps& maps, SharedStorage<kDqk>& s, const float (&dq)[128],
                             const float (&middle)[16], const WorkTile& work, int t) {
  constexpr int kChunks = kDqk / 16;
  const MatrixLane lane = matrix_lane(t);
  stage_panels(&s.keys[kFirstPanel<kDqk, kHalf>], dq, lane);
  if constexpr (kHasMiddle<kDqk>) {
    HOPWELL_UNROLL
    for (int j = 0; j < 4; j += 2)
      stage_fragment(arch::shared_address(&s.keys[4]) + matrix_offset(lane, 4 * kHalf + j), &middle[4 * j]);
  }
  const bool by_tma = !kHasMiddle<kDqk> && maps.has_dq;
  if (by_tma) arch::fence_proxy_async();
  arch::barrier_sync(kLowStaged + kHalf, 128);
  if (by_tma) {
    if (t != 0) return;
    store_panels(&s.keys[4 * kHalf], 4, maps.dq, 256 * kHalf, work.first_head, work.query);
    arch::bulk_wait_read<0>();
    return;
  }
  for (int e = t; e < Config::kHeads * kChunks; e += 128) {
    const int row = e / kChunks, chunk = e % kChunks + kHalf * kChunks, head = work.first_head + row;
    if (head >= p.h_q) break;
    const arch::Words4 v =
        arch::load_shared_v4(arch::shared_address(&s.keys[chunk / 8]) + tile::swizzled(row, chunk % 8));
    arch::store_streaming(p.dq + work.query * p.dq_stride_s + head * p.dq_stride_h + 8 * chunk, v);
  }
}

// Stores dQ of a tile: the same, or the result of a split.
template <int kDqk, int kHalf>
HOPWELL_DEVICE void store_dq_tile(const Params& p, const HeadMaps& maps, SharedStorage<kDqk>& s, const float (&dq)[128],
                                  const float (&middle)[16], const WorkTile& work, int t) {
  if (!p.dq) return;
  if (work.split < 0) {
    store_dq<kDqk, kHalf>(p, maps, s, dq, middle, work, t);
  } else {
    float* split = p.dq_splits + int64_t{work.split} * (Config::kHeads * kDqk);
    store_dq_split<kDqk>(split, dq, kHalf == 0 ? 0 : kDqk - 256, t);
    if constexpr (kHasMiddle<kDqk>) store_dq_split<kDqk>(split, middle, 256 + 32 * kHalf, t);
  }
}

// Clears P of invalid entries and redirects their zero sums to the row of the query's last key. The barrier belongs to
// warpgroup 0, which otherwise uses it only to stage dQ at the end.
template <int kDqk, class List>
HOPWELL_DEVICE void clear_invalid(float (&p)[32], SharedStorage<kDqk>& s, const List& entries, int step, int t) {
  if (reinterpret_cast<const uint32_t&>(s.lacks_keys[step % 2]) == 0) return;
  auto& keys = s.key[step % 2];
  HOPWELL_UNROLL
  for (int e = 0; e < 32; ++e)
    if (keys[e / 4 * 8 + 2 * (t & 3) + (e & 1)] < 0) p[e] = 0;
  arch::barrier_sync(kLowStaged, 128);
  if (t < Config::kKeys && keys[t] < 0) keys[t] = ~entries.key(entries.length - 1);
  arch::syncwarp();  // kept: lanes have diverged
}

// Half 0: converts S to P, and computes the sums over heads. Half 1: converts dP to dS, which it stores and also keeps.
template <int kHalf, int kHeadSteps, bool kFixed, bool kAttn, bool kMerged, class Storage, class List>
HOPWELL_DEVICE void scores_to_ds(const Params& p, Storage& s, const List& entries, float (&acc)[32],
                                 const HeldKeys& held, int step, int t, DsFragments& ds) {
  if constexpr (kHalf == 0) {
    if (step > 0) arch::barrier_sync(kPEmpty, 256);
    make_p<kMerged>(p, acc, s.heads, t, held);
    if constexpr (!kFixed) clear_invalid(acc, s, entries, step, t);
    store_p<kAttn>(acc, s.heads, s.p, t);
    if constexpr (kPanelsBeside<kFixed> > 0) arch::fence_proxy_async();  // no other product reads this P
    arch::barrier_arrive(kPFull, 256);
    if constexpr (kAttn) sum_heads(acc, s.head_sums, t);
  } else {
    arch::barrier_sync(kPFull, 256);
    make_ds(p, acc, s.heads, s.p, ds, t);
    if (!kHoldsDs<kHeadSteps> && step > 0) arch::barrier_sync(kDsEmpty, 256);
    store_ds(ds, s.ds, t);
    arch::fence_proxy_async();
    arch::barrier_arrive(kPdsFull, 256);
  }
}

// Adds the score warpgroups' panels of dKV. acc: free registers.
template <int kDqk, int kHalf, int kHeadSteps, bool kFixed>
HOPWELL_DEVICE void add_panels_beside(const Params& p, SharedStorage<kDqk>& s, float (&acc)[32], int step, int t) {
  constexpr int kCount = kPanelsBeside<kFixed>;
  const SumRows<kFixed> rows = load_sum_rows<kDqk, kFixed>(p, s.key[step % 2], t);
  HOPWELL_UNROLL
  for (int panel = kHalf * kCount; panel < (kHalf + 1) * kCount; ++panel) {
    arch::wgmma_fence();
    multiply_transposed<kHeadSteps>(acc, arch::shared_address(&s.ds), arch::shared_address(&s.q[panel]), false);
    multiply_transposed<kHeadSteps>(acc, arch::shared_address(&s.p), arch::shared_address(&s.d_out[panel]), true);
    arch::wgmma_commit();
    arch::wgmma_wait<0>(acc);
    add_panel(p, acc, 64 * panel, rows);
  }
}

// Both halves: S or dP; their columns of dQ and of the next keys; their panels of dKV, if any.
template <int kDqk, int kHalf, int kHeadSteps, bool kFixed, bool kAttn, bool kMerged, class P>
HOPWELL_DEVICE void score(const P& p, const HeadMaps& maps, SharedStorage<kDqk>& s, const WorkTile& work,
                          typename P::Entries entries) {
  entries.length = length_of(s.last_valid);  // in each role: ptxas spills values computed before the roles split
  const int steps = entries.tiles(Config::kKeys);
  float dq[128] = {}, middle[16] = {};
  for (int step = 0; step < steps; ++step) {
    float acc[32];
    arch::wgmma_fence();
    if constexpr (kHalf == 0)
      multiply_scores<kDqk / 64>(acc, s.q, s.keys);
    else
      multiply_scores<Config::kPanelsV>(acc, s.d_out, s.keys);
    arch::wgmma_commit();
    const int t = arch::thread_index_anew() % 128;
    HeldKeys held = {};
    if constexpr (kMerged && kHalf == 0) load_held_keys(held, s.member_masks[step % 2], p.heads_of_member, t);
    arch::wgmma_wait<0>(acc);
    DsFragments ds;
    scores_to_ds<kHalf, kHeadSteps, kFixed, kAttn, kMerged>(p, s, entries, acc, held, step, t, ds);
    if constexpr (kHalf == 1 && kPanelsBeside<kFixed> == 0)
      arch::barrier_arrive(kDsFull, 256);
    else
      arch::barrier_sync(kDsFull, 256);
    if constexpr (kHalf == 0) load_ds(ds, s.ds, t);
    arch::wgmma_fence();  // kept: the emulator does not check register operands
    multiply_dq<kHasMiddle<kDqk>>(dq, middle, ds, s.keys[kFirstPanel<kDqk, kHalf>],
                                  {across_heads(s.keys[4]) + (64 * kHalf >> 4), 128});
    arch::wgmma_commit();
    int keys[4];
    load_keys(keys, entries, step + 1, t);
    const arch::CachePolicy policy = s.policy;
    uint8_t member_mask = 0;
    if constexpr (kMerged && kHalf == 0) member_mask = load_member_mask(p, entries, step + 1, t);
    arch::wgmma_wait<0>(dq, middle);
    if (step + 1 < steps) {
      if constexpr (kHasMiddle<kDqk> && kHalf == 1) arch::barrier_arrive(kMiddleRead, 256);
      gather<kDqk, kHalf>(p, s, keys, policy, step + 1, t);
      if constexpr (kHasMiddle<kDqk> && kHalf == 0) arch::barrier_sync(kMiddleRead, 256);
      if constexpr (kHalf == 0) gather_middle(p, s, keys, policy, t);
      if constexpr (kMerged && kHalf == 0) publish_member_mask(s.member_masks, member_mask, step + 1, t);
      arch::cp_async_commit();
      if (p.prefetch_dkv_accum) prefetch_dkv_rows<kDqk, kHalf>(p, keys, t);
    }
    if constexpr (kAttn && kHalf == 0) add_attn(p, s.head_sums, s.key[step % 2], work, entries, step, t);
    if constexpr (kPanelsBeside<kFixed> > 0) add_panels_beside<kDqk, kHalf, kHeadSteps, kFixed>(p, s, acc, step, t);
    if (step + 1 < steps) {
      arch::cp_async_wait<0>();
      arch::fence_proxy_async();
      arch::barrier_sync(kKeysFull, 256);
    }
  }
  store_dq_tile<kDqk, kHalf>(p, maps, s, dq, middle, work, arch::thread_index_anew() % 128);
}

// ---- warpgroup 2

// Starts the product of half a panel of dKV. P comes from registers, and as much of dS as fits: this saves shared
// memory bandwidth, and warpgroup 0 does not wait to write the next P.
template <int kDqk, int kHeadSteps>
HOPWELL_DEVICE void start_half(SharedStorage<kDqk>& s, float (&acc)[16],
                               const uint32_t (&ds)[kDsStepsHeld<kHeadSteps>][4],
                               const uint32_t (&probabilities)[kHeadSteps][4], int half) {
  const uint64_t offset = uint64_t(half / 2 * tile::kPanelBytes + half % 2 * 64) >> 4;  // of a descriptor
  arch::wgmma_fence();
  multiply_fragments<kHeadSteps>(acc, ds, across_heads(s.ds), across_heads(s.q[0]) + offset, false);
  if (half < 2 * Config::kPanelsV) multiply_fragments(acc, probabilities, across_heads(s.d_out[0]) + offset, true);
  arch::wgmma_commit();
}

HOPWELL_DEVICE bool is_throttled(const Params& p) { return p.progress && int(arch::block_index()) < p.whole_tiles; }

// Arrives at the barriers that the score warpgroups wait for, if dKV is not needed.
template <int kHeadSteps>
HOPWELL_DEVICE void give_back_steps(int steps) {
  for (int step = 0; step < steps; ++step) {
    arch::barrier_sync(kPdsFull, 256);
    if (step + 1 == steps) break;
    arch::barrier_arrive(kPEmpty, 256);
    if (!kHoldsDs<kHeadSteps>) arch::barrier_arrive(kDsEmpty, 256);
  }
}

// dKV of each step, without the panels of the score warpgroups: multiplies half a panel while it adds the previous
// half. Releases dS after the product of the last half, so that the next dS is complete when that half has been added.
template <int kDqk, int kHeadSteps, bool kFixed, class P>
HOPWELL_DEVICE void scatter(const P& p, SharedStorage<kDqk>& s, typename P::Entries entries) {
  entries.length = length_of(s.last_valid);
  constexpr int kFirst = 4 * kPanelsBeside<kFixed>, kHalves = 2 * (kDqk / 64);
  const int steps = entries.tiles(Config::kKeys);
  if (!kFixed && !p.dkv) return give_back_steps<kHeadSteps>(steps);
  s.seen[arch::thread_index() % 128] = 0;
  for (int step = 0; step < steps; ++step) {
    if (is_throttled(p)) throttle_step<Config::kKeys>(p, p.whole_tiles, s.seen[arch::thread_index() % 128], step);
    if (step + 2 == steps) prefetch_next_tile<kDqk, 1>(p, 0, arch::thread_index() % 128);
    arch::barrier_sync(kPdsFull, 256);
    const int t = arch::thread_index_anew() % 128;
    const SumRows<kFixed> rows = load_sum_rows<kDqk, kFixed, !kFixed>(p, s.key[step % 2], t);
    uint32_t probabilities[kHeadSteps][4], ds[kDsStepsHeld<kHeadSteps>][4];
    load_transposed(probabilities, s.p, t);
    load_transposed(ds, s.ds, t);
    if (step + 1 < steps) arch::barrier_arrive(kPEmpty, 256);
    float acc[2][16];
    start_half(s, acc[0], ds, probabilities, kFirst);
    HOPWELL_UNROLL
    for (int half = kFirst; half + 1 < kHalves; ++half) {
      start_half(s, acc[(half + 1) % 2], ds, probabilities, half + 1);
      arch::wgmma_wait<1>(acc[half % 2]);
      add_panel<!kFixed>(p, acc[half % 2], 32 * half, rows);
      arch::syncwarp();  // kept: without it ptxas spills
    }
    arch::wgmma_wait<0>(acc[1]);
    if (!kHoldsDs<kHeadSteps> && step + 1 < steps) arch::barrier_arrive(kDsEmpty, 256);
    add_panel<!kFixed>(p, acc[1], 32 * (kHalves - 1), rows);
  }
  count_missing_steps<Config::kKeys>(p, is_throttled(p), steps, arch::thread_index() % 128);
}

// ---- before the first step

// Reads a warp's rows of d_out from its panels.
HOPWELL_DEVICE void read_d_out(HeadInputs<Config::kHeads, Config::kWarps>& inputs, const Panel* d_out) {
  const uint32_t lane = uint32_t(arch::lane_index());
  HOPWELL_UNROLL
  for (int i = 0; i < inputs.kRows; ++i) {
    const uint32_t row = uint32_t(arch::warp_index() + Config::kWarps * i);
    HOPWELL_UNROLL
    for (uint32_t half = 0; half < 2 && row < Config::kHeads; ++half)
      inputs.d_out[i][half] =
          arch::load_shared_v4(arch::shared_address(&d_out[lane / 8 + 4 * half]) + tile::swizzled(row, lane % 8));
  }
}

// Loads Q, dO and the first keys, and computes the heads' values. Returns the entries; s.last_valid has the last valid
// one.
template <int kDqk, bool kAttn, bool kMerged, class P>
HOPWELL_DEVICE typename P::Entries prepare(const P& p, const HeadMaps& maps, SharedStorage<kDqk>& s,
                                           const WorkTile& work) {
  typename P::Entries entries = entries_of(p, work);
  const int t = arch::thread_index() % 128, heads = p.h_q - work.first_head;
  int keys[4], batch[kEntryBatch];
  if (maps.has_inputs && arch::thread_index() == 0) {
    arch::mbarrier_init(s.heads_full, 1);
    arch::fence_mbarrier_init();
    arch::mbarrier_arrive_expect_tx(s.heads_full, sizeof(s.q) + sizeof(s.d_out));
    load_panels(s.q, kDqk / 64, maps.q, 0, work.first_head, work.query, s.heads_full);
    load_panels(s.d_out, Config::kPanelsV, maps.d_out, 0, work.first_head, work.query, s.heads_full);
  }
  arch::syncwarp();  // kept: a lane has diverged
  load_keys(keys, entries, 0, t);
  load_entries<Config::kThreads>(batch, entries, arch::thread_index());
  const arch::CachePolicy policy = p.kv_evict_first ? arch::evict_first_policy() : arch::evict_normal_policy();
  if (arch::thread_index() == 0) s.policy = policy;
  if (arch::warpgroup_index() == 0) gather<kDqk, 0>(p, s, keys, policy, 0, t);
  if (arch::warpgroup_index() == 1) gather<kDqk, 1>(p, s, keys, policy, 0, t);
  if (arch::warpgroup_index() == 0) gather_middle(p, s, keys, policy, t);
  if constexpr (kMerged)
    if (arch::warpgroup_index() == 0) publish_member_mask(s.member_masks, load_member_mask(p, entries, 0, t), 0, t);
  if (!maps.has_inputs) {
    load_heads<kDqk>(in_panels(s.q), p.q + work.query * p.q_stride_s + work.first_head * p.q_stride_h, p.q_stride_h,
                     heads);
    load_heads<kDv>(in_panels(s.d_out), p.d_out + work.query * p.d_out_stride_s + work.first_head * p.d_out_stride_h,
                    p.d_out_stride_h, heads);
  }
  arch::cp_async_commit();
  HeadInputs<Config::kHeads, Config::kWarps> inputs;
  load_out(inputs, p, work);
  find_last_valid(s.last_valid, batch, entries);
  arch::cp_async_wait<0>();
  arch::fence_proxy_async();
  arch::syncthreads();
  if (maps.has_inputs) arch::mbarrier_wait(s.heads_full, 0);
  if (!p.delta) read_d_out(inputs, s.d_out);
  prepare_heads<kAttn, Config::kWarps>(p, s.heads, work, inputs);
  arch::syncthreads();
  return entries;
}

#endif

// kHeadSteps: number of 16-head blocks, if h_q may be less than 64.
template <int kDqk, int kHeadSteps, bool kFixed, bool kAttn, bool kMerged, class P>
__global__ void __launch_bounds__(Config::kThreads, 1)
    sparse_mla_bwd_sm90_single(const __grid_constant__ P p, const __grid_constant__ HeadMaps maps) {
#if HOPWELL_HAS_SM90A
  auto& s = arch::dynamic_smem<SharedStorage<kDqk>>();
  const WorkTile work = work_of(p);
  if (!p.merged.wants(work.query)) {  // reports all its steps to the other CTAs
    count_missing_steps<Config::kKeys>(p, is_throttled(p), 0, arch::thread_index());
    return;
  }
  const typename P::Entries entries = prepare<kDqk, kAttn, kMerged>(p, maps, s, work);
  const auto role = Role(arch::warpgroup_index());
  if (role == Role::scores_low_columns) {
    arch::setmaxnreg_inc<Config::kScoreRegisters>();
    score<kDqk, 0, kHeadSteps, kFixed, kAttn, kMerged>(p, maps, s, work, entries);
  } else if (role == Role::scores_high_columns) {
    arch::setmaxnreg_inc<Config::kScoreRegisters>();
    score<kDqk, 1, kHeadSteps, kFixed, kAttn, kMerged>(p, maps, s, work, entries);
  } else {
    arch::setmaxnreg_dec<Config::kScatterRegisters>();
    scatter<kDqk, kHeadSteps, kFixed>(p, s, entries);
  }
#endif
}

// ---- launch

template <class P, int kDqk, int kHeadSteps>
void launch_single(const Problem& problem, const Plan& plan, void* workspace, Stream stream) {
  constexpr std::size_t kBytes = sizeof(SharedStorage<kDqk>);
  const auto launch = [&]<bool kFixed, bool kAttn>() {
    launch_main<sparse_mla_bwd_sm90_single<kDqk, kHeadSteps, kFixed, kAttn, false, P>>(
        problem, plan, workspace, plan.singles, further_params_of<P>(problem, plan), Config::kThreads, kBytes, stream,
        head_maps_of(problem, plan.singles));
  };
  if (plan.dkv_accum == DkvAccum::fixed_point)
    launch.template operator()<true, false>();
  else if (problem.attn && !plan.distribution)
    launch.template operator()<false, true>();
  else
    launch.template operator()<false, false>();
}

template <class P>
void launch_singles(const Problem& problem, const Plan& plan, void* workspace, Stream stream) {
  runtime::with_constant<576, 512>(problem.d_qk, [&]<int kDqk>() {
    problem.h_q <= 32 ? launch_single<P, kDqk, 2>(problem, plan, workspace, stream)
                      : launch_single<P, kDqk, 4>(problem, plan, workspace, stream);
  });
}

}  // namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET
