// sparse_mla_backward on Hopper: the kernel for one query and 128 heads, on a cluster of two CTAs that split the head
// dimension. Formulas, invalid entries and padding heads: single.hpp.
//
// CTA r holds columns [256 r, +256) and [512 + 32 r, +32) of Q, dO and the keys for all 128 heads. So a key is gathered
// once, and its gradient is summed over all heads before it is added to global memory. The price: S and dP are sums of
// both CTAs' products. Each CTA completes one tile of 64 heads and sends the partial sums of the other tile to its
// peer.
//
// Tile      one query, 2 tiles of 64 heads, 64 keys per step. Panels of 64 columns, 128B-swizzled; RoPE 32,
//           64B-swizzled.
// Roles     warpgroup 0  own tile: S → P, dP → dS; dKV of RoPE   │ both: half of dQ's columns for both tiles, the same
//           warpgroup 1  peer's tile: partial S and dP           │ columns of the next keys by cp.async
//           warpgroup 2  the panels of dKV
// Timeline  0   add R │ S ▓▓ │ + theirs, P │ dP ▓▓ │ + theirs, dS │ dQ own ▓▓ theirs ▓▓ │ keys, dKV R ▓▓ │ add R …
//           1   S ▓▓ │ send │ dP ▓▓ │ send │······················│ dQ own ▓▓ theirs ▓▓ │ keys           │ S ▓▓ …
//           2   … dKV of the step before ▓▓ add ▓▓ add ▓▓ add │···················│ dKV 0 ▓▓ add 1 ▓▓ add …
//           R: the RoPE columns of dKV; theirs: the peer's partial sum
// Exchange  over DSMEM: partial S and dP from warpgroup 1 to the peer's warpgroup 0; P and dS back: pair_messages.hpp
// Overlap   the own P(n + 1) is computed while warpgroup 2 adds the results of P and dS(n). For this, warpgroup 2 loads
//           the own P into registers first. p[0] then stages half of the outgoing partial S, and later holds the next
//           P. P and dS are sent when the peer's buffer is free. No tile is free to stage the partial dP, so most of it
//           is sent by st.async: it is not urgent.
// Budget    shared: Q 65,536 + 8,192, dO 65,536, keys 32,768 + 4,096, P and dS 32,768, `receive_buffer`
//           16,384, stage 4,096, others 2,424 = 231,800    (of 232,448)
//           registers: dQ 144 + S or dP 32 + 32 others = 208 in warpgroups 0 and 1, 88 in warpgroup 2 (of 3 · 168)
// Bound     per step and CTA: 5,504 clocks of tensor cores, about 7,200 of shared memory, 4,440 of additions (73,728 B
//           at the 16.6 B per clock that L2 accepts from each of 132 CTAs); 49,152 B to the peer, 36,864 B of keys
#pragma once

#include "ops/sparse_mla_backward/sm90/pair_messages.hpp"

namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET {

#if HOPWELL_HAS_SM90A

template <int kDqk>
constexpr bool kHasRope = kDqk > kDv;

// Work of a CTA of a pair.
struct PairWork {
  WorkTile work;      // of both CTAs
  int first_head[2];  // of its own 64 heads, and of the peer's
  uint32_t rank;
};
template <class P>
HOPWELL_DEVICE PairWork pair_work_of(const P& p) {
  const int rank = int(arch::cluster_rank());
  const WorkTile work = tile_of(p, arch::block_index() / 2, PairConfig::kHeads);
  return {
      work, {work.first_head + rank * Config::kHeads, work.first_head + (1 - rank) * Config::kHeads}, uint32_t(rank)};
}

// ---- keys

// prefetch_dkv_accum: prefetches this half of the CTA's columns of dkv_accum for all 64 keys to L2. A thread prefetches
// one line of 128 bytes of each of its four keys.
template <int kDqk, int kHalf>
HOPWELL_DEVICE void prefetch_columns(const Params& p, const int (&keys)[4], uint32_t rank, int t) {
  const int chunk = t & 7;
  if (chunk >= (kHalf == 0 && kDqk > kDv ? 5 : 4)) return;
  const int line = chunk == 4 ? 16 + int(rank) : 8 * int(rank) + 4 * kHalf + chunk;
  HOPWELL_UNROLL
  for (int m = 0; m < 4; ++m) {
    if (keys[m] < 0) continue;
    arch::prefetch_l2(p.dkv + int64_t{keys[m]} * p.dkv_stride + 32 * line);
  }
}

// Starts the copies of this half of the CTA's columns of 64 keys.
template <int kHalf, class P>
HOPWELL_DEVICE void gather_half(const P& p, PairStorage& s, const int (&keys)[4], int step, uint32_t rank, int t) {
  if constexpr (kHalf == 0) publish_keys(s.key, keys, step, t);
  const int chunk = t & 7;
  HOPWELL_UNROLL
  for (int m = 0; m < 4; ++m) {
    const int bytes = keys[m] < 0 ? 0 : 16;
    const bf16* source = p.kv + (keys[m] < 0 ? 0 : row_offset(p, keys[m])) +
                         (PairConfig::kColumns * int(rank) + 128 * kHalf + 8 * chunk);
    HOPWELL_UNROLL
    for (int panel = 0; panel < 2; ++panel)
      arch::cp_async(arch::shared_address(&s.keys[2 * kHalf + panel]) + tile::swizzled(t / 8 + 16 * m, chunk),
                     source + 64 * panel, bytes);
  }
}
template <class P>
HOPWELL_DEVICE void gather_rope(const P& p, PairStorage& s, const int (&keys)[4], uint32_t rank, int t) {
  const int chunk = t & 7;
  HOPWELL_UNROLL
  for (int m = 0; m < 4; ++m) {
    if (chunk >= 4) continue;
    const bf16* source = p.kv + (keys[m] < 0 ? 0 : row_offset(p, keys[m])) + (kDv + 32 * int(rank) + 8 * chunk);
    arch::cp_async(arch::shared_address(&s.keys_rope) + tile::swizzled_narrow(t / 8 + 16 * m, chunk), source,
                   keys[m] < 0 ? 0 : 16);
  }
}

// ---- products

// acc [64 heads][64 keys] = Q · keysᵀ over this CTA's columns.
template <int kDqk>
HOPWELL_DEVICE void multiply_s(float (&acc)[32], const PairStorage& s, int tile) {
  multiply_scores<PairConfig::kPanels>(acc, s.q[tile], s.keys);
  if constexpr (kHasRope<kDqk>) {
    const uint64_t left = arch::at_address(tile::kNarrowRowsAlongK, arch::shared_address(&s.q_rope[tile])),
                   right = arch::at_address(tile::kNarrowRowsAlongK, arch::shared_address(&s.keys_rope));
    arch::wgmma_ss(acc, left, right, true);
    arch::wgmma_ss(acc, left + 2, right + 2, true);
  }
}

// dq [64 heads][128 columns] += dS · keys, and the 32 columns of RoPE for one of the two tiles.
template <bool kRope>
HOPWELL_DEVICE void multiply_dq(float (&dq)[64], float (&rope)[16], const DsFragments& ds, const PairStorage& s,
                                int half) {
  multiply_dq<kRope>(dq, rope, ds, s.keys[2 * half],
                     {arch::at_address(tile::kNarrowRowsAcrossK, arch::shared_address(&s.keys_rope)), 64});
}

// ---- warpgroups 0 and 1

// Stages this half's columns in the key buffer (RoPE in `receive_buffer`), one tile at a time, then stores panels by
// TMA, or whole rows.
template <int kDqk, int kHalf>
HOPWELL_DEVICE void store_dq(const Params& p, PairStorage& s, const float (&dq)[2][64], const float (&rope)[16],
                             const PairWork& pair, int t, const HeadMaps& maps) {
  const MatrixLane lane = matrix_lane(t);
  const uint32_t stage_rope = arch::shared_address(s.receive_buffer[2 * kHalf]);
  HOPWELL_UNROLL
  for (int tile = 0; tile < 2; ++tile) {
    if (tile == 1) {
      if (maps.has_dq && t == 0) arch::bulk_wait_read<0>();
      arch::syncwarp();  // kept: a lane has diverged
      arch::barrier_sync(kPairLowStaged + kHalf, 128);
    }
    stage_panels(&s.keys[2 * kHalf], dq[tile], lane);
    if constexpr (kHasRope<kDqk>) {
      HOPWELL_UNROLL
      for (int j = 0; j < 4; j += 2)
        if (tile == kHalf) stage_fragment(stage_rope + tile::swizzled_narrow(lane.row, j + lane.chunk), &rope[4 * j]);
    }
    if (maps.has_dq) arch::fence_proxy_async();
    arch::barrier_sync(kPairLowStaged + kHalf, 128);
    const int heads = p.h_q - pair.first_head[tile];
    bf16* target = p.dq + pair.work.query * p.dq_stride_s + pair.first_head[tile] * p.dq_stride_h;
    if (maps.has_dq && t == 0)
      store_panels(&s.keys[2 * kHalf], 2, maps.dq, PairConfig::kColumns * int(pair.rank) + 128 * kHalf,
                   pair.first_head[tile], pair.work.query);
    arch::syncwarp();  // kept: a lane has diverged
    for (int e = t; !maps.has_dq && e < Config::kHeads * 16 && e / 16 < heads; e += 128) {
      const int row = e / 16, chunk = e % 16;
      arch::store_streaming(
          target + row * p.dq_stride_h + PairConfig::kColumns * int(pair.rank) + 128 * kHalf + 8 * chunk,
          arch::load_shared_v4(arch::shared_address(&s.keys[2 * kHalf + chunk / 8]) + tile::swizzled(row, chunk % 8)));
    }
    if constexpr (kHasRope<kDqk>) {
      for (int e = t; tile == kHalf && e < Config::kHeads * 4 && e / 4 < heads; e += 128)
        arch::store_streaming(target + e / 4 * p.dq_stride_h + kDv + 32 * int(pair.rank) + 8 * (e % 4),
                              arch::load_shared_v4(stage_rope + tile::swizzled_narrow(e / 4, e % 4)));
    }
  }
  if (maps.has_dq && t == 0) arch::bulk_wait_read<0>();
  arch::syncwarp();  // kept: a lane has diverged
}

// Warpgroup 0, until dS of its own tile is complete and sent.
template <int kDqk, bool kAttn>
HOPWELL_DEVICE void compute_own_ds(const Params& p, PairStorage& s, int step, DsFragments& ds) {
  float acc[32];
  arch::barrier_sync(kPairPeerFirst, 256);  // kept: affects timing only
  arch::wgmma_fence();
  multiply_s<kDqk>(acc, s, 0);
  arch::wgmma_commit();
  const int t = arch::thread_index_anew() % 128;
  const uint32_t peer = arch::cluster_rank() ^ 1;
  arch::wgmma_wait<0>(acc);
  const uint32_t nothing = add_partial(acc, s, 0, t);
  arch::fence_proxy_async();
  free_landing(s, peer, nothing, t);
  if (t == 0) arch::mbarrier_arrive_cluster_relaxed(at_peer(&s.staged_taken, peer));
  arch::syncwarp();  // kept: a lane has diverged
  arch::mbarrier_wait(s.staged_taken, step & 1);
  arch::barrier_sync(kPairStaged, 256);
  make_p(p, acc, s.heads, t);
  store_p<kAttn>(acc, s.heads, s.p[0], t);
  arch::fence_proxy_async();
  if constexpr (kAttn) sum_heads(acc, s.head_sums, t);
  arch::wgmma_fence();
  multiply_scores<PairConfig::kPanels>(acc, s.d_out[0], s.keys);
  arch::wgmma_commit();
  arch::wgmma_wait<0>(acc);
  add_partial(acc, s, 1, t);
  if (step > 0) arch::mbarrier_wait(s.pds_free, (step & 1) ^ 1);
  send_rows(s, s.p, peer, t);
  if (step > 0) arch::barrier_sync(kPairOwnDsFree, 256);
  make_ds(p, acc, s.heads, s.p[0], ds, t);
  store_ds(ds, s.ds[0], t);
  arch::fence_proxy_async();
  free_landing(s, peer, 0, t);
  send_rows(s, s.ds, peer, t);
}

// Warpgroup 1: multiplies this CTA's partial S and dP of the peer's tile, and sends them to the peer.
template <int kDqk>
HOPWELL_DEVICE void send_peer_tile(PairStorage& s, int step) {
  float acc[32];
  arch::wgmma_fence();
  multiply_s<kDqk>(acc, s, 1);
  arch::wgmma_commit();
  const int t = arch::thread_index_anew() % 128;
  const uint32_t peer = arch::cluster_rank() ^ 1;
  arch::wgmma_wait<0>(acc);
  if (step > 0) arch::barrier_sync(kPairOwnPRead, 256);
  arch::barrier_arrive(kPairPeerFirst, 256);
  if (t == 0 && step > 0) arch::mbarrier_arrive_cluster_relaxed(at_peer(&s.pds_free, peer));  // dQ has read ds[1]
  arch::syncwarp();  // kept: a lane has diverged
  // The peer has read p[0] and ds[0]. Warpgroup 0 learns it at kPairStaged.
  arch::mbarrier_wait(s.pds_taken, (step & 1) ^ 1);
  send_partial<PairConfig::kStagedInTile>(acc, s, 1, peer, t);
  arch::barrier_arrive(kPairStaged, 256);
  arch::wgmma_fence();
  multiply_scores<PairConfig::kPanels>(acc, s.d_out[1], s.keys);
  arch::wgmma_commit();
  arch::wgmma_wait<0>(acc);
  send_partial<0>(acc, s, 0, peer, t);
}

// Stores dQ of a split.
template <int kDqk, int kHalf>
HOPWELL_DEVICE void store_dq_slices(const Params& p, const float (&dq)[2][64], const float (&rope)[16],
                                    const PairWork& pair, int t) {
  const auto tile_of = [&](int tile) {
    return p.dq_splits + (2 * int64_t{pair.work.split} + (tile ^ int(pair.rank))) * (Config::kHeads * kDqk);
  };
  HOPWELL_UNROLL
  for (int tile = 0; tile < 2; ++tile)
    store_dq_split<kDqk>(tile_of(tile), dq[tile], PairConfig::kColumns * int(pair.rank) + 128 * kHalf, t);
  if constexpr (kHasRope<kDqk>) store_dq_split<kDqk>(tile_of(kHalf), rope, kDv + 32 * int(pair.rank), t);
}

// Half 0: the own tile, and dKV of RoPE. Half 1: the peer's tile. Both: their columns of dQ and of the next keys.
template <int kDqk, int kHalf, bool kAttn, class P>
HOPWELL_DEVICE void score(const P& p, PairStorage& s, const HeadMaps& maps) {
  const typename P::Entries& entries = entries_in<P>(s);
  float dq[2][64] = {}, rope[16] = {};
  for (int step = 0; step * Config::kKeys < entries.length; ++step) {
    DsFragments ds;
    if constexpr (kHalf == 0)
      compute_own_ds<kDqk, kAttn>(p, s, step, ds);
    else
      send_peer_tile<kDqk>(s, step);
    const int t = arch::thread_index_anew() % 128;
    int keys[4];
    load_keys(keys, entries, step + 1, t);
    arch::barrier_sync(kPairOwnDsFull, 256);
    if constexpr (kHalf == 1) load_ds(ds, s.ds[0], t);
    arch::wgmma_fence();  // kept: the emulator does not check register operands
    multiply_dq<kHasRope<kDqk> && kHalf == 0>(dq[0], rope, ds, s, kHalf);
    const uint32_t rank = arch::cluster_rank();
    if (kHalf == 1 && t == 0) arch::mbarrier_arrive_expect_tx(s.pds_full, PairConfig::kPdsBytes);
    arch::syncwarp();  // kept: a lane has diverged
    arch::mbarrier_wait(s.pds_full, step & 1);
    if (kHalf == 1 && t == 0) arch::mbarrier_arrive_cluster_relaxed(at_peer(&s.pds_taken, rank ^ 1));
    arch::syncwarp();  // kept: a lane has diverged
    DsFragments theirs;
    load_ds(theirs, s.ds[1], t);
    arch::wgmma_fence();  // kept: the emulator does not check register operands
    multiply_dq<kHasRope<kDqk> && kHalf == 1>(dq[1], rope, theirs, s, kHalf);
    arch::wgmma_commit();
    arch::wgmma_wait<0>(dq[0], dq[1]);
    arch::pin_registers(rope);
    if constexpr (kAttn && kHalf == 1)
      add_attn(p, s.head_sums, s.key[step % 2], pair_work_of(p).work, entries, step, t);
    const bool last = (step + 1) * Config::kKeys >= entries.length;
    if (!last) {
      gather_half<kHalf>(p, s, keys, step + 1, rank, t);
      if constexpr (kHasRope<kDqk>) {
        if constexpr (kHalf == 0) {
          arch::barrier_arrive(kPairRopeFree, 256);
        } else {
          arch::barrier_sync(kPairRopeFree, 256);
          gather_rope(p, s, keys, rank, t);
          arch::syncwarp();  // kept: lanes have diverged
        }
      }
      arch::cp_async_commit();
      if (p.prefetch_dkv_accum) prefetch_columns<kDqk, kHalf>(p, keys, rank, t);
      arch::syncwarp();  // kept: lanes have diverged
    }
    float acc[16];
    if constexpr (kHalf == 0 && kHasRope<kDqk>) {
      arch::wgmma_fence();  // kept: acc is unchanged, but each batch begins with a fence
      multiply_transposed<4, true>(acc, arch::shared_address(&s.ds[0]), arch::shared_address(&s.q_rope[0]), false);
      multiply_transposed<4, true>(acc, arch::shared_address(&s.ds[1]), arch::shared_address(&s.q_rope[1]), true);
      arch::wgmma_commit();
      arch::wgmma_wait<0>(acc);
    }
    if (!last) {
      arch::cp_async_wait<0>();
      arch::fence_proxy_async();
      arch::barrier_sync(kPairKeysFull, 256);
    }
    if constexpr (kHalf == 0 && kHasRope<kDqk>) {  // overlaps the product of the peer's S, which must be sent first
      add_panel(p, acc, kDv + 32 * int(rank), load_sum_rows<kDqk, false>(p, s.key[step % 2], t));
      arch::syncwarp();  // kept: lanes have diverged
    }
  }
  const int t = arch::thread_index_anew() % 128;
  const PairWork pair = pair_work_of(p);
  if (!p.dq) return;
  if (pair.work.split < 0)
    store_dq<kDqk, kHalf>(p, s, dq, rope, pair, t, maps);
  else
    store_dq_slices<kDqk, kHalf>(p, dq, rope, pair, t);
}

// ---- warpgroup 2

template <int kDqk, class P>
HOPWELL_DEVICE void scatter(const P& p, PairStorage& s, uint32_t rank) {
  const typename P::Entries& entries = entries_in<P>(s);
  const int t = arch::thread_index() % 128;
  const int steps = entries.tiles(Config::kKeys);
  const bool throttled = p.progress && int(arch::block_index()) / 2 < p.whole_tiles;
  uint32_t seen = 0;
  for (int step = 0; step < steps; ++step) {
    const bool last = step + 1 == steps;
    if (throttled) throttle_step<Config::kKeys>(p, 2 * p.whole_tiles, seen, step);
    if (step + 2 == steps) prefetch_next_tile<kDqk, 2>(p, Config::kHeads * int(rank), t);
    arch::syncwarp();                           // kept: throttle_step branches
    arch::mbarrier_wait(s.pds_full, step & 1);  // own P and dS are full too: warpgroup 1 arrives after that
    const SumRows<false> rows = load_sum_rows<kDqk, false>(p, s.key[step % 2], t);
    uint32_t own[4][4], own_ds[2][4];  // P of 64 heads; dS of 32, because more would spill
    load_transposed(own, s.p[0], t);
    load_transposed(own_ds, s.ds[0], t);
    if (!last) arch::barrier_arrive(kPairOwnPRead, 256);
    // Not unrolled, because otherwise the descriptors of all panels stay in registers.
    HOPWELL_NO_UNROLL
    for (int panel = 0; panel < PairConfig::kPanels; ++panel) {
      float acc[32];
      arch::wgmma_fence();
      multiply_fragments(acc, own, across_heads(s.d_out[0][panel]), false);
      multiply_transposed<4>(acc, arch::shared_address(&s.p[1]), arch::shared_address(&s.d_out[1][panel]), true);
      multiply_fragments<4>(acc, own_ds, across_heads(s.ds[0]), across_heads(s.q[0][panel]), true);
      multiply_transposed<4>(acc, arch::shared_address(&s.ds[1]), arch::shared_address(&s.q[1][panel]), true);
      arch::wgmma_commit();
      arch::wgmma_wait<0>(acc);
      if (panel + 1 == PairConfig::kPanels && !last) {
        arch::barrier_arrive(kPairOwnDsFree, 256);
        if (t % 32 == 0) arch::mbarrier_arrive_cluster_relaxed(at_peer(&s.pds_free, rank ^ 1));
        arch::syncwarp();  // kept: a lane has diverged
      }
      add_panel(p, acc, PairConfig::kColumns * int(rank) + 64 * panel, rows);
      arch::syncwarp();  // kept: each addition was a branch
    }
  }
  count_missing_steps<Config::kKeys>(p, throttled, steps, t);
}

// ---- before the first step

// Loads this CTA's columns of Q and dO of 64 heads. only_rope: TMA loads the other columns.
template <int kDqk>
HOPWELL_DEVICE void load_tile(const Params& p, PairStorage& s, const PairWork& pair, int tile, bool only_rope) {
  constexpr int kColumns = PairConfig::kColumns;
  const int rank = int(pair.rank), heads = p.h_q - pair.first_head[tile];
  const int64_t head = heads > 0 ? pair.first_head[tile] : 0;
  const bf16* q = p.q + pair.work.query * p.q_stride_s + head * p.q_stride_h;
  if (!only_rope) {
    load_heads<kColumns>(in_panels(s.q[tile]), q + kColumns * rank, p.q_stride_h, heads);
    load_heads<kColumns>(in_panels(s.d_out[tile]),
                         p.d_out + pair.work.query * p.d_out_stride_s + head * p.d_out_stride_h + kColumns * rank,
                         p.d_out_stride_h, heads);
  }
  if constexpr (kHasRope<kDqk>)
    load_heads<32>(
        [&](int row, int chunk) { return arch::shared_address(&s.q_rope[tile]) + tile::swizzled_narrow(row, chunk); },
        q + kDv + 32 * rank, p.q_stride_h, heads);
}

// Loads Q, dO and the first keys, computes the heads' values, initialises the mbarriers, and finds the last valid
// entry.
template <int kDqk, bool kAttn, class P>
HOPWELL_DEVICE void prepare(const P& p, PairStorage& s, const PairWork& pair, const HeadMaps& maps) {
  typename P::Entries entries = entries_of(p, pair.work);
  const int t = arch::thread_index() % 128, warpgroup = arch::warpgroup_index();
  int keys[4], batch[kEntryBatch];
  load_keys(keys, entries, 0, t);
  load_entries<Config::kThreads>(batch, entries, arch::thread_index());
  WorkTile own = pair.work;
  own.first_head = pair.first_head[0];
  HeadInputs<Config::kHeads, Config::kWarps> inputs;
  load_out(inputs, p, own);
  load_d_out(inputs, p, own);
  if (maps.has_inputs && arch::thread_index() == 0) {
    arch::mbarrier_init(s.heads_full, 1);
    arch::fence_mbarrier_init();
    arch::mbarrier_arrive_expect_tx(s.heads_full, sizeof(s.q) + sizeof(s.d_out));
    const int column = PairConfig::kColumns * int(pair.rank), query = pair.work.query;
    HOPWELL_UNROLL
    for (int tile = 0; tile < 2; ++tile) {
      load_panels(s.q[tile], PairConfig::kPanels, maps.q, column, pair.first_head[tile], query, s.heads_full);
      load_panels(s.d_out[tile], PairConfig::kPanels, maps.d_out, column, pair.first_head[tile], query, s.heads_full);
    }
  }
  arch::syncwarp();  // kept: a lane has diverged
  HOPWELL_UNROLL
  for (int tile = 0; tile < 2; ++tile) load_tile<kDqk>(p, s, pair, tile, maps.has_inputs);
  if (warpgroup == 0) gather_half<0>(p, s, keys, 0, pair.rank, t);
  if (warpgroup == 1) gather_half<1>(p, s, keys, 0, pair.rank, t);
  if (kHasRope<kDqk> && warpgroup == 1) gather_rope(p, s, keys, pair.rank, t);
  arch::cp_async_commit();
  if (arch::thread_index() == 0) {
    arch::mbarrier_init(s.partial_full, 1);
    arch::mbarrier_init(s.partial_free, 4);
    arch::mbarrier_init(s.pds_full, 1);
    arch::mbarrier_init(s.staged_taken, 1);
    // Four warps that add, and a lane that multiplies.
    arch::mbarrier_init(s.pds_free, 5);  // kept: on the emulator any warp releases the reads of wgmma
    arch::mbarrier_init(s.pds_taken, 1);
    arch::fence_mbarrier_init();  // kept: PTX requires it if bulk copies of another CTA complete on them
  }
  arch::syncwarp();  // kept: the lanes converge again; the shuffles below would converge them too
  prepare_heads<kAttn, Config::kWarps>(p, s.heads, own, inputs);
  find_last_valid(s.last_valid, batch, entries);
  arch::cp_async_wait<0>();
  arch::fence_proxy_async();
  arch::cluster_sync();
  if (maps.has_inputs) arch::mbarrier_wait(s.heads_full, 0);
  if (arch::thread_index() == 0) {
    entries.length = length_of(s.last_valid);
    entries_in<P>(s) = entries;
  }
  arch::syncthreads();
}

#endif

// P: Params, or WindowParams for queries with window keys.
template <int kDqk, bool kAttn, class P>
__global__ void __launch_bounds__(Config::kThreads, 1)
    sparse_mla_bwd_sm90_pair(const __grid_constant__ P p, const __grid_constant__ HeadMaps maps) {
#if HOPWELL_HAS_SM90A
  auto& s = arch::dynamic_smem<PairStorage>();
  const PairWork pair = pair_work_of(p);
  prepare<kDqk, kAttn>(p, s, pair, maps);
  const auto role = Role(arch::warpgroup_index());
  if (role == Role::scores_low_columns) {
    arch::setmaxnreg_inc<Config::kScoreRegisters>();
    score<kDqk, 0, kAttn>(p, s, maps);
  } else if (role == Role::scores_high_columns) {
    arch::setmaxnreg_inc<Config::kScoreRegisters>();
    score<kDqk, 1, kAttn>(p, s, maps);
  } else {
    arch::setmaxnreg_dec<Config::kScatterRegisters>();
    scatter<kDqk>(p, s, pair.rank);
  }
  arch::cluster_arrive_relaxed();  // the peer may still arrive at this CTA's mbarriers
  arch::cluster_wait();
#endif
}

// ---- launch

template <class P>
void launch_pairs(const Problem& problem, const Plan& plan, void* workspace, Stream stream) {
  runtime::with_constant<576, 512>(problem.d_qk, [&]<int kDqk>() {
    constexpr std::size_t kBytes = sizeof(PairStorage);
    const P p = further_params_of<P>(problem, plan);
    if (problem.attn && !plan.distribution)
      launch_main<sparse_mla_bwd_sm90_pair<kDqk, true, P>>(problem, plan, workspace, plan.pairs, p, Config::kThreads,
                                                           kBytes, stream, head_maps_of(problem, plan.pairs));
    else
      launch_main<sparse_mla_bwd_sm90_pair<kDqk, false, P>>(problem, plan, workspace, plan.pairs, p, Config::kThreads,
                                                            kBytes, stream, head_maps_of(problem, plan.pairs));
  });
}

}  // namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET
