// sparse_mla_backward on Blackwell: the kernel for one query and 128 heads on a cluster of two CTAs. Formulas:
// single.hpp.
//
// Tile      one query, 128 heads, 64 keys per step. CTA r has columns [256 r, 256 r + 256) and, of 576, half of the
//           last 64, of all operands: Q, dO, K, dQ, dKV, for all 128 heads. So dKV is summed over all heads before it
//           is added, and each column is added by one CTA. S and dP are sums over columns: each CTA computes a part,
//           sends the part of the peer's 32 keys and completes its own 32 keys. It sends their P and dS to the peer as
//           bf16.
// Products  S, dP, dQ: M 128 (a lane is a head). dKV: .ws M 64, N 128; its last columns M 64, N 32. All are
//           cta_group::1: a pair's product needs each operand split by rows and also by columns, 1.5 times Q and dO.
//           dQ reads dS from tensor memory: the softmax warps write dS of the CTA's own keys, a copy writes the peer's.
// Roles     as in single.hpp, in each CTA
// Timeline  issue     │ S 1, dP 1 ▓▓▓▓▓▓▓▓ │ dKV 0 ▓▓▓ │ dQ 0 ▓▓ │ dKV 0 ▓▓▓▓ │ S 2, dP 2 ▓▓▓▓▓▓▓▓ │ dKV 1 …
//           gather    │    (dP frees) keys 0 again ▓▓▓▓▓ │ (dQ frees) keys 2 ▓▓▓▓▓ │ keys 1 again …
//           softmax   │    S 1 ⇄  dP 1 ⇄   P 1, dS 1 │ (dKV 0 frees) store, send │ S 2 ⇄ …
//           scatter   │ …                 │ add 0.0 ▓▓▓▓▓▓▓▓▓ add 0.last ▓▓ add 0.1 ▓▓▓▓▓▓▓▓▓
//           S and dP run one step ahead of P and dS. The buffers hold the last columns of two steps' keys; the other
//           columns are gathered twice.
// Budget    shared: Q 73,728 + dO 65,536 + keys 40,960 + P, dS 32,768 + `receive_buffer` 16,384,
//           values and barriers 1,900 = 231,300 (of 232,448); tensor memory: dQ 288 + S 64 + dP 64 + dKV 64 + dS and
//           the last of dKV 32 = 512 columns
// Bound     shared memory: 466,944 B of operands per step, 3,648 cycles, and 1,504 of copies, exchanges, P and dS. The
//           additions, 73,728 B merged over 128 heads, take 3,351 cycles at 22 B per cycle. The chain of exchanges (S
//           ⇄, dP ⇄, P and dS ⇄) is as long as a step; the step ahead hides it.
#pragma once

#include "arch/sm90/bulk_copy.hpp"
#include "ops/sparse_mla_backward/sm100/tile.hpp"

namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET {

struct PairConfig {
  static constexpr int kHeads = 128, kPanels = 4, kColumns = 64 * kPanels, kOwnKeys = Config::kKeys / 2;
  static constexpr uint32_t kPanel = kHeads * 128, kKeysPanel = Config::kKeys * 128, kNarrowKeys = Config::kKeys * 64;
  static constexpr uint32_t kHalf = kHeads * 64, kHalfOfWarp = kHalf / 4;  // P or dS of 32 keys
  static constexpr uint32_t kPartialOfWarp = 4 * 32 * 32;                  // S or dP of 32 heads and 32 keys
};
struct PairTmem {
  static constexpr int kDq = 0, kS = 288, kDp = 352, kDkv = 416, kDs = 480, kLastDkv = kDs;  // dS as bf16
};

template <int kDqk>
struct PairStorage {
  static constexpr bool kNarrow = kDqk == 576;
  Panel<128> q[PairConfig::kPanels], d_out[PairConfig::kPanels];
  alignas(1024) uint8_t narrow_q[kNarrow ? PairConfig::kPanel / 2 : 16];
  Panel<64> keys[PairConfig::kPanels];
  alignas(1024) uint8_t narrow_keys[2][kNarrow ? PairConfig::kNarrowKeys : 16];  // of two steps
  alignas(1024) uint8_t p[2][PairConfig::kHalf], ds[2][PairConfig::kHalf];       // of each CTA's keys: narrow panels
  arch::Words4 receive_buffer[4][8][32];  // the peer's partial sums: [warp][vector][lane]
  HeadValues<64> heads[2];                // of heads 0-63, computed by CTA 0, and 64-127
  int last_valid[Config::kWarps];
  arch::mbarrier keys_full[PairConfig::kPanels], keys_empty[PairConfig::kPanels];
  arch::mbarrier narrow_full[2], narrow_empty[2];
  arch::mbarrier s_full, s_empty, dp_full, dp_empty;  // in tensor memory, partial sums
  arch::mbarrier receive_full[4], receive_empty[4];   // per warp: of our buffer; of the peer's buffer
  arch::mbarrier ds_full, ds_empty;                   // P and dS of all keys; both CTAs have used them
  arch::mbarrier dkv_full, dkv_empty;                 // chunks of 128 columns
  arch::mbarrier last_dkv_full, last_dkv_empty;       // the last 32 columns
  arch::mbarrier dq_full;
  tile::TensorMemory<512> tmem;
};
static_assert(sizeof(PairStorage<576>) <= arch::sm90::kMaxSharedBytes);

#if HOPWELL_HAS_SM100A

// Address of the same object in the other CTA.
HOPWELL_DEVICE uint32_t at_peer(const void* object) {
  return arch::map_to_rank(arch::shared_address(object), arch::cluster_rank() ^ 1);
}

// ---- keys

// Gathers keys for use number `use` of the key buffer.
template <int kDqk>
HOPWELL_DEVICE void gather_panels(const GatherParams& p, PairStorage<kDqk>& s, const int (&keys)[4], int use) {
  const int lane = arch::lane_index(), rank = int(arch::cluster_rank());
  for (int panel = 0; panel < PairConfig::kPanels; ++panel) {
    arch::mbarrier_wait(s.keys_empty[panel], uint32_t(use & 1) ^ 1);
    if (lane == 0) arch::mbarrier_arrive_expect_tx(s.keys_full[panel], PairConfig::kKeysPanel);
    arch::tma_gather4<1>(arch::shared_address(&s.keys[panel]) + uint32_t(lane) * 512, p.rows,
                         PairConfig::kColumns * rank + 64 * panel, keys, arch::shared_address(&s.keys_full[panel]));
  }
}

// The columns of keys that are not values.
template <int kDqk>
HOPWELL_DEVICE void gather_narrow(const GatherParams& p, PairStorage<kDqk>& s, const int (&keys)[4], int step) {
  const int lane = arch::lane_index(), slot = step & 1;
  arch::mbarrier_wait(s.narrow_empty[slot], uint32_t(step / 2 & 1) ^ 1);
  if (lane == 0) arch::mbarrier_arrive_expect_tx(s.narrow_full[slot], PairConfig::kNarrowKeys);
  arch::tma_gather4<1>(arch::shared_address(s.narrow_keys[slot]) + uint32_t(lane) * 256, p.narrow_rows,
                       kDv + 32 * int(arch::cluster_rank()), keys, arch::shared_address(&s.narrow_full[slot]));
}

// All columns of a step's keys.
template <int kDqk>
HOPWELL_DEVICE void gather_step(const GatherParams& p, PairStorage<kDqk>& s, const int (&keys)[4], int step, int use) {
  gather_panels(p, s, keys, use);
  if constexpr (PairStorage<kDqk>::kNarrow) gather_narrow(p, s, keys, step);
}

// Gathers the keys of steps 0, 1, 0 again, 2, 1 again …: for S and dP of a step, then their panels for dQ of the step
// before. Executed by 16 lanes: further lanes would have copies that nothing waits for, could fall behind by two phases
// of keys_empty, and wait for ever.
template <int kDqk>
HOPWELL_DEVICE void gather(const GatherParams& p, PairStorage<kDqk>& s, const Entries& entries) {
  const int lane = arch::lane_index(), steps = entries.tiles(Config::kKeys);
  const bool throttled = p.progress && arch::block_index() / 2 < p.whole_tiles;
  uint32_t seen = 0;
  int keys[4], next[4], use = 0;
  tile::load_gathered_keys(keys, entries, 0, lane);
  tile::load_gathered_keys(next, entries, Config::kKeys, lane);
  if (steps > 0) gather_step(p, s, keys, 0, use++);
  for (int step = 0; step < steps; ++step) {
    if (throttled) throttle_step<Config::kKeys>(p, 2 * p.whole_tiles, seen, step);
    if (step + 1 < steps) gather_step(p, s, next, step + 1, use++);
    if (p.dq) gather_panels(p, s, keys, use++);
    HOPWELL_UNROLL
    for (int i = 0; i < 4; ++i) keys[i] = next[i];
    tile::load_gathered_keys(next, entries, (step + 2) * Config::kKeys, lane);
  }
  count_missing_steps<Config::kKeys>(p, throttled, steps, lane);
}

// ---- products

// D [128 heads][64 keys] (+)= A · keysᵀ over 16 kSteps columns.
template <int kSteps>
HOPWELL_DEVICE void multiply_partial(uint32_t d, uint64_t by_k, uint32_t a, uint32_t keys, bool accumulate) {
  constexpr uint32_t kShape = arch::instruction_descriptor({.m = 128, .n = 64});
  HOPWELL_UNROLL
  for (uint32_t k = 0; k < kSteps; ++k)
    arch::tcgen05_mma_f16<1>(d, arch::at_address(by_k, a + 32 * k), arch::at_address(by_k, keys + 32 * k), kShape,
                             accumulate || k > 0);
}

template <int kDqk>
HOPWELL_DEVICE void issue_scores(PairStorage<kDqk>& s, int step, int use) {
  const uint32_t freed = uint32_t(step & 1) ^ 1, parity = uint32_t(use & 1), keys = arch::shared_address(s.keys);
  tile::wait_tensor_memory(s.s_empty, freed);
  HOPWELL_NO_UNROLL
  for (uint32_t panel = 0; panel < PairConfig::kPanels; ++panel) {
    arch::mbarrier_wait(s.keys_full[panel], parity);
    multiply_partial<4>(s.tmem + PairTmem::kS, tile::kTcgen05RowsAlongK,
                        arch::shared_address(s.q) + panel * PairConfig::kPanel, keys + panel * PairConfig::kKeysPanel,
                        panel > 0);
  }
  if constexpr (PairStorage<kDqk>::kNarrow) {
    arch::mbarrier_wait(s.narrow_full[step & 1], uint32_t(step / 2 & 1));
    multiply_partial<2>(s.tmem + PairTmem::kS, tile::kTcgen05NarrowRowsAlongK, arch::shared_address(s.narrow_q),
                        arch::shared_address(s.narrow_keys[step & 1]), true);
  }
  arch::tcgen05_commit<1>(s.s_full);
  tile::wait_tensor_memory(s.dp_empty, freed);
  HOPWELL_NO_UNROLL
  for (uint32_t panel = 0; panel < PairConfig::kPanels; ++panel) {
    multiply_partial<4>(s.tmem + PairTmem::kDp, tile::kTcgen05RowsAlongK,
                        arch::shared_address(s.d_out) + panel * PairConfig::kPanel,
                        keys + panel * PairConfig::kKeysPanel, panel > 0);
    arch::tcgen05_commit<1>(s.keys_empty[panel]);
  }
  arch::tcgen05_commit<1>(s.dp_full);
}

// Copies dS of the peer's keys, 16 keys of 128 heads per copy, next to dS of the own keys. In order with the products.
template <int kDqk>
HOPWELL_DEVICE void copy_peer_ds(PairStorage<kDqk>& s) {
  const uint32_t peer = arch::cluster_rank() ^ 1, from = arch::shared_address(s.ds[peer]),
                 to = s.tmem + PairTmem::kDs + 16 * peer;
  HOPWELL_UNROLL
  for (uint32_t k = 0; k < 2; ++k)
    arch::tcgen05_copy<1, arch::CopyShape::b128x256>(to + 8 * k,
                                                     arch::at_address(tile::kTcgen05NarrowRowsAlongK, from + 32 * k));
}

template <int kDqk>
HOPWELL_DEVICE void issue_dq(PairStorage<kDqk>& s, int step, int use) {
  constexpr uint32_t kShape = arch::instruction_descriptor({.m = 128, .n = 128, .b_major = Major::mn}),
                     kNarrowShape = arch::instruction_descriptor({.m = 128, .n = 32, .b_major = Major::mn});
  const uint32_t parity = uint32_t(use & 1);
  const uint32_t ds = s.tmem + PairTmem::kDs;
  HOPWELL_NO_UNROLL
  for (uint32_t panel = 0; panel < PairConfig::kPanels; panel += 2) {
    const uint32_t keys = arch::shared_address(s.keys) + panel * PairConfig::kKeysPanel;
    arch::mbarrier_wait(s.keys_full[panel], parity);
    arch::mbarrier_wait(s.keys_full[panel + 1], parity);
    HOPWELL_UNROLL
    for (uint32_t k = 0; k < 4; ++k)
      arch::tcgen05_mma_f16_ts<1>(s.tmem + PairTmem::kDq + 64 * panel, ds + 8 * k,
                                  arch::at_address(tile::kTcgen05RowsAcrossK<64>, keys + 2048 * k), kShape,
                                  step > 0 || k > 0);
    arch::tcgen05_commit<1>(s.keys_empty[panel]);
    arch::tcgen05_commit<1>(s.keys_empty[panel + 1]);
  }
  if constexpr (PairStorage<kDqk>::kNarrow) {
    const uint32_t keys = arch::shared_address(s.narrow_keys[step & 1]);
    HOPWELL_UNROLL
    for (uint32_t k = 0; k < 4; ++k)
      arch::tcgen05_mma_f16_ts<1>(s.tmem + PairTmem::kDq + PairConfig::kColumns, ds + 8 * k,
                                  arch::at_address(tile::kTcgen05NarrowRowsAcrossK<64>, keys + 1024 * k), kNarrowShape,
                                  step > 0 || k > 0);
  }
}

// D [64 keys][128 columns] (+)= aᵀ · B over 128 heads. a: P or dS; B: two panels.
HOPWELL_DEVICE void multiply_heads(uint32_t d, uint32_t a, uint32_t b, bool accumulate) {
  constexpr uint32_t kShape =
      arch::instruction_descriptor({.m = 64, .n = 128, .a_major = Major::mn, .b_major = Major::mn});
  HOPWELL_UNROLL
  for (uint32_t k = 0; k < 8; ++k)
    arch::tcgen05_mma_ws_f16(d, arch::at_address(tile::kTcgen05NarrowRowsAcrossK<128>, a + 1024 * k),
                             arch::at_address(tile::kTcgen05RowsAcrossK<128>, b + 2048 * k), kShape,
                             accumulate || k > 0);
}

// Columns [128 chunk, 128 chunk + 128) of dKV of a step. `count`: number of such chunks so far.
template <int kDqk>
HOPWELL_DEVICE void issue_dkv(PairStorage<kDqk>& s, uint32_t chunk, int& count) {
  const uint32_t d = s.tmem + PairTmem::kDkv, at = 2 * chunk * PairConfig::kPanel;
  tile::wait_tensor_memory(s.dkv_empty, uint32_t(count++ & 1) ^ 1);
  multiply_heads(d, arch::shared_address(s.ds), arch::shared_address(s.q) + at, false);
  multiply_heads(d, arch::shared_address(s.p), arch::shared_address(s.d_out) + at, true);
  arch::tcgen05_commit<1>(s.dkv_full);
}

// The columns of keys that are not values: [64 keys][32], M 64 in 16 lanes of each quarter. Overwrites dS in tensor
// memory, which dQ has read.
template <int kDqk>
HOPWELL_DEVICE void issue_last_dkv(PairStorage<kDqk>& s) {
  constexpr uint32_t kShape =
      arch::instruction_descriptor({.m = 64, .n = 32, .a_major = Major::mn, .b_major = Major::mn});
  const uint32_t ds = arch::shared_address(s.ds), q = arch::shared_address(s.narrow_q);
  HOPWELL_UNROLL
  for (uint32_t k = 0; k < 8; ++k)
    arch::tcgen05_mma_f16<1>(s.tmem + PairTmem::kLastDkv,
                             arch::at_address(tile::kTcgen05NarrowRowsAcrossK<128>, ds + 1024 * k),
                             arch::at_address(tile::kTcgen05NarrowRowsAcrossK<128>, q + 1024 * k), kShape, k > 0);
  arch::tcgen05_commit<1>(s.last_dkv_full);
}

// Executed by one thread.
template <int kDqk>
HOPWELL_DEVICE void issue(const Params& p, PairStorage<kDqk>& s, int steps) {
  int count = 0, use = 0;
  issue_scores(s, 0, use++);
  for (int step = 0; step < steps; ++step) {
    if (step + 1 < steps) issue_scores(s, step + 1, use++);
    tile::wait_tensor_memory(s.ds_full, uint32_t(step & 1));
    if (p.dq) copy_peer_ds(s);
    if (has_sums(p)) issue_dkv(s, 0, count);  // while the keys are gathered again
    if (p.dq) issue_dq(s, step, use++);
    if constexpr (PairStorage<kDqk>::kNarrow) arch::tcgen05_commit<1>(s.narrow_empty[step & 1]);
    if (step + 1 == steps) arch::tcgen05_commit<1>(s.dq_full);
    if (PairStorage<kDqk>::kNarrow && has_sums(p)) issue_last_dkv(s);  // early: the next dS overwrites them
    if (has_sums(p)) issue_dkv(s, 1, count);                           // during the gather of step + 2
    arch::tcgen05_commit_multicast<1>(s.ds_empty, 3);
  }
  arch::mbarrier_wait(s.ds_empty, uint32_t(steps - 1) & 1);  // the CTA must not exit before its products end
}

// ---- P, dS and dQ

// DSMEM exchange number `count` of a warp: each lane sends its head's partial sums of the peer's 32 keys.
template <int kDqk>
HOPWELL_DEVICE void send_partial(PairStorage<kDqk>& s, const uint32_t (&theirs)[32], int count, int warp) {
  const uint32_t target = at_peer(&s.receive_buffer[warp][0][arch::lane_index()]),
                 full = at_peer(&s.receive_full[warp]);
  arch::mbarrier_wait(s.receive_empty[warp], uint32_t(count & 1) ^ 1);
  HOPWELL_UNROLL
  for (int v = 0; v < 8; ++v)
    arch::store_async_v4(target + uint32_t(512 * v),
                         {{theirs[4 * v], theirs[4 * v + 1], theirs[4 * v + 2], theirs[4 * v + 3]}}, full);
}

// Adds the peer's partial sums of this CTA's 32 keys.
template <int kDqk>
HOPWELL_DEVICE void add_partial(PairStorage<kDqk>& s, uint32_t (&own)[32], int count, int warp) {
  const int lane = arch::lane_index();
  if (lane == 0) arch::mbarrier_arrive_expect_tx(s.receive_full[warp], PairConfig::kPartialOfWarp);
  arch::syncwarp();  // kept: a lane has diverged
  arch::mbarrier_wait(s.receive_full[warp], uint32_t(count & 1));
  HOPWELL_UNROLL
  for (int v = 0; v < 8; ++v) {
    const arch::Words4 came = arch::load_shared_v4(arch::shared_address(&s.receive_buffer[warp][v][lane]));
    HOPWELL_UNROLL
    for (int i = 0; i < 4; ++i)
      own[4 * v + i] =
          arch::bit_cast<uint32_t>(arch::bit_cast<float>(own[4 * v + i]) + arch::bit_cast<float>(came.w[i]));
  }
  arch::fence_proxy_async();  // a relaxed arrival does not wait for loads
  arch::syncwarp();
  if (lane == 0) arch::mbarrier_arrive_cluster_relaxed(at_peer(&s.receive_empty[warp]));
  arch::syncwarp();  // kept: a lane has diverged
}

// Loads a head's 64 keys of a partial accumulator: this CTA's keys and the peer's.
HOPWELL_DEVICE void load_partial(uint32_t (&own)[32], uint32_t (&theirs)[32], uint32_t address, uint32_t own_keys,
                                 uint32_t parity, arch::mbarrier& full, arch::mbarrier& empty,
                                 arch::Site site = arch::Site::current()) {
  tile::wait_tensor_memory(full, parity, site);
  arch::tmem_load<arch::TmemShape::b32x32>(theirs, address + (PairConfig::kOwnKeys - own_keys), site);
  arch::tmem_load<arch::TmemShape::b32x32>(own, address + own_keys, site);
  arch::tmem_wait_load(theirs, site);
  arch::pin_registers(own);
  arch::tcgen05_fence_before_thread_sync(site);
  arch::mbarrier_arrive(empty, site);
}

// Sends a warp's part of P and dS to the other CTA.
template <int kDqk>
HOPWELL_DEVICE void send_p_and_ds(PairStorage<kDqk>& s, int warp) {
  const uint32_t rank = arch::cluster_rank(), offset = PairConfig::kHalfOfWarp * uint32_t(warp);
  arch::fence_proxy_async();
  arch::syncwarp();
  if (arch::lane_index() == 0) {
    const uint32_t full = at_peer(&s.ds_full);
    arch::bulk_copy_to_cta(at_peer(s.p[rank]) + offset, arch::shared_address(s.p[rank]) + offset,
                           PairConfig::kHalfOfWarp, full);
    arch::bulk_copy_to_cta(at_peer(s.ds[rank]) + offset, arch::shared_address(s.ds[rank]) + offset,
                           PairConfig::kHalfOfWarp, full);
    arch::mbarrier_arrive_expect_tx(s.ds_full, 2 * PairConfig::kHalfOfWarp);
  }
  arch::syncwarp();  // kept: a lane has diverged
}

// Softmax of a thread's head and this CTA's 32 keys.
template <bool kAttn, int kDqk>
HOPWELL_DEVICE void softmax(const Params& p, PairStorage<kDqk>& s, const WorkTile& work, const Entries& entries) {
  const int warp = arch::warp_index() % 4, row = 32 * warp + arch::lane_index(), steps = entries.tiles(Config::kKeys);
  const HeadValues<64>& heads = s.heads[row / 64];
  const float lse_log2 = heads.lse_log2[row % 64], sink_scale = kAttn ? heads.sink_scale[row % 64] : 1,
              delta = heads.delta[row % 64];
  const uint32_t tmem = arch::tmem_address(s.tmem, 32 * warp, 0), rank = arch::cluster_rank(),
                 own_keys = PairConfig::kOwnKeys * rank, tmem_ds = tmem + PairTmem::kDs + own_keys / 2;
  const uint32_t shared_p = arch::shared_address(s.p[rank]), shared_ds = arch::shared_address(s.ds[rank]);
  for (int step = 0; step < steps; ++step) {
    const uint32_t parity = uint32_t(step & 1);
    uint32_t own[32], own_dp[32], theirs[32];
    float probability[32];
    load_partial(own, theirs, tmem + PairTmem::kS, own_keys, parity, s.s_full, s.s_empty);
    send_partial(s, theirs, 2 * step, warp);
    add_partial(s, own, 2 * step, warp);
    load_partial(own_dp, theirs, tmem + PairTmem::kDp, own_keys, parity, s.dp_full, s.dp_empty);
    send_partial(s, theirs, 2 * step + 1, warp);
    exponentiate(probability, own, p.scale_log2, lse_log2);  // during the exchange
    if constexpr (kAttn) add_attn(p, probability, work, entries, step * Config::kKeys + int(own_keys));
    add_partial(s, own_dp, 2 * step + 1, warp);
    arch::mbarrier_wait(s.ds_empty, parity ^ 1);
    if (PairStorage<kDqk>::kNarrow && has_sums(p)) arch::mbarrier_wait(s.last_dkv_empty, parity ^ 1);
    arch::tcgen05_fence_after_thread_sync();
    HOPWELL_UNROLL
    for (int v = 0; v < 4; ++v) {
      const uint32_t at = tile::swizzled_narrow(row, v);
      const arch::Words4 ds = store_p_and_ds(probability + 8 * v, own_dp + 8 * v, sink_scale, p.sm_scale, delta,
                                             shared_p + at, shared_ds + at);
      arch::tmem_store<arch::TmemShape::b32x32>(tmem_ds + 4 * uint32_t(v), ds.w);
    }
    arch::tmem_wait_store();
    arch::tcgen05_fence_before_thread_sync();
    send_p_and_ds(s, warp);
  }
}

template <int kDqk>
HOPWELL_DEVICE void store_dq_tile(const Params& p, PairStorage<kDqk>& s, const WorkTile& work, int steps) {
  if (!p.dq) return;
  const int quarter = arch::warp_index() % 4, rank = int(arch::cluster_rank());
  const DqRow row = dq_row<PairConfig::kHeads>(p, work, 32 * quarter + arch::lane_index(), kDqk);
  if (steps == 0) return store_no_dq(row, rank * (kDqk / 2), (rank + 1) * (kDqk / 2));
  tile::wait_tensor_memory(s.dq_full, 0);
  const uint32_t tmem = arch::tmem_address(s.tmem, 32 * quarter, PairTmem::kDq);
  store_dq<PairConfig::kColumns>(row, PairConfig::kColumns * rank, tmem);
  if constexpr (PairStorage<kDqk>::kNarrow) store_dq<32>(row, kDv + 32 * rank, tmem + PairConfig::kColumns);
  arch::tcgen05_fence_before_thread_sync();
}

// ---- dKV

// The columns of keys that are not values.
template <bool kFixed, int kDqk>
HOPWELL_DEVICE void add_last_columns(const Params& p, PairStorage<kDqk>& s, const Entries& entries, int step,
                                     uint32_t tmem) {
  const EntryKeys keys{entries, step * Config::kKeys};
  const SumRows<kFixed> rows = load_sum_rows<kDqk, kFixed>(p, keys, 32 * (arch::warp_index() % 4) + arch::lane_index());
  uint32_t loaded[16];
  tile::wait_tensor_memory(s.last_dkv_full, uint32_t(step & 1));
  tile::load_tensor_memory<arch::TmemShape::b16x256>(loaded, tmem + PairTmem::kLastDkv);
  arch::tcgen05_fence_before_thread_sync();
  arch::mbarrier_arrive(s.last_dkv_empty);
  add_loaded<kFixed>(p, loaded, kDv + 32 * int(arch::cluster_rank()), rows);
}

template <bool kFixed, int kDqk>
HOPWELL_DEVICE void scatter(const Params& p, PairStorage<kDqk>& s, const Entries& entries) {
  const int quarter = arch::warp_index() % 4, half = quarter / 2, steps = entries.tiles(Config::kKeys);
  const int rank = int(arch::cluster_rank());
  const uint32_t tmem = arch::tmem_address(s.tmem, 32 * quarter, 0);
  for (int step = 0; step < steps; ++step) {
    SumRows<kFixed> rows[2];
    load_group_rows<kDqk>(rows, p, entries, step, 2 * (quarter & 1));
    HOPWELL_NO_UNROLL
    for (int chunk = 0; chunk < 2; ++chunk) {
      tile::wait_tensor_memory(s.dkv_full, uint32_t(chunk));
      add_accumulator<kFixed, 64>(p, rows, tmem + PairTmem::kDkv, s.dkv_empty,
                                  PairConfig::kColumns * rank + 128 * chunk + 64 * half);
      if (PairStorage<kDqk>::kNarrow && chunk == 0) add_last_columns<kFixed>(p, s, entries, step, tmem);
    }
  }
}

// ---- before the first step

template <int kDqk>
HOPWELL_DEVICE void init_barriers(PairStorage<kDqk>& s) {
  tile::init_barriers(1, s.keys_full, s.keys_empty, s.narrow_full, s.narrow_empty, s.receive_full, s.receive_empty,
                      s.s_full, s.dp_full, s.dkv_full, s.last_dkv_full, s.dq_full);
  tile::init_barriers(128, s.s_empty, s.dp_empty, s.dkv_empty, s.last_dkv_empty);  // kept: as in single.hpp
  arch::mbarrier_init(s.ds_full, 4);
  arch::mbarrier_init(s.ds_empty, 2);
  arch::fence_mbarrier_init();  // kept: the fence that follows the copies of rows replaces it
}

// Sends the values of this CTA's 64 heads to the other CTA.
template <int kDqk>
HOPWELL_DEVICE void share_heads(PairStorage<kDqk>& s) {
  const uint32_t rank = arch::cluster_rank();
  const auto* values = reinterpret_cast<const uint32_t*>(&s.heads[rank]);
  for (int i = arch::thread_index(); i < int(sizeof(HeadValues<64>) / 4); i += Config::kThreads)
    arch::store_cluster(at_peer(values + i), values[i]);
}

// Loads Q and dO and computes the heads' values. Returns the entries up to the last valid one.
template <int kDqk, bool kAttn>
HOPWELL_DEVICE Entries prepare(const Params& p, PairStorage<kDqk>& s, const WorkTile& work) {
  constexpr int kPanels = PairConfig::kPanels;
  Entries entries = entries_of(p, work);
  const int warp = arch::warp_index(), rank = int(arch::cluster_rank()), heads = p.h_q - work.first_head;
  arch::cluster_arrive_relaxed();
  int batch[kEntryBatch];
  load_entries<Config::kThreads>(batch, entries, arch::thread_index());
  load_heads<128, kPanels, PairStorage<kDqk>::kNarrow>(
      arch::shared_address(s.q), p.q + work.query * p.q_stride_s + work.first_head * p.q_stride_h, p.q_stride_h, heads,
      PairConfig::kColumns * rank, arch::shared_address(s.narrow_q), kDv + 32 * rank);
  load_heads<128, kPanels>(arch::shared_address(s.d_out),
                           p.d_out + work.query * p.d_out_stride_s + work.first_head * p.d_out_stride_h,
                           p.d_out_stride_h, heads, PairConfig::kColumns * rank);
  arch::cp_async_commit();
  if (warp == 0 && arch::elect_one()) init_barriers(s);
  arch::syncwarp();  // kept: a lane has diverged
  if (role_of(warp) == Role::issue) s.tmem.allocate();
  WorkTile own = work;
  own.first_head += 64 * rank;
  prepare_heads<kAttn, Config::kWarps>(p, s.heads[rank], own);
  find_last_valid(s.last_valid, batch, entries);
  arch::syncthreads();
  arch::cluster_wait();  // the other CTA has started
  share_heads(s);
  arch::cp_async_wait<0>();
  arch::fence_proxy_async();
  arch::cluster_sync();
  entries.length = length_of(s.last_valid);
  return entries;
}

#endif

template <int kDqk, bool kFixed, bool kAttn>
__global__ void __launch_bounds__(Config::kThreads, 1)
    sparse_mla_bwd_sm100_pair(const __grid_constant__ GatherParams p) {
#if HOPWELL_HAS_SM100A
  auto& s = arch::dynamic_smem<PairStorage<kDqk>>();
  const WorkTile work = work_tile_of(p, arch::block_index() / 2, PairConfig::kHeads);
  const Entries entries = prepare<kDqk, kAttn>(p, s, work);
  run_role<kFixed, kAttn>(p, s, work, entries);
  arch::cluster_sync();  // no exchange is in flight any more
  if (role_of(arch::warp_index()) == Role::issue) s.tmem.free();
#endif
}

}  // namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET
