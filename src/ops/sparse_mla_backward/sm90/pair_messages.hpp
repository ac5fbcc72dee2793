// sparse_mla_backward for 128 heads on a cluster of two CTAs (pair.hpp): shared memory of a CTA, and the DSMEM exchange
// (here `messages`) between the two.
//
// Partial S, partial dP   warpgroup 1 → peer's warpgroup 0, 16,384 B each, into `receive_buffer`
// P, dS                   warpgroup 0 → all of the peer, 8,192 B each, into p[1] and ds[1]
//
// An mbarrier of the receiver counts the bytes. Arrivals at the peer only tell it that a buffer may be overwritten, so
// they are relaxed: a release at cluster scope would wait for all additions in flight (a tenth of the total time). A
// relaxed arrival waits for nothing, not even for loads: if threads have read the buffer, a fence precedes it.
#pragma once

#include "arch/sm90/bulk_copy.hpp"
#include "ops/sparse_mla_backward/sm90/tile.hpp"

namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET {

struct PairConfig {
  static constexpr int kHeads = 2 * Config::kHeads, kColumns = kDv / 2, kPanels = kColumns / 64;
  // Of a lane's 8 vectors of a partial sum: number staged, and for S number staged in a tile. The others use st.async.
  static constexpr int kStaged = 2, kStagedInTile = 4;
  static constexpr uint32_t kPartialBytes = 4 * 64 * 64, kPdsBytes = 2 * tile::kPanelBytes;
};

struct HalfPanel {
  alignas(1024) bf16 x[64][32];
};

// Index 0 of two: the heads that this CTA completes; 1: the peer's heads.
struct PairStorage {
  Panel q[2][PairConfig::kPanels], d_out[2][PairConfig::kPanels], keys[PairConfig::kPanels], p[2], ds[2];
  HalfPanel q_rope[2], keys_rope;
  arch::Words4 receive_buffer[4][8][32];           // the peer's partial sums: [warp][vector][lane]
  arch::Words4 stage[4][PairConfig::kStaged][32];  // ours, outgoing; more of S is in p[0]
  HeadValues<Config::kHeads> heads;
  float head_sums[4][Config::kKeys];  // of attn, by warp
  int key[2][Config::kKeys];          // of this step and the next; -1 if invalid
  int last_valid[Config::kWarps];
  Entries entries;                     // read again in every step, to save registers
  arch::mbarrier heads_full;           // Q and dO have arrived by TMA
  arch::mbarrier partial_full;         // the peer's partial sums have arrived
  arch::mbarrier partial_free;         // the peer has read our partial sums
  arch::mbarrier staged_taken;         // the peer has received our partial sums from p[0]
  arch::mbarrier pds_full;             // the peer's P and dS have arrived
  arch::mbarrier pds_free;             // the peer has a free buffer for our P and dS
  arch::mbarrier pds_taken;            // the peer has received our P and dS
  tile::WindowEntries window_entries;  // instead of `entries`, if there are window keys
};
static_assert(sizeof(PairStorage) <= arch::sm90::kMaxSharedBytes);

#if HOPWELL_HAS_SM90A

// The entries of a kernel with parameters P.
template <class P>
HOPWELL_DEVICE typename P::Entries& entries_in(PairStorage& s) {
  if constexpr (std::is_same_v<P, WindowParams>)
    return s.window_entries;
  else
    return s.entries;
}

enum PairBarrier : int {
  kPairKeysFull = 1,
  kPairRopeFree,  // warpgroup 0 has read these keys
  kPairOwnDsFull,
  kPairOwnPRead,   // warpgroup 2 has p[0] in registers
  kPairOwnDsFree,  // … and has read ds[0]
  kPairPeerFirst,  // the peer's S, which must be sent, is complete: the own products may start
  kPairStaged,     // … and its part in p[0] is written
  kPairLowStaged,
  kPairHighStaged
};

// Address of the same object in the other CTA.
HOPWELL_DEVICE uint32_t at_peer(const void* object, uint32_t peer) {
  return arch::map_to_rank(arch::shared_address(object), peer);
}

// Warpgroup 1: sends a partial sum to the peer, kInTile vectors of a lane through p[0]. Bulk copies are three times as
// fast as stores of threads; vectors without a buffer use st.async.
template <int kInTile>
HOPWELL_DEVICE void send_partial(const float (&acc)[32], PairStorage& s, uint32_t parity, uint32_t peer, int t) {
  const int warp = t / 32, lane = t % 32;
  const auto vector = [&acc](int j) {
    return arch::Words4{arch::bit_cast<uint32_t>(acc[4 * j]), arch::bit_cast<uint32_t>(acc[4 * j + 1]),
                        arch::bit_cast<uint32_t>(acc[4 * j + 2]), arch::bit_cast<uint32_t>(acc[4 * j + 3])};
  };
  constexpr int kStaged = PairConfig::kStaged;
  const uint32_t target = at_peer(s.receive_buffer[warp], peer), full = at_peer(&s.partial_full, peer);
  const uint32_t stage = arch::shared_address(s.stage[warp]),
                 tile = arch::shared_address(&s.p[0]) + 512 * kInTile * uint32_t(warp);
  arch::mbarrier_wait(s.partial_free, parity);
  HOPWELL_UNROLL
  for (int j = 0; j < kStaged + kInTile; ++j)
    arch::store_shared_v4(
        (j < kStaged ? stage + uint32_t(512 * j) : tile + uint32_t(512 * (j - kStaged))) + uint32_t(16 * lane),
        vector(j));
  arch::fence_proxy_async();
  arch::syncwarp();
  if (lane == 0) {
    arch::bulk_copy_to_cta(target, stage, 512 * kStaged, full);
    if (kInTile > 0) arch::bulk_copy_to_cta(target + 512 * kStaged, tile, 512 * kInTile, full);
  }
  HOPWELL_UNROLL
  for (int j = kStaged + kInTile; j < 8; ++j)
    arch::store_async_v4(target + uint32_t(512 * j + 16 * lane), vector(j), full);
  arch::syncwarp();  // kept: a lane has diverged
}

// Warpgroup 0: acc += the peer's partial sum. Returns 0, computed from all sums, so that code that uses it runs after
// them. Otherwise the compiler keeps the loaded vectors in registers and spills.
HOPWELL_DEVICE uint32_t add_partial(float (&acc)[32], PairStorage& s, uint32_t parity, int t) {
  if (t == 0) arch::mbarrier_arrive_expect_tx(s.partial_full, PairConfig::kPartialBytes);
  arch::syncwarp();  // kept: a lane has diverged
  arch::mbarrier_wait(s.partial_full, parity);
  const uint32_t source = arch::shared_address(&s.receive_buffer[t / 32][0][t % 32]);
  uint32_t bits = 0;
  HOPWELL_UNROLL
  for (int j = 0; j < 8; ++j) {
    const arch::Words4 theirs = arch::load_shared_v4(source + uint32_t(512 * j));
    HOPWELL_UNROLL
    for (int i = 0; i < 4; ++i) {
      acc[4 * j + i] += arch::bit_cast<float>(theirs.w[i]);
      bits |= arch::bit_cast<uint32_t>(acc[4 * j + i]);
    }
  }
  return bits & arch::cluster_rank() >> 1;  // 0 for two CTAs, which the compiler does not know
}

// Warpgroup 0, after a fence has waited for the loads of a partial sum: lets the peer send the next one. `nothing` is
// 0.
HOPWELL_DEVICE void free_landing(PairStorage& s, uint32_t peer, uint32_t nothing, int t) {
  arch::syncwarp();
  if (t % 32 == 0) arch::mbarrier_arrive_cluster_relaxed(at_peer(&s.partial_free, peer) + nothing);
  arch::syncwarp();  // kept: a lane has diverged
}

// Warpgroup 0, after a warp's rows of P or dS are written and fenced: sends them to the peer, where they belong to its
// other tile.
HOPWELL_DEVICE void send_rows(PairStorage& s, Panel (&tiles)[2], uint32_t peer, int t) {
  constexpr uint32_t kBytes = tile::kPanelBytes / 4;
  const uint32_t offset = kBytes * uint32_t(t / 32);
  if (t % 32 == 0)
    arch::bulk_copy_to_cta(at_peer(&tiles[1], peer) + offset, arch::shared_address(&tiles[0]) + offset, kBytes,
                           at_peer(&s.pds_full, peer));
  arch::syncwarp();  // kept: a lane has diverged
}

#endif  // HOPWELL_HAS_SM90A

}  // namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET
