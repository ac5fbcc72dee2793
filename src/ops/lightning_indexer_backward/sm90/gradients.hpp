// lightning_indexer_backward for Hopper: dq, dw, and what each query adds to dk.
//
//     dq_j = w_j Σ_i (positive_ij g_i) k_i        dk_i += g_i Σ_j (positive_ij w_j) q_j        dw_j = Σ_i g_i relu(q_j · k_i)
//
// Tile      a CTA has a query and 64 of its heads; 64 entries a step
// Roles     warpgroup 0      heads    q k^T, 64 heads × 64 entries; dq, 64 × 128, in registers; dw
//           warpgroups 1, 2  entries  k q^T, 64 entries × 64 heads, of tiles by turns; dk of the tile
//           warp 12          gather   keys, g and its limbs of 64 entries, six tiles in turn
// Products  The factors in brackets are what is in limbs: g_i or w_j where the product is positive, 0 elsewhere, is one
//           bitwise `and` for each two, from a score's place among accumulators to the same place in an A fragment. k and q are
//           B as they came. So nothing goes through shared memory between the products.
// Timeline  gather     K4 ▒▒▒▒│ K5 ▒▒▒▒│ …
//           heads      S0 ▓▓ and dQ0 ▓▓▓▓▓▓ │ S1 ▓▓ …            products of one warpgroup under what the others do between
//           entries 1    S0' ▓▓ and dK0 ▓▓▓▓▓▓ stage │ S2' …     rows of dk to shared memory, added by the copy engine while
//           entries 2         S1' ▓▓ and dK1 ▓▓▓▓▓▓ stage │ …    the next tile is made
// Budget    shared: q 16,384 + 6 × (16,384 rows + 896 entries) + 96 of barriers + 8 × 8,704 rows of dk + 640, 191,488 B with gaps
//           registers: heads 64 of dq + 32 scores + 48 of A (160); entries 64 of dk + 48 of A, 32 scores before (152); gather 48
// Bound     tensor cores: 2 × (1 + 3 limbs) × 64 × 64 × 128, 2,048 clocks a tile; adds 32 KB a tile
#pragma once

#include "arch/sm90/bulk_copy.hpp"
#include "ops/lightning_indexer_backward/sm90/entries.hpp"

namespace hopwell::ops::lightning_indexer_backward::HOPWELL_TARGET {

struct GradientConfig {
  static constexpr int kThreads = 512, kHeadRegisters = 160, kEntryRegisters = 152, kOtherRegisters = 48;
};

// What one warp adds to dk: rows of 16 entries, of which the copy engine adds each to its key's.
struct StagedRows {
  static constexpr int kPitch = 544;  // 512 and 32: stores of a half warp meet all banks
  alignas(16) unsigned char rows[16][kPitch];

