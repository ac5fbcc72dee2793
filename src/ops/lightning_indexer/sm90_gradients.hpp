// lightning_indexer_backward for Hopper: dq, dw, and what each query adds to dk.
//
//     dq_j = w_j Σ_i (positive_ij g_i) k_i        dk_i += g_i Σ_j (positive_ij w_j) q_j        dw_j = Σ_i g_i relu(q_j · k_i)
//
// Tile      a CTA has a query and 64 of its heads; 64 entries a step
// Roles     warpgroup 0   heads     q k^T, 64 heads × 64 entries; dq, 64 × 128, in registers; dw
//           warpgroup 1   entries   k q^T, 64 entries × 64 heads; dk of the tile, added in global memory
//           warp 8        gather    keys, g and its limbs of 64 entries, six tiles in turn
// Products  The factors in brackets are what is in limbs: g_i or w_j where the product is positive, 0 elsewhere, is one
//           bitwise `and` for each two, from a score's place among accumulators to the same place in an A fragment. k and q are
//           B as they came. So nothing goes through shared memory between the products.
// Timeline  gather    K3 ▒▒▒▒│ K4 ▒▒▒▒│ …
//           heads     S0 ▓▓ and dQ0 ▓▓▓▓▓▓ │ S1 ▓▓ …         products of one warpgroup under what the other does between
//           entries     S0' ▓▓ and dK0 ▓▓▓▓▓▓ add │ S1' …
// Budget    shared: q 16,384 + 6 × (16,384 keys + 896 numbers) + 96 of barriers + 256, 121,856 B with gaps
//           registers: heads 64 of dq + 32 scores + 48 of A + 24 limbs + 16 of g; entries 64 of dk + 32 + 48 + 24 (208); gather 88
// Bound     tensor cores: 2 × (1 + 3 limbs) × 64 × 64 × 128, 2,048 clocks a tile; adds 32 KB a tile
#pragma once

#include "ops/lightning_indexer/sm80_gradients.hpp"
#include "ops/lightning_indexer/sm90_entries.hpp"

