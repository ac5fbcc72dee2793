// sparse_mla_backward on Hopper: the kernel for a query and 128 heads, on a cluster of two CTAs that split the head
// dimension. Formulas, invalid entries and missing heads: sm90_single.hpp.
//
// CTA r holds columns [256 r, +256) and [512 + 32 r, +32) of Q, dO and the keys for all 128 heads. So a key is gathered
// once, and its gradient is summed over all heads before it is added to global memory. The price: S and dP are sums of
// both CTAs' products. Each CTA finishes one tile of 64 heads; the partial sums of the other tile go to its peer.
//
// Tile      one query, 2 tiles of 64 heads, 64 keys a step. Panels of 64 columns, 128B-swizzled; RoPE 32, 64B-swizzled.
// Roles     warpgroup 0  own tile: S → P, dP → dS; dKV of RoPE   │ both: half of dQ's columns for both tiles, the same
//           warpgroup 1  peer's tile: partial S and dP           │ columns of the next keys by cp.async
//           warpgroup 2  the panels of dKV
// Timeline  0   add R │ S ▓▓ │ + theirs, P │ dP ▓▓ │ + theirs, dS │ dQ own ▓▓ theirs ▓▓ │ keys, dKV R ▓▓ │ add R …
//           1   S ▓▓ │ send │ dP ▓▓ │ send │······················│ dQ own ▓▓ theirs ▓▓ │ keys           │ S ▓▓ …
//           2   … dKV of the step before ▓▓ add ▓▓ add ▓▓ add │···················│ dKV 0 ▓▓ add 1 ▓▓ add …
// Messages  partial S and dP from warpgroup 1 to the peer's warpgroup 0; P and dS from there back: sm90_pair_messages.hpp
// Overlap   the own P(n + 1) is made while warpgroup 2 adds what comes of P and dS(n). So warpgroup 2 takes the own P as
//           fragments at once, p[0] holds first the partial S on its way, then the next P, and both P and dS go to the peer
//           when it has room for them. The partial dP finds no tile free and goes mostly by st.async: it has the time.
// Budget    shared: Q 65,536 + 8,192, dO 65,536, keys 32,768 + 4,096, P and dS 32,768, landing 16,384, stage 4,096,
//           others 2,416 = 231,792    (of 232,448)
//           registers: dQ 144 + S or dP 32 + 32 others = 208 in warpgroups 0 and 1, 88 in warpgroup 2 (of 3 · 168)
// Bound     a step and CTA: 5,504 clocks of tensor cores, about 7,500 of shared memory, 4,440 of additions (73,728 B at
//           the 16.6 B a clock that L2 takes from each of 132 CTAs); 49,152 B to the peer, 36,864 B of keys
#pragma once

#include "ops/sparse_mla_backward/sm90_pair_messages.hpp"
#include "ops/sparse_mla_backward/sm90_prologue.hpp"