  // Before it is written again.
  HOPWELL_DEVICE void wait() const {
    arch::bulk_wait_read<0>();
    arch::syncwarp();
  }
  // Two neighbouring columns of this lane's rows, g and g + 8.
  template <class T>
  HOPWELL_DEVICE void store(int half, int column, T low, T high) {
    struct alignas(2 * sizeof(T)) Pair {
      T low, high;
    };
    *reinterpret_cast<Pair*>(rows[8 * half + arch::lane_index() / 4] + column * int(sizeof(T))) = {low, high};
  }
  // Lane l, whose row has a key, adds row l.
  template <class T>
  HOPWELL_DEVICE void add(bool exists, T* to, int columns) const {
    arch::fence_proxy_async();
    arch::syncwarp();
    if (exists)
      arch::bulk_reduce_add(to, arch::shared_address(rows[arch::lane_index() % 16]),
                            uint32_t(columns) * uint32_t(sizeof(T)));
    arch::bulk_commit();
  }
};

struct GradientStorage {
  alignas(1024) unsigned char q[kTileBytes];
  EntryRing<6> ring;
  StagedRows staged[8];
  float weights[kHeadTile];
  uint32_t weight_limbs[kGradientLimbs][kHeadTile / 2];  // bf16, of two neighbours
};

// A of 64 × 64 in limbs, as fragments: step, register.
struct MaskedLimbs {
  uint32_t fragment[kGradientLimbs][4][4];
};

// The numbers of two neighbouring columns where their scores are positive, or all of them; `limbs` are those of 32 pairs. Accumulators of
// 16 columns, two blocks of eight, are where a fragment has its halves.
template <bool kRelu>
HOPWELL_DEVICE MaskedLimbs mask_limbs(const float (&scores)[32], const uint32_t (&limbs)[kGradientLimbs][32]) {
  MaskedLimbs a;
  const int t = arch::lane_index() % 4;
  HOPWELL_UNROLL
  for (int block = 0; block < 8; ++block) {
    HOPWELL_UNROLL
    for (int half = 0; half < 2; ++half) {
      const float low = scores[4 * block + 2 * half], high = scores[4 * block + 2 * half + 1];
      const uint32_t mask = (!kRelu || low > 0 ? 0xffffU : 0) | (!kRelu || high > 0 ? 0xffff0000U : 0);
      HOPWELL_UNROLL
      for (int limb = 0; limb < kGradientLimbs; ++limb)
        a.fragment[limb][block / 2][block % 2 * 2 + half] = mask & limbs[limb][4 * block + t];
    }
  }
  return a;
}

// d (+)= A · the rows of a tile, 64 × 128. Small limbs first.
HOPWELL_DEVICE void multiply_rows(float (&d)[64], const MaskedLimbs& a, uint32_t rows, bool accumulate) {
  constexpr arch::WgmmaOptions kOptions{.b_major = arch::Major::mn};
  const uint64_t b = arch::at_address(tile::kRowsAcrossK, rows);
  arch::wgmma_fence();  // kept: A and the sums are registers that the thread itself wrote
  HOPWELL_UNROLL
  for (int limb = kGradientLimbs - 1; limb >= 0; --limb) {
    HOPWELL_UNROLL
    for (int step = 0; step < 4; ++step)
      arch::wgmma_rs<kOptions>(d, a.fragment[limb][step], b + (uint32_t(step) * 16 * 128 >> 4),
                               accumulate || limb < kGradientLimbs - 1 || step > 0);
  }
  arch::wgmma_commit();
}

// ---- heads ------------------------------------------------------------------------------------------------------------

// d_q and d_weights of a head, which stands in one of a thread's two rows, `half`; t: the thread's place in its quad.
HOPWELL_DEVICE void store_head(const Params<bf16>& p, const float& weight, int query, int head, int half, int t,
                               const float (&d_q)[64], const float (&d_weights)[2]) {
  const float d_weight = tile::sum_of_quad(d_weights[half]);
  const float nan_or_0 = d_weight != d_weight ? d_weight : 0;  // g is NaN, so is its product with a mask of 0
  if (head >= p.heads) return;
  const int64_t at = query * p.d_weights_stride + head;
  if (t == 0 && p.weights_bf16) static_cast<bf16*>(p.d_weights)[at] = arch::to_bf16(d_weight);
  if (t == 0 && !p.weights_bf16) static_cast<float*>(p.d_weights)[at] = d_weight;
  bf16* to = p.d_q + query * p.d_q_stride_s + head * p.d_q_stride_h;
  HOPWELL_UNROLL
  for (int i = 0; i < 32; ++i) {
    const int column = i / 2 * 8 + 2 * t + i % 2;
    if (column < p.columns) to[column] = arch::to_bf16(weighted(weight, d_q[i / 2 * 4 + 2 * half + i % 2]) + nan_or_0);
  }
}

HOPWELL_DEVICE void store_heads(const Params<bf16>& p, const GradientStorage& s, int query, int first,
                                const float (&d_q)[64], const float (&d_weights)[2]) {
  const int lane = arch::lane_index();
  HOPWELL_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int row = arch::warp_index() % 4 * 16 + 8 * half + lane / 4;
    store_head(p, s.weights[row], query, first + row, half, lane % 4, d_q, d_weights);
  }
}

template <bool kRelu>
HOPWELL_DEVICE void accumulate_heads(const Params<bf16>& p, GradientStorage& s, int query, int first, int tiles) {
  const int lane = arch::lane_index(), t = lane % 4;
  const uint32_t q = arch::shared_address(s.q);
  float d_q[64] = {}, d_weights[2] = {0, 0};
  HOPWELL_NO_UNROLL
  for (int tile = 0; tile < tiles; ++tile) {
    const EntrySlot<decltype(s.ring)> slot{s.ring, tile};
    float scores[32];
    slot.wait_full();
    arch::fence_proxy_async();
    start_scores(scores, q, slot.rows());
    arch::wgmma_wait<0>(scores);
    HOPWELL_UNROLL
    for (int i = 0; i < 32; ++i) {  // of an entry that there is not the product may be NaN
      const int entry = i / 4 * 8 + 2 * t + i % 2;
      const float dot = kRelu ? fmaxf(scores[i], 0) : slot.entries().key[entry] < 0 ? 0 : scores[i];
      d_weights[i / 2 % 2] += slot.entries().g[entry] * dot;
    }
    multiply_rows(d_q, mask_limbs<kRelu>(scores, slot.entries().g_limbs), slot.rows(), true);
    arch::wgmma_wait<0>(d_q);
    slot.release();
  }
  store_heads(p, s, query, first, d_q, d_weights);
}

// ---- entries ----------------------------------------------------------------------------------------------------------

// Deterministic sums: multiples of the keys' units, 64 columns at a time. keys: of this lane's rows; `key`: of the row that
// it adds, −1: none.
HOPWELL_DEVICE void add_fixed(const Params<bf16>& p, StagedRows& staged, const int (&keys)[2], int key,
                              const float (&g)[2], const float (&d_k)[64]) {
  constexpr int kTogether = 64;
  const auto bound = [&](int of) { return bound_of(p.bounds.largest[of], p.bounds.count[of]); };
  const bool adds = key >= 0 && bound(key) < INFINITY;
  double scale[2];
  HOPWELL_UNROLL
  for (int half = 0; half < 2; ++half)
    scale[half] = keys[half] < 0 ? 0 : tile::wide_power_of_two(tile::unit_exponent<tile::kWideBits>(bound(keys[half])));
  HOPWELL_UNROLL
  for (int first = 0; first < 2 * kTogether; first += kTogether) {
    if (first >= p.columns) break;
    staged.wait();
    HOPWELL_UNROLL
    for (int i = 0; i < 16; ++i) {
      const int half = i % 2, block = first / 8 + i / 2;
      const auto fixed = [&](float x) { return tile::to_wide_fixed(g[half] * x, scale[half]); };
      staged.store(half, i / 2 * 8 + arch::lane_index() % 4 * 2, fixed(d_k[4 * block + 2 * half]),
                   fixed(d_k[4 * block + 2 * half + 1]));
    }
    staged.add(adds, p.fixed_d_k + int64_t{key} * p.columns + first,
               p.columns - first < kTogether ? p.columns - first : kTogether);
  }
}

HOPWELL_DEVICE void add_tile(const Params<bf16>& p, StagedRows& staged, const int (&keys)[2], int key,
                             const float (&g)[2], const float (&d_k)[64]) {
  if (p.fixed_d_k) return add_fixed(p, staged, keys, key, g, d_k);
  staged.wait();
  HOPWELL_UNROLL
  for (int i = 0; i < 32; ++i)
    staged.store(i % 2, i / 2 * 8 + arch::lane_index() % 4 * 2, g[i % 2] * d_k[2 * i], g[i % 2] * d_k[2 * i + 1]);
  staged.add(key >= 0, p.d_k + key * p.d_k_stride, p.columns);
}

// Of every second tile, so that a stage always has tiles of one of the two warpgroups.
template <bool kRelu>
HOPWELL_DEVICE void accumulate_entries(const Params<bf16>& p, GradientStorage& s, int first_tile, int tiles) {
  const uint32_t q = arch::shared_address(s.q);
  HOPWELL_NO_UNROLL
  for (int tile = first_tile; tile < tiles; tile += 2) {
    const EntrySlot<decltype(s.ring)> slot{s.ring, tile};
    float scores[32], d_k[64];
    slot.wait_full();
    arch::fence_proxy_async();
    start_scores(scores, slot.rows(), q);
    const int lane = arch::lane_index(), first = arch::warp_index() % 4 * 16;
    const EntryTile& entries = slot.entries();
    const int keys[2] = {entries.key[first + lane / 4], entries.key[first + 8 + lane / 4]};
    const float g[2] = {entries.g[first + lane / 4], entries.g[first + 8 + lane / 4]};
    const int key = lane < 16 ? entries.key[first + lane] : -1;
    arch::wgmma_wait<0>(scores);
    slot.release();
    multiply_rows(d_k, mask_limbs<kRelu>(scores, s.weight_limbs), q, false);
    arch::wgmma_wait<0>(d_k);
    add_tile(p, s.staged[arch::warp_index() - 4], keys, key, g, d_k);
  }
  arch::bulk_wait<0>();  // the rows stay until they have been read
}

// ---- kernel -----------------------------------------------------------------------------------------------------------

// A CTA for each query and 64 of its heads.
template <bool kRelu>
__global__ void __launch_bounds__(GradientConfig::kThreads, 1) add_gradients(const __grid_constant__ Params<bf16> p) {
#if HOPWELL_HAS_SM90A
  auto& s = arch::dynamic_smem<GradientStorage>();
  const int parts = (p.heads + kHeadTile - 1) / kHeadTile;
  const int query = arch::block_index() / parts, first = arch::block_index() % parts * kHeadTile;
  const tile::Entries entries = tile::entries_of(p.selection, query);
  if (arch::thread_index() == 0) {
    s.ring.barriers.init(kEntryArrivals, 8);
    arch::fence_mbarrier_init();
  }
  load_heads(p, s.q, s.weights, query, first, GradientConfig::kThreads);
  arch::syncthreads();
  if (arch::thread_index() < kHeadTile)
    store_limbs(s.weight_limbs, arch::thread_index(), s.weights[arch::thread_index()]);
  arch::syncthreads();
  const int group = arch::warpgroup_index(), warp = arch::warp_index();
  if (group == 0) {
    arch::setmaxnreg_inc<GradientConfig::kHeadRegisters>();
    accumulate_heads<kRelu>(p, s, query, first, entry_tiles(entries));
  } else if (group < 3) {
    arch::setmaxnreg_inc<GradientConfig::kEntryRegisters>();
    accumulate_entries<kRelu>(p, s, group - 1, entry_tiles(entries));
  } else {
    arch::setmaxnreg_dec<GradientConfig::kOtherRegisters>();
    if (warp == 12) gather_tiles<true>(p, s.ring, query, entries, 0);
    arch::cp_async_wait_all();  // no thread leaves before its copies
  }
#endif
}

}  // namespace hopwell::ops::lightning_indexer_backward::HOPWELL_TARGET
