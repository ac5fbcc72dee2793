// sparse_mla_forward on Blackwell: the kernel for a query and 64 heads on one CTA.
//
//     out[s,h,:] = Σ_i exp2(score[s,h,i] − m) · kv[indices[s,i], :512] / Σ_i exp2(…)    scores in units of log 2, m: reference
//
// Tile      one query, 64 heads, 64 keys a step; d_qk 576 or 512. Products are tcgen05.mma.ws with M 64. Keys are K of S and
//           V of O from one place.
// Roles     warp 0      gather    four rows an instruction, a panel of 64 columns after the other
//           warp 1      issue     all products
//           warps 4-7   math      Q to tensor memory; S → P, a head and half of the keys a thread; in the end O
// Timeline  gather  │ keys 0 ▒▒▒▒│ keys 1 ▒▒▒▒│ (O 0 frees) keys 2 ▒▒▒▒│ …
//           issue                │ S 0 ▓▓▓│ S 1 ▓▓▓│ O 0 ▓▓│ S 2 ▓▓▓│ O 1 ▓▓│ …
//           math                          │ P 0    │ P 1            │ P 2 …
// Budget    shared: Q 3 + keys 2 × 9 + P 2 panels of 8,192 B = 188,416, values and barriers 1,640; tensor memory: O 256 + Q 192
//           + S 2 × 32 = 512 columns
// Bound     shared memory: S 98,304 + O 81,920 B of operands, 73,728 of keys that come and 8,192 of P that is stored: 2,048
//           cycles a step; products 1,696 (24 × 28 + 12 × 32 + 8 × 80), of which 1,088 would do at the full rate; the gather
//           1,728. So it may reach 0.53 of the matmul rate.
#pragma once

#include "ops/sparse_mla_forward/sm100/tile.hpp"

namespace hopwell::ops::sparse_mla_forward::HOPWELL_TARGET {

struct SingleConfig {
  static constexpr int kStages = 2, kThreads = 256, kGatherWarp = 0, kIssueWarp = 1;
};

template <int kDqk>
struct SingleStorage : MathStorage<kDqk, 1> {
  alignas(1024) unsigned char keys[SingleConfig::kStages][kDqk / 64][tile::kPanelBytes];
  tile::RingBarriers<SingleConfig::kStages> key_barriers;
  arch::mbarrier q_full;
};
static_assert(sizeof(SingleStorage<576>) <= arch::sm90::kMaxSharedBytes);

#if HOPWELL_HAS_SM100A

using KeySlot = tile::RingSlot<SingleConfig::kStages>;

// By a warp.
template <int kDqk>
HOPWELL_DEVICE void gather(const GatherParams& p, SingleStorage<kDqk>& s, const Entries& entries) {
  using Storage = SingleStorage<kDqk>;
  const int lane = arch::lane_index(), steps = steps_of<Storage>(entries);
  int keys[4];
  tile::load_gathered_keys(keys, entries, 0, lane);
  for (int step = 0; step < steps; ++step) {
    const KeySlot slot{s.key_barriers, step};
    tile::gather_tile<Storage::kPanels>(slot, s.keys[slot.stage()], p.keys, keys);
    tile::load_gathered_keys(keys, entries, (step + 1) * Storage::kKeys, lane);
  }
}

// Q, by the math warps: 384 columns of a thread's head to its lane of tensor memory; the rest of all heads to shared memory.
template <int kDqk>
HOPWELL_DEVICE void load_queries(const Params& p, SingleStorage<kDqk>& s, const WorkTile& work) {
  constexpr int kColumns = 64 * Config::kTmemPanels;
  const MathThread at;
  copy_queries<SingleStorage<kDqk>::kQPanels, Config::kMathThreads>(p, s.q, work, kColumns,
                                                                    arch::thread_index() % Config::kMathThreads);
  const bool exists = at.row < p.h_q - work.first_head;
  const bf16* const from = q_row(p, work, exists ? at.row : 0);
  HOPWELL_NO_UNROLL
  for (int column = 0; column < kColumns; column += 64) {
    uint32_t words[32];
    HOPWELL_UNROLL
    for (int i = 0; i < 32; i += 4) {
      const arch::Words4 loaded = exists ? arch::load_streaming(from + column + 2 * i) : arch::Words4{};
      HOPWELL_UNROLL
      for (int j = 0; j < 4; ++j) words[i + j] = loaded.w[j];
    }
    arch::tmem_store<arch::TmemShape::b32x32>(arch::tmem_address(s.tmem, 32 * at.warp, Tmem::kQ + column / 2), words);
  }
  arch::tmem_wait_store();
  arch::tcgen05_fence_before_thread_sync();
  arch::cp_async_wait<0>();
  arch::fence_proxy_async();
  tell_issue<SingleStorage<kDqk>>(s.q_full);
}

// S [64 heads][64 keys] = Q Kᵀ, where that of two steps ago was: P came of it, for which multiply_values has waited.
template <int kDqk>
HOPWELL_DEVICE void multiply_scores(SingleStorage<kDqk>& s, int step) {
  const KeySlot slot{s.key_barriers, step};
  slot.wait_full();
  arch::tcgen05_fence_after_thread_sync();
  HOPWELL_NO_UNROLL
  for (int panel = 0; panel < SingleStorage<kDqk>::kPanels; ++panel)
    multiply_panel(s, scores_address(s, step), panel, s.keys[slot.stage()][panel], panel > 0);
  arch::tcgen05_commit<1>(s.s_full[step % 2]);
}

// O [64 heads][512 columns] (+)= P V, V the first 512 columns of the keys.
template <int kDqk>
HOPWELL_DEVICE void multiply_values(SingleStorage<kDqk>& s, int step) {
  constexpr uint32_t kShape = arch::instruction_descriptor({.m = 64, .n = 256, .b_major = Major::mn});
  const KeySlot slot{s.key_barriers, step};
  const uint32_t p = arch::shared_address(s.p[step % 2]), keys = arch::shared_address(s.keys[slot.stage()]);
  arch::mbarrier_wait(s.p_full[step % 2], uint32_t(step / 2 & 1));
  arch::tcgen05_fence_after_thread_sync();
  HOPWELL_UNROLL
  for (uint32_t half = 0; half < 2; ++half) {
    HOPWELL_UNROLL
    for (uint32_t k = 0; k < 4; ++k)
      arch::tcgen05_mma_ws_f16(
          arch::tmem_address(s.tmem, 0, Tmem::kOut + int(128 * half)),
          arch::at_address(tile::kTcgen05RowsAlongK, p + 32 * k),
          arch::at_address(tile::kTcgen05RowsAcrossK<64>, keys + 4 * half * tile::kPanelBytes + 2048 * k), kShape,
          step > 0 || k > 0);
  }
  arch::tcgen05_commit<1>(slot.empty());
  arch::tcgen05_commit<1>(s.out_full[step % 2]);
}

// By one thread. Its last commit is one that math waits for, so that the CTA does not exit before its products end.
template <int kDqk>
HOPWELL_DEVICE void issue(SingleStorage<kDqk>& s, int steps) {
  if (steps == 0) return;
  arch::mbarrier_wait(s.q_full, 0);
  multiply_scores(s, 0);
  for (int step = 0; step < steps; ++step) {
    if (step + 1 < steps) multiply_scores(s, step + 1);
    multiply_values(s, step);
  }
}

#endif

template <int kDqk>
__global__ void __launch_bounds__(SingleConfig::kThreads, 1) single_kernel(const __grid_constant__ GatherParams p) {
#if HOPWELL_HAS_SM100A
  auto& s = arch::dynamic_smem<SingleStorage<kDqk>>();
  const WorkTile work{int(arch::block_index()), p.first_head};
  const Entries entries = tile::entries_of(p.selection, work.query);
  const int warp = arch::warp_index();
  if (arch::thread_index() == 0) {
    s.key_barriers.init(1, 1);
    arch::mbarrier_init(s.q_full, Config::kMathThreads / 32);
    init_math_barriers(s);
    arch::fence_mbarrier_init();
  }
  arch::syncwarp();  // kept: a lane branched off
  if (warp == SingleConfig::kIssueWarp) {
    arch::tmem_allocate<1>(s.tmem, Tmem::kColumns);
    arch::tmem_relinquish<1>();
  }
  arch::syncthreads();
  if (warp == SingleConfig::kGatherWarp) gather(p, s, entries);
  if (warp == SingleConfig::kIssueWarp && arch::elect_one()) issue(s, steps_of<SingleStorage<kDqk>>(entries));
  if (warp >= Config::kFirstMathWarp) {
    if (entries.length > 0) load_queries(p, s, work);
    math(p, s, work, entries, 0);
  }
  arch::syncwarp();  // kept: lanes branched off
  arch::syncthreads();
  if (warp == SingleConfig::kIssueWarp) {
    arch::tcgen05_fence_after_thread_sync();  // kept: PTX's examples do without
    arch::tmem_deallocate<1>(s.tmem, Tmem::kColumns);
  }
#endif
}

}  // namespace hopwell::ops::sparse_mla_forward::HOPWELL_TARGET