namespace hopwell::ops::lightning_indexer_backward {
namespace {

struct HopperGradientConfig {
  static constexpr int kThreads = 384, kMathRegisters = 208, kOtherRegisters = 88;
};

struct HopperGradientStorage {
  alignas(1024) unsigned char q[kTileBytes];
  EntryRing<6> ring;
  float weights[kHeads];
};

// A of 64 × 64 in limbs, as fragments: step, register.
struct MaskedLimbs {
  uint32_t fragment[kGradientLimbs][4][4];
};

// The numbers of two neighbouring columns where their scores are positive. Accumulators of 16 columns, two blocks of
// eight, are where a fragment has its halves.
HOPWELL_DEVICE MaskedLimbs mask_limbs(const float (&scores)[32], const uint32_t (&limbs)[kGradientLimbs][8]) {
  MaskedLimbs a;
  HOPWELL_UNROLL
  for (int i = 0; i < 16; ++i) {  // block i / 2, row half i % 2
    const uint32_t mask = (scores[2 * i] > 0 ? 0xffffU : 0) | (scores[2 * i + 1] > 0 ? 0xffff0000U : 0);
    HOPWELL_UNROLL
    for (int limb = 0; limb < kGradientLimbs; ++limb) a.fragment[limb][i / 4][i % 4] = mask & limbs[limb][i / 2];
  }
  return a;
}

// d (+)= A · the rows of a tile, 64 × 128. Small limbs first.
HOPWELL_DEVICE void multiply_rows(float (&d)[64], const MaskedLimbs& a, uint32_t rows, bool accumulate) {
  constexpr arch::WgmmaOptions kOptions{.b_major = arch::Major::mn};
  const uint64_t b = arch::at_address(kRowsAcrossK, rows);
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

HOPWELL_DEVICE void store_heads(const Params<bf16>& p, const HopperGradientStorage& s, int query, int first,
                                const float (&d_q)[64], const float (&d_weights)[2]) {
  const int lane = arch::lane_index(), t = lane % 4;
  HOPWELL_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int row = arch::warp_index() % 4 * 16 + 8 * half + lane / 4, head = first + row;
    const float d_weight = sum_of_quad(d_weights[half]);
    if (head >= p.heads) continue;
    const int64_t at = query * p.d_weights_stride + head;
    if (t == 0 && p.weights_bf16) static_cast<bf16*>(p.d_weights)[at] = arch::to_bf16(d_weight);
    if (t == 0 && !p.weights_bf16) static_cast<float*>(p.d_weights)[at] = d_weight;
    bf16* to = p.d_q + query * p.d_q_stride_s + head * p.d_q_stride_h;
    HOPWELL_UNROLL
    for (int i = 0; i < 32; ++i) {
      const int column = i / 2 * 8 + 2 * t + i % 2;
      if (column < p.columns) to[column] = arch::to_bf16(s.weights[row] * d_q[i / 2 * 4 + 2 * half + i % 2]);
    }
  }
}

HOPWELL_DEVICE void add_up_heads(const Params<bf16>& p, HopperGradientStorage& s, int query, int first) {
  const int lane = arch::lane_index(), t = lane % 4, tiles = entry_tiles(p);
  const uint32_t q = arch::shared_address(s.q);
  float d_q[64] = {}, d_weights[2] = {0, 0};
  HOPWELL_NO_UNROLL
  for (int tile = 0; tile < tiles; ++tile) {
    const EntrySlot<decltype(s.ring)> slot{s.ring, tile};
    float scores[32];
    slot.wait_full();
    start_scores(scores, q, slot.keys());
    uint32_t limbs[kGradientLimbs][8];
    float g[16];
    HOPWELL_UNROLL
    for (int i = 0; i < kGradientLimbs * 8; ++i) limbs[i / 8][i % 8] = slot.numbers().g_limbs[i / 8][i % 8 * 4 + t];
    HOPWELL_UNROLL
    for (int i = 0; i < 16; ++i) g[i] = slot.numbers().g[i / 2 * 8 + 2 * t + i % 2];
    arch::wgmma_wait<0>(scores);
    const MaskedLimbs a = mask_limbs(scores, limbs);
    multiply_rows(d_q, a, slot.keys(), true);
    HOPWELL_UNROLL
    for (int i = 0; i < 32; ++i) d_weights[i / 2 % 2] += scores[i] > 0 ? g[i / 4 * 2 + i % 2] * scores[i] : 0;
    arch::wgmma_wait<0>(d_q);
    slot.release();
  }
  store_heads(p, s, query, first, d_q, d_weights);
}

// ---- entries ----------------------------------------------------------------------------------------------------------

// Adds a key's row of dk, this lane's columns of 128, as multiples of its unit.
HOPWELL_DEVICE void add_fixed(const Params<bf16>& p, int key, const float (&row)[32], float g) {
  const Unit unit = unit_of(p.bounds.most[key], p.bounds.count[key]);
  if (unit.none) return;
  const double scale = power_of_two(unit.exponent);
  int64_t* to = p.fixed_d_k + int64_t{key} * p.columns;
  HOPWELL_UNROLL
  for (int i = 0; i < 32; ++i) {
    const int column = i / 2 * 8 + arch::lane_index() % 4 * 2 + i % 2;
    if (column < p.columns) arch::red_add(to + column, int64_t(double(g * row[i]) * scale));
  }
}

// Adds this lane's two rows, of four columns at a time: neighbours exchange a pair, so that an even lane has the first row's,
// an odd one the second's.
HOPWELL_DEVICE void add_tile(const Params<bf16>& p, const int (&keys)[2], const float (&g)[2], const float (&d_k)[64]) {
  const int lane = arch::lane_index(), odd = lane & 1;
  if (p.fixed_d_k) {
    HOPWELL_UNROLL
    for (int half = 0; half < 2; ++half) {
      float row[32];
      HOPWELL_UNROLL
      for (int i = 0; i < 32; ++i) row[i] = d_k[i / 2 * 4 + 2 * half + i % 2];
      if (keys[half] >= 0) add_fixed(p, keys[half], row, g[half]);
    }
    return;
  }
  const int key = odd ? keys[1] : keys[0];
  float* to = p.d_k + (key < 0 ? 0 : key) * p.d_k_stride + lane % 4 / 2 * 4;
  HOPWELL_UNROLL
  for (int block = 0; block < 16; ++block) {
    const float low[2] = {g[0] * d_k[4 * block], g[0] * d_k[4 * block + 1]},
                high[2] = {g[1] * d_k[4 * block + 2], g[1] * d_k[4 * block + 3]};
    const float x = arch::shuffle_xor(odd ? low[0] : high[0], 1), y = arch::shuffle_xor(odd ? low[1] : high[1], 1);
    if (key < 0 || 8 * block >= p.columns) continue;
    if (odd)
      arch::red_add_v4(to + 8 * block, x, y, high[0], high[1]);
    else
      arch::red_add_v4(to + 8 * block, low[0], low[1], x, y);
  }
}

HOPWELL_DEVICE void add_up_entries(const Params<bf16>& p, HopperGradientStorage& s) {
  const int lane = arch::lane_index(), t = lane % 4, tiles = entry_tiles(p);
  const uint32_t q = arch::shared_address(s.q);
  uint32_t limbs[kGradientLimbs][8];  // of the weights of this lane's heads
  HOPWELL_UNROLL
  for (int i = 0; i < 8; ++i) {
    float low = s.weights[8 * i + 2 * t], high = s.weights[8 * i + 2 * t + 1];
    HOPWELL_UNROLL
    for (auto& limb : limbs) limb[i] = lightning_indexer::take_limb(low) >> 16 | lightning_indexer::take_limb(high);
  }
  HOPWELL_NO_UNROLL
  for (int tile = 0; tile < tiles; ++tile) {
    const EntrySlot<decltype(s.ring)> slot{s.ring, tile};
    float scores[32], d_k[64];
    slot.wait_full();
    start_scores(scores, slot.keys(), q);
    int keys[2];
    float g[2];
    HOPWELL_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = arch::warp_index() % 4 * 16 + 8 * half + lane / 4;
      keys[half] = slot.numbers().key[row], g[half] = slot.numbers().g[row];
    }
    arch::wgmma_wait<0>(scores);
    slot.release();
    multiply_rows(d_k, mask_limbs(scores, limbs), q, false);
    arch::wgmma_wait<0>(d_k);
    add_tile(p, keys, g, d_k);
  }
}

// ---- kernel -----------------------------------------------------------------------------------------------------------

// A CTA for each query and 64 of its heads.
__global__ void __launch_bounds__(HopperGradientConfig::kThreads, 1)
    add_gradients_by_warpgroups(const __grid_constant__ Params<bf16> p) {
#if HOPWELL_HAS_SM90A
  auto& s = arch::dynamic_smem<HopperGradientStorage>();
  const int parts = (p.heads + kHeads - 1) / kHeads;
  const int query = arch::block_index() / parts, first = arch::block_index() % parts * kHeads;
  if (arch::thread_index() == 0) {
    init_ring(s.ring, 8);
    arch::fence_mbarrier_init();
  }
  load_heads(p, s.q, s.weights, query, first, HopperGradientConfig::kThreads);
  arch::syncthreads();
  const int group = arch::warpgroup_index(), warp = arch::warp_index();
  if (group == 0) {
    arch::setmaxnreg_inc<HopperGradientConfig::kMathRegisters>();
    add_up_heads(p, s, query, first);
  } else if (group == 1) {
    arch::setmaxnreg_inc<HopperGradientConfig::kMathRegisters>();
    add_up_entries(p, s);
  } else {
    arch::setmaxnreg_dec<HopperGradientConfig::kOtherRegisters>();
    if (warp == 8) gather_tiles<true>(p, s.ring, query, 0);
    arch::cp_async_wait_all();  // no thread leaves before its copies
  }
#endif
}

}  // namespace
}  // namespace hopwell::ops::lightning_indexer_backward
