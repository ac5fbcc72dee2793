// sparse_mla_backward on Blackwell: the kernel for a query and 64 heads on one CTA.
//
//     P  = exp2(Q Kᵀ · sm_scale · log2e − lse'·log2e)      lse' = log(exp(lse) + exp(attn_sink))
//     dS = P (dO Vᵀ − delta) sm_scale                      V = K[:, :512], delta = Σ_d out · d_out
//     dQ = dS K            dKV[keys] += dSᵀ Q, and Pᵀ dO to the first 512 columns
//
// Tile      one query, 64 heads, 64 keys per step; d_qk 576 or 512. All products are tcgen05.mma.ws with M 64: their
//           results fill all 128 lanes, the two halves of N stacked. dKV of a step is computed in chunks of 128
//           columns.
// Roles     warp 0        gather    producer: four rows per instruction, one panel of 64 columns after another
//           warp 1        issue     mma: all products
//           warps 4-7     softmax   S, dP → P, dS; at the end dQ
//           warps 8-11    scatter   epilogue: chunks of dKV to global memory
// Timeline  issue     │ S 1, dP 1 ▓▓▓▓▓▓▓▓ │ dKV 0: chunks 2 3 4 ▓▓▓ │ dQ 1 ▓▓ │ dKV 1: chunks 0 1 ▓▓ │ S 2, dP 2 ▓▓▓
//           gather    │                                              │ (dQ frees) keys 2 ▓▓▓▓▓▓▓▓▓▓▓▓
//           softmax   │        P 1 ▓▓ dS 1 ▓▓ │ wait for chunk 4 │ store │
//           scatter   │ add 0.0 ▓▓▓▓ add 0.1 ▓▓▓▓ add 0.2 ▓▓▓▓ add 0.3 ▓▓▓▓ add 0.4 ▓▓ │ add 1.0 …
// Budget    shared: (Q 9 + dO 8 + keys 9 + P 1 + dS 1) panels of 8,192 B = 229,376, values and barriers 1,100
//           (of 232,448)
//           tensor memory: dQ 288 + S 32 + dP 32 + two chunks of dKV 128 = 480 columns                     (of 512)
// Bound     the additions: 147,456 B per step, 6,703 cycles at 22 B per cycle. Operand reads from shared memory take
//           4,608, products 2,752 at the full rate. So a chunk is being added at all times.
#pragma once

#include "ops/sparse_mla_backward/sm100/tile.hpp"

namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET {

struct SingleConfig {
  static constexpr int kHeads = 64, kChunk = 128;  // columns of a chunk of dKV
  static constexpr uint32_t kPanel = 64 * 128;     // bytes
};
struct SingleTmem {
  static constexpr int kDq = 0, kS = 288, kDp = 320, kDkv = 352, kChunkColumns = SingleConfig::kChunk / 2;
};
static_assert(SingleTmem::kDkv + 2 * SingleTmem::kChunkColumns <= 512);

template <int kDqk>
struct SingleStorage {
  static constexpr int kPanels = kDqk / 64, kChunks = (kDqk + SingleConfig::kChunk - 1) / SingleConfig::kChunk;
  Panel<64> q[kPanels], d_out[Config::kPanelsV], keys[kPanels], p, ds;
  HeadValues<SingleConfig::kHeads> heads;
  int last_valid[Config::kWarps];
  arch::mbarrier keys_full[kPanels], keys_empty[3];  // per panel of keys; of panels 0-3, 4-7 and 8
  arch::mbarrier s_full, dp_full;                    // S and dP in tensor memory
  arch::mbarrier ds_full, ds_empty;                  // P and dS in shared memory
  arch::mbarrier dkv_full[2], dkv_empty[2], dq_full;
  tile::TensorMemory<512> tmem;
};
static_assert(sizeof(SingleStorage<576>) <= arch::sm90::kMaxSharedBytes);

#if HOPWELL_HAS_SM100A

// Executed by 16 lanes: further lanes would have copies that nothing waits for, could fall behind by two phases of
// keys_empty, and wait for ever.
template <int kDqk>
HOPWELL_DEVICE void gather(const GatherParams& p, SingleStorage<kDqk>& s, const Entries& entries) {
  const int lane = arch::lane_index(), steps = entries.tiles(Config::kKeys);
  const bool throttled = p.progress && int(arch::block_index()) < p.whole_tiles;
  uint32_t seen = 0;
  int keys[4];
  tile::load_gathered_keys(keys, entries, 0, lane);
  for (int step = 0; step < steps; ++step) {
    const uint32_t freed = uint32_t(step & 1) ^ 1;
    if (throttled) throttle_step<Config::kKeys>(p, p.whole_tiles, seen, step);
    for (int panel = 0; panel < kDqk / 64; ++panel) {
      if (panel % 4 == 0) arch::mbarrier_wait(s.keys_empty[panel / 4], freed);
      if (lane == 0) arch::mbarrier_arrive_expect_tx(s.keys_full[panel], SingleConfig::kPanel);
      arch::tma_gather4<1>(arch::shared_address(&s.keys[panel]) + uint32_t(lane) * 512, p.rows, 64 * panel, keys,
                           arch::shared_address(&s.keys_full[panel]));
    }
    tile::load_gathered_keys(keys, entries, (step + 1) * Config::kKeys, lane);
  }
  count_missing_steps<Config::kKeys>(p, throttled, steps, lane);
}

// ---- products

// D [64 heads][64 keys] (+)= A · keysᵀ over one panel of 64 columns.
HOPWELL_DEVICE void multiply_scores(uint32_t d, uint32_t a, uint32_t keys, bool accumulate) {
  constexpr uint32_t kShape = arch::instruction_descriptor({.m = 64, .n = 64});
  HOPWELL_UNROLL
  for (uint32_t k = 0; k < 4; ++k)
    arch::tcgen05_mma_ws_f16(d, arch::at_address(tile::kTcgen05RowsAlongK, a + 32 * k),
                             arch::at_address(tile::kTcgen05RowsAlongK, keys + 32 * k), kShape, accumulate || k > 0);
}

// D [64][kN columns] (+)= A · B over 64 heads or keys. A [64][64] in the order kMajor, B panels of 64 columns,
// MN-major.
template <Major kMajor, int kN>
HOPWELL_DEVICE void multiply_rows(uint32_t d, uint32_t a, uint32_t b, bool accumulate) {
  constexpr uint32_t kShape = arch::instruction_descriptor({.m = 64, .n = kN, .a_major = kMajor, .b_major = Major::mn});
  HOPWELL_UNROLL
  for (uint32_t k = 0; k < 4; ++k)
    arch::tcgen05_mma_ws_f16(d,
                             kMajor == Major::k ? arch::at_address(tile::kTcgen05RowsAlongK, a + 32 * k)
                                                : arch::at_address(tile::kTcgen05RowsAcrossK<64>, a + 2048 * k),
                             arch::at_address(tile::kTcgen05RowsAcrossK<64>, b + 2048 * k), kShape,
                             accumulate || k > 0);
}

template <int kDqk>
HOPWELL_DEVICE void issue_scores(SingleStorage<kDqk>& s, int step) {
  const uint32_t parity = uint32_t(step & 1), keys = arch::shared_address(s.keys);
  HOPWELL_NO_UNROLL
  for (int panel = 0; panel < kDqk / 64; ++panel) {
    const uint32_t at = uint32_t(panel) * SingleConfig::kPanel;
    arch::mbarrier_wait(s.keys_full[panel], parity);
    multiply_scores(s.tmem + SingleTmem::kS, arch::shared_address(s.q) + at, keys + at, panel > 0);
  }
  arch::tcgen05_commit<1>(s.s_full);
  HOPWELL_NO_UNROLL
  for (int panel = 0; panel < Config::kPanelsV; ++panel) {
    const uint32_t at = uint32_t(panel) * SingleConfig::kPanel;
    multiply_scores(s.tmem + SingleTmem::kDp, arch::shared_address(s.d_out) + at, keys + at, panel > 0);
  }
  arch::tcgen05_commit<1>(s.dp_full);
}

template <int kDqk>
HOPWELL_DEVICE void issue_dq(const Params& p, SingleStorage<kDqk>& s, int step) {
  const uint32_t ds = arch::shared_address(&s.ds), keys = arch::shared_address(s.keys), d = s.tmem + SingleTmem::kDq;
  HOPWELL_UNROLL
  for (int part = 0; part < (kDqk + 255) / 256; ++part) {
    const uint32_t from = keys + uint32_t(4 * part) * SingleConfig::kPanel, to = d + uint32_t(128 * part);
    if (p.dq) {
      if (part < 2)
        multiply_rows<Major::k, 256>(to, ds, from, step > 0);
      else
        multiply_rows<Major::k, 64>(to, ds, from, step > 0);
    }
    arch::tcgen05_commit<1>(s.keys_empty[part]);
  }
}

// Chunks [first, last) of dKV of a step. `count`: number of all chunks so far.
template <int kDqk>
HOPWELL_DEVICE void issue_dkv(SingleStorage<kDqk>& s, int first, int last, int& count) {
  const uint32_t p = arch::shared_address(&s.p), ds = arch::shared_address(&s.ds);
  HOPWELL_NO_UNROLL
  for (int chunk = first; chunk < last; ++chunk, ++count) {
    const int region = count & 1;
    const uint32_t at = uint32_t(2 * chunk) * SingleConfig::kPanel, q = arch::shared_address(s.q) + at,
                   d = s.tmem + uint32_t(SingleTmem::kDkv + region * SingleTmem::kChunkColumns);
    tile::wait_tensor_memory(s.dkv_empty[region], uint32_t(count / 2 & 1) ^ 1);
    if (chunk < 4) {
      multiply_rows<Major::mn, 128>(d, ds, q, false);
      multiply_rows<Major::mn, 128>(d, p, arch::shared_address(s.d_out) + at, true);
    } else {
      multiply_rows<Major::mn, 64>(d, ds, q, false);  // columns 512-575 belong to keys only
    }
    arch::tcgen05_commit<1>(s.dkv_full[region]);
  }
}

// Executed by one thread.
template <int kDqk>
HOPWELL_DEVICE void issue(const Params& p, SingleStorage<kDqk>& s, int steps) {
  const int chunks = has_sums(p) ? SingleStorage<kDqk>::kChunks : 0, early = chunks < 2 ? chunks : 2;
  int count = 0;
  issue_scores(s, 0);
  for (int step = 0; step < steps; ++step) {
    arch::mbarrier_wait(s.ds_full, uint32_t(step & 1));  // also means that S and dP have been read
    arch::tcgen05_fence_after_thread_sync();             // kept: if sums are added, the fence in issue_dkv does this
    issue_dq(p, s, step);
    if (step + 1 == steps) arch::tcgen05_commit<1>(s.dq_full);
    issue_dkv(s, 0, early, count);
    if (step + 1 < steps) issue_scores(s, step + 1);
    issue_dkv(s, early, chunks, count);
    arch::tcgen05_commit<1>(s.ds_empty);
  }
  arch::mbarrier_wait(s.ds_empty, uint32_t(steps - 1) & 1);  // the CTA must not exit before its products end
}

// ---- P, dS and dQ

// Softmax of a thread's head and half of the step's keys.
template <bool kAttn, int kDqk>
HOPWELL_DEVICE void softmax(const Params& p, SingleStorage<kDqk>& s, const WorkTile& work, const Entries& entries) {
  const int quarter = arch::warp_index() % 4, position = 32 * quarter + arch::lane_index();
  const int row = position % 64, half = position / 64, steps = entries.tiles(Config::kKeys);
  const float lse_log2 = s.heads.lse_log2[row], sink_scale = kAttn ? s.heads.sink_scale[row] : 1,
              delta = s.heads.delta[row];
  const uint32_t tmem = arch::tmem_address(s.tmem, 32 * quarter, 0);
  const uint32_t shared_p = arch::shared_address(&s.p), shared_ds = arch::shared_address(&s.ds);
  for (int step = 0; step < steps; ++step) {
    const uint32_t parity = uint32_t(step & 1);
    uint32_t acc[32];
    float probability[32];
    tile::wait_tensor_memory(s.s_full, parity);
    tile::load_tensor_memory(acc, tmem + SingleTmem::kS);
    exponentiate(probability, acc, p.scale_log2, lse_log2);
    if constexpr (kAttn) add_attn(p, probability, work, entries, step * Config::kKeys + 32 * half);
    tile::wait_tensor_memory(s.dp_full, parity);
    tile::load_tensor_memory(acc, tmem + SingleTmem::kDp);
    arch::tcgen05_fence_before_thread_sync();
    arch::mbarrier_wait(s.ds_empty, parity ^ 1);
    HOPWELL_UNROLL
    for (int v = 0; v < 4; ++v) {
      const uint32_t at = tile::swizzled(row, 4 * half + v);
      store_p_and_ds(probability + 8 * v, acc + 8 * v, sink_scale, p.sm_scale, delta, shared_p + at, shared_ds + at);
    }
    arch::fence_proxy_async();
    arch::mbarrier_arrive(s.ds_full);
  }
}

template <int kDqk>
HOPWELL_DEVICE void store_dq_tile(const Params& p, SingleStorage<kDqk>& s, const WorkTile& work, int steps) {
  if (!p.dq) return;
  const int quarter = arch::warp_index() % 4, position = 32 * quarter + arch::lane_index(), half = position / 64;
  const DqRow row = dq_row<SingleConfig::kHeads>(p, work, position % 64, kDqk);
  if (steps == 0) return store_no_dq(row, half * (kDqk / 2), (half + 1) * (kDqk / 2));
  tile::wait_tensor_memory(s.dq_full, 0);
  const uint32_t tmem = arch::tmem_address(s.tmem, 32 * quarter, SingleTmem::kDq);
  store_dq<128>(row, 128 * half, tmem);
  store_dq<128>(row, 256 + 128 * half, tmem + 128);
  if constexpr (kDqk == 576) store_dq<32>(row, 512 + 32 * half, tmem + 256);
  arch::tcgen05_fence_before_thread_sync();
}

// ---- dKV

template <bool kFixed, int kDqk>
HOPWELL_DEVICE void scatter(const Params& p, SingleStorage<kDqk>& s, const Entries& entries) {
  const int quarter = arch::warp_index() % 4, half = quarter / 2, steps = entries.tiles(Config::kKeys);
  const uint32_t tmem = arch::tmem_address(s.tmem, 32 * quarter, SingleTmem::kDkv);
  int count = 0;
  for (int step = 0; step < steps; ++step) {
    SumRows<kFixed> rows[2];
    load_group_rows<kDqk>(rows, p, entries, step, 2 * (quarter & 1));
    HOPWELL_NO_UNROLL
    for (int chunk = 0; chunk < SingleStorage<kDqk>::kChunks; ++chunk, ++count) {
      const int region = count & 1;
      const uint32_t from = tmem + uint32_t(region * SingleTmem::kChunkColumns);
      tile::wait_tensor_memory(s.dkv_full[region], uint32_t(count / 2 & 1));
      if (chunk < 4)
        add_accumulator<kFixed, 64>(p, rows, from, s.dkv_empty[region], 128 * chunk + 64 * half);
      else
        add_accumulator<kFixed, 32>(p, rows, from, s.dkv_empty[region], 512 + 32 * half);
    }
  }
}

// ---- before the first step

template <int kDqk>
HOPWELL_DEVICE void init_barriers(SingleStorage<kDqk>& s) {
  tile::init_barriers(1, s.keys_full, s.keys_empty, s.s_full, s.dp_full, s.ds_empty, s.dkv_full, s.dq_full);
  tile::init_barriers(128, s.ds_full);
  tile::init_barriers(128, s.dkv_empty);  // kept: on the emulator any thread releases a tcgen05.ld of its warp
  arch::fence_mbarrier_init();            // kept: the fence that follows the copies of rows replaces it
}

// Loads Q and dO and computes the heads' values. Returns the entries up to the last valid one.
template <int kDqk, bool kAttn>
HOPWELL_DEVICE Entries prepare(const Params& p, SingleStorage<kDqk>& s, const WorkTile& work) {
  Entries entries = entries_of(p, work);
  const int warp = arch::warp_index(), heads = p.h_q - work.first_head;
  int batch[kEntryBatch];
  load_entries<Config::kThreads>(batch, entries, arch::thread_index());
  load_heads<64, kDqk / 64>(arch::shared_address(s.q), p.q + work.query * p.q_stride_s + work.first_head * p.q_stride_h,
                            p.q_stride_h, heads);
  load_heads<64, Config::kPanelsV>(arch::shared_address(s.d_out),
                                   p.d_out + work.query * p.d_out_stride_s + work.first_head * p.d_out_stride_h,
                                   p.d_out_stride_h, heads);
  arch::cp_async_commit();
  if (warp == 0 && arch::elect_one()) init_barriers(s);
  arch::syncwarp();  // kept: a lane has diverged
  if (role_of(warp) == Role::issue) s.tmem.allocate();
  prepare_heads<kAttn, Config::kWarps>(p, s.heads, work);
  find_last_valid(s.last_valid, batch, entries);
  arch::cp_async_wait<0>();
  arch::fence_proxy_async();
  arch::syncthreads();
  entries.length = length_of(s.last_valid);
  return entries;
}

#endif

template <int kDqk, bool kFixed, bool kAttn>
__global__ void __launch_bounds__(Config::kThreads, 1)
    sparse_mla_bwd_sm100_single(const __grid_constant__ GatherParams p) {
#if HOPWELL_HAS_SM100A
  auto& s = arch::dynamic_smem<SingleStorage<kDqk>>();
  const WorkTile work = work_tile_of(p, arch::block_index(), SingleConfig::kHeads);
  const Entries entries = prepare<kDqk, kAttn>(p, s, work);
  run_role<kFixed, kAttn>(p, s, work, entries);
  arch::syncthreads();
  if (role_of(arch::warp_index()) == Role::issue) s.tmem.free();
#endif
}

}  // namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET
