// sparse_mla_backward on Hopper: the kernel for a query and 64 heads. One pass over the selected keys, whose gradients
// are added to global memory.
//
//     P  = exp2(Q Kᵀ · sm_scale · log2e − lse'·log2e)      lse' = log(exp(lse) + exp(attn_sink))
//     dS = P (dO Vᵀ − delta) sm_scale                      V = K[:, :512], delta = Σ_d out · d_out
//     dQ = dS K            dKV[keys] += dSᵀ Q, and Pᵀ dO to the first 512 columns
//     d_sink = −Σ_s exp(attn_sink − lse') delta
//
// Tile      one query, 64 heads, 64 keys a step; d_qk 576 or 512. Operands lie in panels of 64 columns, 128B-swizzled.
// Roles     warpgroup 0  S → P    │ both: half of dQ's columns in registers, the same columns of the next keys by
//           warpgroup 1  dP → dS  │ cp.async, and two panels of dKV while those keys come
//           warpgroup 2  the other panels of dKV, half a panel multiplied while the other is added
// Timeline  step 0                                                  step 1
//           0     S ▓▓▓▓▓ │ P │········│ dQ ▓▓▓▓ │ keys 1, dKV 0 1 │ S ▓▓▓▓▓
//           1     dP ▓▓▓▓ │···│ dS     │ dQ ▓▓▓▓ │ keys 1, dKV 2 3 │ dP ▓▓▓▓
//           2                          │ dKV 4 ▓▓ add 5 ▓▓ add … 8 ▓▓ add │ …
// Budget    shared: Q 9 + dO 8 + keys 9 + P 1 + dS 1 panels of 8,192 B = 229,376, vectors 2,352    (of 232,448)
//           registers: dQ 144 + S or dP 32 + 32 others = 208 in warpgroups 0 and 1, 88 in warpgroup 2 (of 3 · 168)
// Bound     s_q · topk · 2,304 B of additions in L2 while dKV fits there; beyond, rows in ascending order and CTAs in step
//           keep what is added to in L2
//
// Keys of invalid entries are −1: their rows are zeros, nothing is added for them, and the exponent is clamped, so that
// 0 · P is 0. Heads beyond h_q have Q = dO = 0 and lse = +inf.
#pragma once

#include <cmath>

#include "ops/sparse_mla_backward/sm90_prologue.hpp"

namespace hopwell::ops::sparse_mla_backward {
namespace {

#if HOPWELL_HAS_SM90A

// ---- warpgroups 0 and 1

// Sums exp(score − lse) over a warp's 16 heads: within a lane, then over the 8 lanes of a column. The rest can wait until
// the tensor cores have work.
HOPWELL_DEVICE void sum_heads(const float (&acc)[32], float (&head_sums)[4][Config::kKeys], int t) {
  const int lane = t % 32;
  float sum[16];
  HOPWELL_UNROLL
  for (int i = 0; i < 16; ++i) sum[i] = acc[i / 2 * 4 + i % 2] + acc[i / 2 * 4 + i % 2 + 2];
  tile::share_sums(sum, 8, 16, lane & 16);
  tile::share_sums(sum, 4, 8, lane & 8);
  tile::share_sums(sum, 2, 4, lane & 4);
  const int column = 32 * (lane >> 4 & 1) + 16 * (lane >> 3 & 1) + 8 * (lane >> 2 & 1) + 2 * (lane & 3);
  head_sums[t / 32][column] = sum[0];
  head_sums[t / 32][column + 1] = sum[1];
}

// Adds them over the 4 warps to attn, which holds 0 or the sum of other heads. In the order of the selection, ordered or
// not: arrange_attn brings sums to their entries.
HOPWELL_DEVICE void add_attn(const Params& p, const float (&head_sums)[4][Config::kKeys],
                             const int (&keys)[Config::kKeys], const Place& place, int step, int t) {
  if (t < Config::kKeys && keys[t] >= 0)
    arch::red_add(p.attn + place.query * p.attn_stride + place.first_entry + step * Config::kKeys + t,
                  head_sums[0][t] + head_sums[1][t] + head_sums[2][t] + head_sums[3][t]);
  arch::syncwarp();  // kept: lanes branched off
}

// A slice's share of dQ: columns from `column` on of the rows of `target`, as the accumulators have them.
template <int kDqk, int kSize>
HOPWELL_DEVICE void store_slice(float* target, const float (&dq)[kSize], int column, int t) {
  const int row = t / 32 * 16 + t % 32 / 4;
  HOPWELL_UNROLL
  for (int e = 0; e < kSize; ++e)
    target[(row + (e & 2) * 4) * kDqk + column + e / 4 * 8 + 2 * (t & 3) + (e & 1)] = dq[e];
}

// Through this half's columns of the key buffer, then in whole lines.
template <int kDqk, int kHalf>
HOPWELL_DEVICE void store_dq(const Params& p, SharedStorage<kDqk>& s, const float (&dq)[128], const float (&middle)[16],
                             const Place& place, int t) {
  constexpr int kPanels = kDqk / 64, kFirst = kHalf == 0 ? 0 : kPanels - 4, kChunks = kDqk / 16;
  const auto store = [](uint32_t target, const float* x) {
    const uint32_t packed[4] = {arch::pack_bf16(x[0], x[1]), arch::pack_bf16(x[2], x[3]), arch::pack_bf16(x[4], x[5]),
                                arch::pack_bf16(x[6], x[7])};
    arch::stmatrix(target, packed);
  };
  const int own_row = t / 32 * 16 + (t & 15), upper = t >> 4 & 1;
  HOPWELL_UNROLL
  for (int j = 0; j < 32; j += 2)
    store(arch::shared_address(&s.keys[kFirst + j / 8]) + tile::swizzled(own_row, j % 8 + upper), &dq[4 * j]);
  if constexpr (kHasMiddle<kDqk>) {
    HOPWELL_UNROLL
    for (int j = 0; j < 4; j += 2)
      store(arch::shared_address(&s.keys[4]) + swizzled_middle(own_row, 4 * kHalf + j + upper), &middle[4 * j]);
  }
  arch::barrier_sync(kHalf0 + kHalf, 128);
  for (int e = t; e < Config::kHeads * kChunks; e += 128) {
    const int row = e / kChunks, chunk = e % kChunks + kHalf * kChunks, head = place.first_head + row;
    if (head >= p.h_q) break;
    const bool between = kHasMiddle<kDqk> && chunk / 8 == 4;
    const arch::Words4 v =
        arch::load_shared_v4(arch::shared_address(&s.keys[chunk / 8]) +
                             (between ? swizzled_middle(row, chunk % 8) : tile::swizzled(row, chunk % 8)));
    arch::store_streaming(p.dq + place.query * p.dq_stride_s + head * p.dq_stride_h + 8 * chunk, v);
  }
}

// Half 0: S and P, and the sums over heads. Half 1: dP and dS. Both: their columns of dQ and of the next keys, two
// panels.
template <int kDqk, int kHalf, int kHeadSteps, bool kFixed, bool kAttn>
HOPWELL_DEVICE void score(const Params& p, SharedStorage<kDqk>& s, const Place& place, const Entries& entries) {
  const int steps = (entries.length + Config::kKeys - 1) / Config::kKeys;
  float dq[128] = {}, middle[16] = {};
  for (int step = 0; step < steps; ++step) {
    float acc[32];
    arch::wgmma_fence();
    if constexpr (kHalf == 0)
      multiply_scores<kDqk / 64, kHasMiddle<kDqk>>(acc, s.q, s.keys);
    else
      multiply_scores<Config::kPanelsV, kHasMiddle<kDqk>>(acc, s.d_out, s.keys);
    arch::wgmma_commit();
    const int t = arch::thread_index_anew() % 128;
    arch::wgmma_wait<0>(acc);
    if constexpr (kHalf == 0) {
      if (step > 0) arch::barrier_sync(kPEmpty, 256);
      store_p<kAttn>(p, acc, s.shift, s.kept, arch::shared_address(&s.p), t);
      arch::fence_proxy_async();
      arch::barrier_arrive(kPFull, 256);
      if constexpr (kAttn) sum_heads(acc, s.head_sums, t);
    } else {
      arch::barrier_sync(kPFull, 256);
      if (step > 0) arch::barrier_sync(kDsEmpty, 256);
      store_ds(p, acc, s.delta, arch::shared_address(&s.p), arch::shared_address(&s.ds), t);
      arch::fence_proxy_async();
      arch::barrier_arrive(kPdsFull, 256);
    }
    arch::barrier_sync(kDsFull, 256);
    arch::wgmma_fence();  // kept: nothing has touched dq since the fence above; each batch begins with one
    multiply_dq<kDqk, kHalf>(dq, middle, s);
    arch::wgmma_commit();
    int keys[4];
    load_keys(keys, entries, step + 1, t);
    arch::wgmma_wait<0>(dq, middle);
    if (step + 1 < steps) {
      gather<kDqk, kHalf>(p, s, keys, step + 1, t);
      arch::cp_async_commit();
      if (p.prefetch) prefetch_sums<kDqk, kHalf>(p, keys, t);
    }
    if constexpr (kAttn && kHalf == 0) add_attn(p, s.head_sums, s.key[step % 2], place, step, t);
    const Rows<kFixed> rows = load_rows<kDqk, kFixed>(p, s.key[step % 2], t);
    HOPWELL_UNROLL
    for (int panel = kHalf * Config::kPanelsBeside; panel < (kHalf + 1) * Config::kPanelsBeside; ++panel) {
      arch::wgmma_fence();
      multiply_transposed<kHeadSteps>(acc, arch::shared_address(&s.ds), arch::shared_address(&s.q[panel]), false);
      multiply_transposed<kHeadSteps>(acc, arch::shared_address(&s.p), arch::shared_address(&s.d_out[panel]), true);
      arch::wgmma_commit();
      arch::wgmma_wait<0>(acc);
      add_panel(p, acc, 64 * panel, rows);
    }
    if (step + 1 < steps) {
      arch::cp_async_wait<0>();
      arch::fence_proxy_async();
      arch::barrier_sync(kKeysFull, 256);
    }
  }
  const int t = arch::thread_index_anew() % 128;
  if (!p.dq) return;
  if (place.slice < 0) {
    store_dq<kDqk, kHalf>(p, s, dq, middle, place, t);
  } else {
    float* slice = p.dq_slices + int64_t{place.slice} * (Config::kHeads * kDqk);
    store_slice<kDqk>(slice, dq, kHalf == 0 ? 0 : kDqk - 256, t);
    if constexpr (kHasMiddle<kDqk>) store_slice<kDqk>(slice, middle, 256 + 32 * kHalf, t);
  }
}

// ---- warpgroup 2

// P or dS transposed, as A fragments for 64 keys: ldmatrix.trans, where lanes 0-7 give heads 0-7 of the first 8 keys,
// 8-15 of the next 8 keys, 16-31 the same of heads 8-15.
template <int kHeadSteps>
HOPWELL_DEVICE void load_transposed(uint32_t (&fragments)[kHeadSteps][4], const Panel& from, int t) {
  const int lane = t % 32;
  const uint32_t source =
      arch::shared_address(&from) + tile::swizzled((lane & 7) + 8 * (lane >> 4), t / 32 * 2 + (lane >> 3 & 1));
  HOPWELL_UNROLL
  for (int k = 0; k < kHeadSteps; ++k) arch::ldmatrix<arch::Transpose::yes>(fragments[k], source + uint32_t(2048 * k));
}

// acc [64 keys][32 columns] (+)= the transposed P or dS · half of a panel of dO or Q, by its address.
template <int kHeadSteps>
HOPWELL_DEVICE void multiply_fragments(float (&acc)[16], const uint32_t (&fragments)[kHeadSteps][4],
                                       uint32_t half_panel, bool accumulate) {
  const uint64_t right = arch::at_address(tile::kRowsAcrossK, half_panel);
  HOPWELL_UNROLL
  for (int k = 0; k < kHeadSteps; ++k)
    arch::wgmma_rs<arch::WgmmaOptions{.b_major = Major::mn}>(acc, fragments[k], right + uint64_t(128 * k),
                                                             accumulate || k > 0);
}

// One panel of dKV, in two halves: the second is multiplied while the first is added. P and dS come from registers: that
// spares shared memory, and the score warpgroups need not wait with the next ones.
template <int kDqk, int kHeadSteps, bool kOfV, bool kFixed>
HOPWELL_DEVICE void scatter_panel(const Params& p, SharedStorage<kDqk>& s,
                                  const uint32_t (&probabilities)[kHeadSteps][4], int panel, const Rows<kFixed>& rows) {
  const uint32_t q = arch::shared_address(&s.q[panel]), d_out = arch::shared_address(&s.d_out[panel]);
  float half[2][16];
  arch::wgmma_fence();
  HOPWELL_UNROLL
  for (int i = 0; i < 2; ++i) {
    multiply_transposed<kHeadSteps>(half[i], arch::shared_address(&s.ds), q + uint32_t(64 * i), false);
    if constexpr (kOfV) multiply_fragments(half[i], probabilities, d_out + uint32_t(64 * i), true);
    arch::wgmma_commit();
  }
  arch::wgmma_wait<1>(half[0]);
  add_panel(p, half[0], 64 * panel, rows);
  arch::wgmma_wait<0>(half[1]);
  add_panel(p, half[1], 64 * panel + 32, rows);
}

// Keeps CTAs in step: none begins a step before the average CTA of its wave is within p.slack steps. With ordered keys
// all of them then add to the same range of rows, which is still in L2. A hint: the wait is bounded, whatever runs
// when.
HOPWELL_DEVICE void keep_step(const Params& p, uint32_t& seen, int step) {
  constexpr int kMostPolls = 16384;
  const int steps_of_row = (p.selection.topk + Config::kKeys - 1) / Config::kKeys;
  const int before = arch::block_index() / p.wave * p.wave, rest = arch::grid_size() - before;
  const int peers = rest < p.wave ? rest : p.wave;
  const uint32_t target =
      uint32_t(before) * uint32_t(steps_of_row) + uint32_t(peers * (step > p.slack ? step - p.slack : 0));
  for (int poll = 0; seen < target && poll < kMostPolls; ++poll) seen = arch::load_relaxed(p.progress);
  if (arch::thread_index() % 128 == 0) arch::red_add(p.progress, 1u);
  seen = arch::load_relaxed(p.progress);  // for the next step
}

// The panels of dKV that the score warpgroups leave.
template <int kDqk, int kHeadSteps, bool kFixed>
HOPWELL_DEVICE void scatter(const Params& p, SharedStorage<kDqk>& s, const Entries& entries) {
  const int t = arch::thread_index() % 128;
  const bool in_step = p.progress && int(arch::block_index()) < p.whole;
  const int steps = (entries.length + Config::kKeys - 1) / Config::kKeys;
  uint32_t seen = 0;
  for (int step = 0; step < steps; ++step) {
    if (in_step) keep_step(p, seen, step);
    arch::barrier_sync(kPdsFull, 256);
    const Rows<kFixed> rows = load_rows<kDqk, kFixed>(p, s.key[step % 2], t);
    uint32_t probabilities[kHeadSteps][4];
    load_transposed(probabilities, s.p, t);
    if (step + 1 < steps) arch::barrier_arrive(kPEmpty, 256);
    HOPWELL_NO_UNROLL
    for (int panel = 2 * Config::kPanelsBeside; panel < Config::kPanelsV; ++panel)
      scatter_panel<kDqk, kHeadSteps, true, kFixed>(p, s, probabilities, panel, rows);
    if constexpr (kHasMiddle<kDqk>)
      scatter_panel<kDqk, kHeadSteps, false, kFixed>(p, s, probabilities, Config::kPanelsV, rows);
    if (step + 1 < steps) arch::barrier_arrive(kDsEmpty, 256);
  }
  // Rows with fewer steps than others count as having made them all.
  const int missing = (p.selection.topk + Config::kKeys - 1) / Config::kKeys - steps;
  if (in_step && t == 0 && missing > 0) arch::red_add(p.progress, uint32_t(missing));
}

// ---- before the first step

// Starts the copies of 64 rows (heads) of kColumns; zeros beyond h_q.
template <int kColumns>
HOPWELL_DEVICE void load_heads(Panel* panels, const bf16* source, int64_t stride, int heads) {
  for (int e = arch::thread_index(); e < Config::kHeads * (kColumns / 8); e += Config::kThreads) {
    const int row = e / (kColumns / 8), chunk = e % (kColumns / 8);
    arch::cp_async(arch::shared_address(&panels[chunk / 8]) + tile::swizzled(row, chunk % 8),
                   source + (row < heads ? row : 0) * stride + 8 * chunk, row < heads ? 16 : 0);
  }
}

// Q, dO, the first keys, and what the heads need. Returns the entries up to the last valid one.
template <int kDqk, bool kAttn>
HOPWELL_DEVICE Entries prepare(const Params& p, SharedStorage<kDqk>& s, const Place& place) {
  Entries entries = entries_of(p, place);
  const int t = arch::thread_index() % 128, heads = p.h_q - place.first_head;
  int keys[4], share[kShare];
  load_keys(keys, entries, 0, t);
  load_share(share, entries, arch::thread_index());
  if (arch::warpgroup_index() == 0) gather<kDqk, 0>(p, s, keys, 0, t);
  if (arch::warpgroup_index() == 1) gather<kDqk, 1>(p, s, keys, 0, t);
  load_heads<kDqk>(s.q, p.q + place.query * p.q_stride_s + place.first_head * p.q_stride_h, p.q_stride_h, heads);
  load_heads<Config::kDv>(s.d_out, p.d_out + place.query * p.d_out_stride_s + place.first_head * p.d_out_stride_h,
                          p.d_out_stride_h, heads);
  arch::cp_async_commit();
  prepare_heads<kAttn>(p, s, place);
  find_last_valid(s.last_valid, share, entries);
  arch::cp_async_wait<0>();
  arch::fence_proxy_async();
  arch::syncthreads();
  entries.length = length_of(s.last_valid);
  return entries;
}

#endif

// kHeadSteps: of 16 heads, where h_q may be fewer than 64.
template <int kDqk, int kHeadSteps, bool kFixed, bool kAttn>
__global__ void __launch_bounds__(Config::kThreads, 1) kernel(const __grid_constant__ Params p) {
#if HOPWELL_HAS_SM90A
  auto& s = arch::dynamic_smem<SharedStorage<kDqk>>();
  const Place place = place_of(p);
  const Entries entries = prepare<kDqk, kAttn>(p, s, place);
  const int role = arch::warpgroup_index();
  if (role == 0) {
    arch::setmaxnreg_inc<Config::kScoreRegisters>();
    score<kDqk, 0, kHeadSteps, kFixed, kAttn>(p, s, place, entries);
  } else if (role == 1) {
    arch::setmaxnreg_inc<Config::kScoreRegisters>();
    score<kDqk, 1, kHeadSteps, kFixed, kAttn>(p, s, place, entries);
  } else {
    arch::setmaxnreg_dec<Config::kScatterRegisters>();
    scatter<kDqk, kHeadSteps, kFixed>(p, s, entries);
  }
#endif
}

}  // namespace
}  // namespace hopwell::ops::sparse_mla_backward