namespace hopwell::ops::sparse_mla_backward {
namespace {

#if HOPWELL_HAS_SM90A

template <int kDqk>
constexpr bool kHasRope = kDqk > Config::kDv;

struct PairPlace {
  Place piece;
  int first_head[2];
  uint32_t rank;
};
HOPWELL_DEVICE PairPlace pair_place_of(const Params& p) {
  const int rank = int(arch::cluster_rank());
  const Place place = place_of_block(p, arch::block_index() / 2, PairConfig::kHeads);
  return {place,
          {place.first_head + rank * Config::kHeads, place.first_head + (1 - rank) * Config::kHeads},
          uint32_t(rank)};
}

// ---- keys

// Brings the sums that this half's keys are added to, of this CTA's columns, to L2: 128 bytes a thread.
template <int kDqk, int kHalf>
HOPWELL_DEVICE void prefetch_columns(const Params& p, const int (&keys)[4], uint32_t rank, int t) {
  const int chunk = t & 7;
  if (chunk >= (kHalf == 0 && kDqk > Config::kDv ? 5 : 4)) return;
  const int line = chunk == 4 ? 16 + int(rank) : 8 * int(rank) + 4 * kHalf + chunk;
  HOPWELL_UNROLL
  for (int m = 0; m < 4; ++m) {
    if (keys[m] < 0) continue;
    arch::prefetch_l2(p.dkv + int64_t{keys[m]} * p.dkv_stride + 32 * line);
  }
}

// Starts the copies of this half of the CTA's columns of 64 keys.
template <int kHalf>
HOPWELL_DEVICE void gather_half(const Params& p, PairStorage& s, const int (&keys)[4], int step, uint32_t rank, int t) {
  const int chunk = t & 7;
  HOPWELL_UNROLL
  for (int m = 0; m < 4 && kHalf == 0; ++m)
    if (chunk == m) s.key[step % 2][t / 8 + 16 * m] = keys[m];
  HOPWELL_UNROLL
  for (int m = 0; m < 4; ++m) {
    const int bytes = keys[m] < 0 ? 0 : 16;
    const bf16* source = p.kv + (keys[m] < 0 ? 0 : int64_t{keys[m]} * p.kv_stride) +
                         (PairConfig::kColumns * int(rank) + 128 * kHalf + 8 * chunk);
    HOPWELL_UNROLL
    for (int panel = 0; panel < 2; ++panel)
      arch::cp_async(arch::shared_address(&s.keys[2 * kHalf + panel]) + tile::swizzled(t / 8 + 16 * m, chunk),
                     source + 64 * panel, bytes);
  }
}
HOPWELL_DEVICE void gather_rope(const Params& p, PairStorage& s, const int (&keys)[4], uint32_t rank, int t) {
  const int chunk = t & 7;
  HOPWELL_UNROLL
  for (int m = 0; m < 4; ++m) {
    if (chunk >= 4) continue;
    const bf16* source =
        p.kv + (keys[m] < 0 ? 0 : int64_t{keys[m]} * p.kv_stride) + (Config::kDv + 32 * int(rank) + 8 * chunk);
    arch::cp_async(arch::shared_address(&s.keys_rope) + tile::swizzled_narrow(t / 8 + 16 * m, chunk), source,
                   keys[m] < 0 ? 0 : 16);
  }
}

// ---- products

// acc [64 heads][64 keys] = Q · keysᵀ over this CTA's columns.
template <int kDqk>
HOPWELL_DEVICE void multiply_s(float (&acc)[32], const PairStorage& s, int tile) {
  multiply_scores<PairConfig::kPanels, false>(acc, s.q[tile], s.keys);
  if constexpr (kHasRope<kDqk>) {
    const uint64_t left = arch::at_address(tile::kNarrowRowsAlongK, arch::shared_address(&s.q_rope[tile])),
                   right = arch::at_address(tile::kNarrowRowsAlongK, arch::shared_address(&s.keys_rope));
    arch::wgmma_ss(acc, left, right, true);
    arch::wgmma_ss(acc, left + 2, right + 2, true);
  }
}

// dq [64 heads][128 columns] += dS · keys, and the 32 columns of RoPE for one of the tiles.
template <bool kRope>
HOPWELL_DEVICE void multiply_dq(float (&dq)[64], float (&rope)[16], const PairStorage& s, int tile, int half) {
  constexpr arch::WgmmaOptions kOptions{.b_major = Major::mn};
  const uint64_t ds = arch::at_address(tile::kRowsAlongK, arch::shared_address(&s.ds[tile])),
                 keys = arch::at_address(tile::kRowsAcrossK, arch::shared_address(&s.keys[2 * half])),
                 keys_rope = arch::at_address(tile::kNarrowRowsAcrossK, arch::shared_address(&s.keys_rope));
  HOPWELL_UNROLL
  for (int step = 0; step < 4; ++step) {
    arch::wgmma_ss<kOptions>(dq, ds + uint64_t(2 * step), keys + uint64_t(128 * step), true);
    if constexpr (kRope) arch::wgmma_ss<kOptions>(rope, ds + uint64_t(2 * step), keys_rope + uint64_t(64 * step), true);
  }
}

// acc [64 keys][64 columns] = Pᵀ · a panel of dO, Pᵀ as A fragments in registers, which spares shared memory.
HOPWELL_DEVICE void multiply_p(float (&acc)[32], const uint32_t (&fragments)[4][4], const Panel& d_out) {
  const uint64_t right = arch::at_address(tile::kRowsAcrossK, arch::shared_address(&d_out));
  HOPWELL_UNROLL
  for (int step = 0; step < 4; ++step)
    arch::wgmma_rs<arch::WgmmaOptions{.b_major = Major::mn}>(acc, fragments[step], right + uint64_t(128 * step),
                                                             step > 0);
}

// acc [64 keys][32 columns] (+)= dSᵀ · Q, the columns of RoPE.
HOPWELL_DEVICE void multiply_rope(float (&acc)[16], const PairStorage& s, int tile) {
  const uint64_t left = arch::at_address(tile::kRowsAcrossK, arch::shared_address(&s.ds[tile])),
                 right = arch::at_address(tile::kNarrowRowsAcrossK, arch::shared_address(&s.q_rope[tile]));
  HOPWELL_UNROLL
  for (int step = 0; step < 4; ++step)
    arch::wgmma_ss<arch::WgmmaOptions{.a_major = Major::mn, .b_major = Major::mn}>(
        acc, left + uint64_t(128 * step), right + uint64_t(64 * step), tile > 0 || step > 0);
}

// ---- warpgroups 0 and 1

// Through this half's columns of the key buffer (RoPE through `landing`), a tile at a time, then in rows.
template <int kDqk, int kHalf>
HOPWELL_DEVICE void store_dq(const Params& p, PairStorage& s, const float (&dq)[2][64], const float (&rope)[16],
                             const PairPlace& place, int t) {
  const auto store = [](uint32_t target, const float* x) {
    const uint32_t packed[4] = {arch::pack_bf16(x[0], x[1]), arch::pack_bf16(x[2], x[3]), arch::pack_bf16(x[4], x[5]),
                                arch::pack_bf16(x[6], x[7])};
    arch::stmatrix(target, packed);
  };
  const int own_row = t / 32 * 16 + (t & 15), upper = t >> 4 & 1;
  const uint32_t stage_rope = arch::shared_address(s.landing[2 * kHalf]);
  HOPWELL_UNROLL
  for (int tile = 0; tile < 2; ++tile) {
    if (tile == 1) arch::barrier_sync(kPairHalf0 + kHalf, 128);
    HOPWELL_UNROLL
    for (int j = 0; j < 16; j += 2)
      store(arch::shared_address(&s.keys[2 * kHalf + j / 8]) + tile::swizzled(own_row, j % 8 + upper),
            &dq[tile][4 * j]);
    if constexpr (kHasRope<kDqk>) {
      HOPWELL_UNROLL
      for (int j = 0; j < 4; j += 2)
        if (tile == kHalf) store(stage_rope + tile::swizzled_narrow(own_row, j + upper), &rope[4 * j]);
    }
    arch::barrier_sync(kPairHalf0 + kHalf, 128);
    const int heads = p.h_q - place.first_head[tile];
    bf16* target = p.dq + place.piece.query * p.dq_stride_s + place.first_head[tile] * p.dq_stride_h;
    for (int e = t; e < Config::kHeads * 16 && e / 16 < heads; e += 128) {
      const int row = e / 16, chunk = e % 16;
      arch::store_streaming(
          target + row * p.dq_stride_h + PairConfig::kColumns * int(place.rank) + 128 * kHalf + 8 * chunk,
          arch::load_shared_v4(arch::shared_address(&s.keys[2 * kHalf + chunk / 8]) + tile::swizzled(row, chunk % 8)));
    }
    if constexpr (kHasRope<kDqk>) {
      for (int e = t; tile == kHalf && e < Config::kHeads * 4 && e / 4 < heads; e += 128)
        arch::store_streaming(target + e / 4 * p.dq_stride_h + Config::kDv + 32 * int(place.rank) + 8 * (e % 4),
                              arch::load_shared_v4(stage_rope + tile::swizzled_narrow(e / 4, e % 4)));
    }
  }
}

// Warpgroup 0, until dS of its own tile is there and sent.
template <int kDqk, bool kAttn>
HOPWELL_DEVICE void finish_own_tile(const Params& p, PairStorage& s, int step) {
  float acc[32];
  arch::barrier_sync(kPairPeerFirst, 256);  // kept: only a matter of time
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
  arch::syncwarp();  // kept: a lane branched off
  arch::mbarrier_wait(s.staged_taken, step & 1);
  arch::barrier_sync(kPairStaged, 256);
  store_p<kAttn>(p, acc, s.shift, s.kept, arch::shared_address(&s.p[0]), t);
  arch::fence_proxy_async();
  if constexpr (kAttn) sum_heads(acc, s.head_sums, t);
  arch::wgmma_fence();
  multiply_scores<PairConfig::kPanels, false>(acc, s.d_out[0], s.keys);
  arch::wgmma_commit();
  arch::wgmma_wait<0>(acc);
  add_partial(acc, s, 1, t);
  if (step > 0) arch::mbarrier_wait(s.pds_free, (step & 1) ^ 1);
  send_rows(s, s.p, peer, t);
  if (step > 0) arch::barrier_sync(kPairOwnDsFree, 256);
  store_ds(p, acc, s.delta, arch::shared_address(&s.p[0]), arch::shared_address(&s.ds[0]), t);
  arch::fence_proxy_async();
  free_landing(s, peer, 0, t);
  send_rows(s, s.ds, peer, t);
}

// Warpgroup 1, the same for the peer's tile.
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
  if (t == 0 && step > 0) arch::mbarrier_arrive_cluster_relaxed(at_peer(&s.pds_free, peer));  // no dQ reads ds[1]
  arch::syncwarp();                                  // kept: a lane branched off
  arch::mbarrier_wait(s.pds_taken, (step & 1) ^ 1);  // for warpgroup 0 too
  send_partial<PairConfig::kStagedInTile>(acc, s, 1, peer, t);
  arch::barrier_arrive(kPairStaged, 256);
  arch::wgmma_fence();
  multiply_scores<PairConfig::kPanels, false>(acc, s.d_out[1], s.keys);
  arch::wgmma_commit();
  arch::wgmma_wait<0>(acc);
  send_partial<0>(acc, s, 0, peer, t);
}

// Half 0: the own tile, and dKV of RoPE. Half 1: the peer's. Both: their columns of dQ and of the next keys.
template <int kDqk, int kHalf, bool kAttn>
HOPWELL_DEVICE void score(const Params& p, PairStorage& s) {
  const Entries& entries = s.entries;
  float dq[2][64] = {}, rope[16] = {};
  for (int step = 0; step * Config::kKeys < entries.length; ++step) {
    if constexpr (kHalf == 0)
      finish_own_tile<kDqk, kAttn>(p, s, step);
    else
      send_peer_tile<kDqk>(s, step);
    arch::barrier_sync(kPairOwnDsFull, 256);
    arch::wgmma_fence();  // kept: nothing has touched dq since the fence before S; each batch begins with one
    multiply_dq<kHasRope<kDqk> && kHalf == 0>(dq[0], rope, s, 0, kHalf);
    const int t = arch::thread_index_anew() % 128;
    const uint32_t rank = arch::cluster_rank();
    int keys[4];
    load_keys(keys, entries, step + 1, t);
    if (kHalf == 1 && t == 0) arch::mbarrier_arrive_expect_tx(s.pds_full, PairConfig::kPdsBytes);
    arch::syncwarp();  // kept: a lane branched off
    arch::mbarrier_wait(s.pds_full, step & 1);
    if (kHalf == 1 && t == 0) arch::mbarrier_arrive_cluster_relaxed(at_peer(&s.pds_taken, rank ^ 1));
    arch::syncwarp();     // kept: a lane branched off
    arch::wgmma_fence();  // kept: nothing has touched dq since the fence above; each batch begins with one
    multiply_dq<kHasRope<kDqk> && kHalf == 1>(dq[1], rope, s, 1, kHalf);
    arch::wgmma_commit();
    arch::wgmma_wait<0>(dq[0], dq[1]);
    arch::pin_registers(rope);
    if constexpr (kAttn && kHalf == 1) add_attn(p, s.head_sums, s.key[step % 2], pair_place_of(p).piece, step, t);
    const bool last = (step + 1) * Config::kKeys >= entries.length;
    if (!last) {
      gather_half<kHalf>(p, s, keys, step + 1, rank, t);
      if constexpr (kHasRope<kDqk>) {
        if constexpr (kHalf == 0) {
          arch::barrier_arrive(kPairRopeFree, 256);
        } else {
          arch::barrier_sync(kPairRopeFree, 256);
          gather_rope(p, s, keys, rank, t);
          arch::syncwarp();  // kept: lanes branched off
        }
      }
      arch::cp_async_commit();
      if (p.prefetch) prefetch_columns<kDqk, kHalf>(p, keys, rank, t);
      arch::syncwarp();  // kept: lanes branched off
    }
    float acc[16];
    if constexpr (kHalf == 0 && kHasRope<kDqk>) {
      arch::wgmma_fence();  // kept: nobody has touched acc; each batch begins with one
      multiply_rope(acc, s, 0);
      multiply_rope(acc, s, 1);
      arch::wgmma_commit();
      arch::wgmma_wait<0>(acc);
    }
    if (!last) {
      arch::cp_async_wait<0>();
      arch::fence_proxy_async();
      arch::barrier_sync(kPairKeysFull, 256);
    }
    if constexpr (kHalf == 0 && kHasRope<kDqk>) {  // while the peer's S, which has to travel, is multiplied
      add_panel(p, acc, Config::kDv + 32 * int(rank), load_rows<kDqk, false>(p, s.key[step % 2], t));
      arch::syncwarp();  // kept: lanes branched off
    }
  }
  const int t = arch::thread_index_anew() % 128;
  const PairPlace place = pair_place_of(p);
  if (!p.dq) return;
  if (place.piece.slice < 0) {
    store_dq<kDqk, kHalf>(p, s, dq, rope, place, t);
  } else {
    const auto tile_of = [&](int tile) {
      return p.dq_slices + (2 * int64_t{place.piece.slice} + (tile ^ int(place.rank))) * (Config::kHeads * kDqk);
    };
    HOPWELL_UNROLL
    for (int tile = 0; tile < 2; ++tile)
      store_slice<kDqk>(tile_of(tile), dq[tile], PairConfig::kColumns * int(place.rank) + 128 * kHalf, t);
    if constexpr (kHasRope<kDqk>) store_slice<kDqk>(tile_of(kHalf), rope, Config::kDv + 32 * int(place.rank), t);
  }
}

// ---- warpgroup 2

template <int kDqk>
HOPWELL_DEVICE void scatter(const Params& p, PairStorage& s, uint32_t rank) {
  const Entries& entries = s.entries;
  const int t = arch::thread_index() % 128;
  const int steps = (entries.length + Config::kKeys - 1) / Config::kKeys;
  const bool in_step = p.progress && int(arch::block_index()) / 2 < p.whole;
  uint32_t seen = 0;
  for (int step = 0; step < steps; ++step) {
    const bool last = step + 1 == steps;
    if (in_step) keep_step(p, seen, step);
    arch::syncwarp();                           // kept: keep_step branches
    arch::mbarrier_wait(s.pds_full, step & 1);  // warpgroup 1 arrives only once the own are full
    const Rows<false> rows = load_rows<kDqk, false>(p, s.key[step % 2], t);
    uint32_t own[4][4];
    load_transposed(own, s.p[0], t);
    if (!last) arch::barrier_arrive(kPairOwnPRead, 256);
    // Unrolled, the descriptors of all panels would stay in registers.
    HOPWELL_NO_UNROLL
    for (int panel = 0; panel < PairConfig::kPanels; ++panel) {
      float acc[32];
      arch::wgmma_fence();
      multiply_p(acc, own, s.d_out[0][panel]);
      multiply_transposed<4>(acc, arch::shared_address(&s.p[1]), arch::shared_address(&s.d_out[1][panel]), true);
      multiply_transposed<4>(acc, arch::shared_address(&s.ds[0]), arch::shared_address(&s.q[0][panel]), true);
      multiply_transposed<4>(acc, arch::shared_address(&s.ds[1]), arch::shared_address(&s.q[1][panel]), true);
      arch::wgmma_commit();
      arch::wgmma_wait<0>(acc);
      if (panel + 1 == PairConfig::kPanels && !last) {
        arch::barrier_arrive(kPairOwnDsFree, 256);
        if (t % 32 == 0) arch::mbarrier_arrive_cluster_relaxed(at_peer(&s.pds_free, rank ^ 1));
        arch::syncwarp();  // kept: a lane branched off
      }
      add_panel(p, acc, PairConfig::kColumns * int(rank) + 64 * panel, rows);
      arch::syncwarp();  // kept: each addition was a branch
    }
  }
  // Rows with fewer steps than others count as having made them all.
  const int missing = (p.selection.topk + Config::kKeys - 1) / Config::kKeys - steps;
  if (in_step && t == 0 && missing > 0) arch::red_add(p.progress, uint32_t(missing));
}

// ---- before the first step

// Starts the copies of kColumns columns of 64 heads; zeros beyond h_q.
template <int kColumns, class Target>
HOPWELL_DEVICE void load_columns(Target target, const bf16* source, int64_t stride, int heads) {
  for (int e = arch::thread_index(); e < Config::kHeads * (kColumns / 8); e += Config::kThreads) {
    const int row = e / (kColumns / 8), chunk = e % (kColumns / 8);
    arch::cp_async(target(row, chunk), source + (row < heads ? row : 0) * stride + 8 * chunk, row < heads ? 16 : 0);
  }
}

template <int kDqk>
HOPWELL_DEVICE void load_tile(const Params& p, PairStorage& s, const PairPlace& place, int tile) {
  constexpr int kColumns = PairConfig::kColumns;
  const int rank = int(place.rank), heads = p.h_q - place.first_head[tile];
  const int64_t head = heads > 0 ? place.first_head[tile] : 0;
  const bf16* q = p.q + place.piece.query * p.q_stride_s + head * p.q_stride_h;
  const auto panels = [](const Panel* to) {
    return [to](int row, int chunk) { return arch::shared_address(to + chunk / 8) + tile::swizzled(row, chunk % 8); };
  };
  load_columns<kColumns>(panels(s.q[tile]), q + kColumns * rank, p.q_stride_h, heads);
  load_columns<kColumns>(panels(s.d_out[tile]),
                         p.d_out + place.piece.query * p.d_out_stride_s + head * p.d_out_stride_h + kColumns * rank,
                         p.d_out_stride_h, heads);
  if constexpr (kHasRope<kDqk>)
    load_columns<32>(
        [&](int row, int chunk) { return arch::shared_address(&s.q_rope[tile]) + tile::swizzled_narrow(row, chunk); },
        q + Config::kDv + 32 * rank, p.q_stride_h, heads);
}

// Q, dO, the first keys, what the heads need, the mbarriers, and the entries up to the last valid one.
template <int kDqk, bool kAttn>
HOPWELL_DEVICE void prepare(const Params& p, PairStorage& s, const PairPlace& place) {
  const Entries entries = entries_of(p, place.piece);
  const int t = arch::thread_index() % 128, role = arch::warpgroup_index();
  int keys[4], share[kShare];
  load_keys(keys, entries, 0, t);
  load_share(share, entries, arch::thread_index());
  load_tile<kDqk>(p, s, place, 0);
  load_tile<kDqk>(p, s, place, 1);
  if (role == 0) gather_half<0>(p, s, keys, 0, place.rank, t);
  if (role == 1) gather_half<1>(p, s, keys, 0, place.rank, t);
  if (kHasRope<kDqk> && role == 1) gather_rope(p, s, keys, place.rank, t);
  arch::cp_async_commit();
  if (arch::thread_index() == 0) {
    arch::mbarrier_init(s.partial_full, 1);
    arch::mbarrier_init(s.partial_free, 4);
    arch::mbarrier_init(s.pds_full, 1);
    arch::mbarrier_init(s.staged_taken, 1);
    arch::mbarrier_init(s.pds_free, 5);  // four warps that add, and a lane that multiplies
    arch::mbarrier_init(s.pds_taken, 1);
    arch::fence_mbarrier_init();  // kept: PTX asks for it where another CTA's bulk copies complete on them
  }
  arch::syncwarp();  // kept: the lanes meet again; the shuffles below would make them
  Place own = place.piece;
  own.first_head = place.first_head[0];
  prepare_heads<kAttn>(p, s, own);
  find_last_valid(s.last_valid, share, entries);
  arch::cp_async_wait<0>();
  arch::fence_proxy_async();
  arch::cluster_sync();
  if (arch::thread_index() == 0) s.entries = {entries.row, length_of(s.last_valid), entries.visible};
  arch::syncthreads();
}

#endif

template <int kDqk, bool kAttn>
__global__ void __launch_bounds__(Config::kThreads, 1) pair_kernel(const __grid_constant__ Params p) {
#if HOPWELL_HAS_SM90A
  auto& s = arch::dynamic_smem<PairStorage>();
  const PairPlace place = pair_place_of(p);
  prepare<kDqk, kAttn>(p, s, place);
  const int role = arch::warpgroup_index();
  if (role == 0) {
    arch::setmaxnreg_inc<Config::kScoreRegisters>();
    score<kDqk, 0, kAttn>(p, s);
  } else if (role == 1) {
    arch::setmaxnreg_inc<Config::kScoreRegisters>();
    score<kDqk, 1, kAttn>(p, s);
  } else {
    arch::setmaxnreg_dec<Config::kScatterRegisters>();
    scatter<kDqk>(p, s, place.rank);
  }
  arch::cluster_arrive_relaxed();  // the peer may still arrive at this CTA's mbarriers
  arch::cluster_wait();
#endif
}

}  // namespace
}  // namespace hopwell::ops::sparse_mla_backward
