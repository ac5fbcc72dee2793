// sparse_mla_forward for Blackwell.
//
//     out[s,h,:] = Σ_i exp2(score[s,h,i] − m) · kv[indices[s,i], :512] / Σ_i exp2(…)    scores in units of log 2, m: reference
//
// Tile      one query, 64 heads, 64 keys a step; d_qk 576 or 512. A CTA each; 128 heads are two CTAs side by side, which meet
//           in L2. Products are tcgen05.mma.ws with M 64: results fill all 128 lanes, the halves of N one above the other.
// Q         384 columns in tensor memory, once in either half of the lanes, which multiply a half of N each; the others, for
//           which there is no room beside O, in shared memory. Keys are K of S and V of O from one place.
// Roles     warp 0      gather    four rows an instruction, a panel of 64 columns after the other
//           warp 1      issue     all products
//           warps 4-7   math      Q to tensor memory; S → P, a head and half of the keys a thread; in the end O
// Timeline  gather  │ keys 0 ▒▒▒▒│ keys 1 ▒▒▒▒│ (O 0 frees) keys 2 ▒▒▒▒│ …
//           issue                │ S 0 ▓▓▓│ S 1 ▓▓▓│ O 0 ▓▓│ S 2 ▓▓▓│ O 1 ▓▓│ …
//           math                          │ P 0    │ P 1            │ P 2 …
// Softmax   The reference m moves only when a row's maximum passes it by more than 8: then O and the sum are scaled by
//           exp2(m_old − m). P ≤ 2^8, whose bf16 is as exact as that of P ≤ 1.
// Budget    shared: Q 3 + keys 2 × 9 + P 2 panels of 8,192 B = 188,416, values and barriers 1,500; tensor memory: O 256 + Q 192
//           + S 2 × 32 = 480 + 32 = 512 columns
// Bound     shared memory: S 98,304 + O 81,920 B of operands, 73,728 of keys that come and 8,192 of P that is stored: 2,048
//           cycles a step; products 1,696 (24 × 28 + 12 × 32 + 8 × 80), of which 1,088 would do at the full rate; the gather
//           1,475. So it may reach 0.53 of the matmul rate. Keys of invalid entries are −1: their rows are zeros, P is 0.
#pragma once

#include <cmath>

#include "arch/sm80/async_copy.hpp"
#include "arch/sm90/cluster.hpp"
#include "ops/sparse_mla_forward/params.hpp"
#include "tile/gpu/ring.hpp"
#include "tile/gpu/tcgen05_panel.hpp"

namespace hopwell::ops::sparse_mla_forward::HOPWELL_TARGET {

using arch::Major;
using tile::Entries;

struct Config {
  static constexpr int kHeads = 64, kKeys = 64, kDv = 512, kStages = 2, kThreads = 256;
  static constexpr int kFirstMathWarp = 4, kMathThreads = 128;
  static constexpr int kTmemPanels = 6;  // of Q, 64 columns each; the rest is in shared memory
};
enum WarpRole { kGather, kIssue };  // and the math warps
struct Tmem {
  static constexpr int kOut = 0, kQ = 256, kScores = 448, kScoreColumns = 32, kColumns = 512;
};
enum NamedBarrier { kMathBarrier = 1 };  // kMathBarrier + i: math warps i and i + 2, which have the same heads

template <int kDqk>
struct SharedStorage {
  static constexpr int kPanels = kDqk / 64, kQPanels = kPanels - Config::kTmemPanels;
  alignas(1024) unsigned char q[kQPanels][tile::kPanelBytes];
  alignas(1024) unsigned char keys[Config::kStages][kPanels][tile::kPanelBytes];
  alignas(1024) unsigned char p[2][tile::kPanelBytes];
  float max[2][2][Config::kHeads];                           // [step % 2][half of the keys]: of this step
  float sum[2][Config::kHeads], largest[2][Config::kHeads];  // in the end
  tile::RingBarriers<Config::kStages> key_barriers;
  arch::mbarrier q_full, s_full[2], p_full[2], out_full[2];  // out_full: O has P of the step
  uint32_t tmem;
};
static_assert(sizeof(SharedStorage<576>) <= arch::sm90::kMaxSharedBytes);

// The parameters, and keys as the copy engine sees them: 64 columns of a row.
struct GatherParams : Params {
  arch::TensorMap keys;
};

#if HOPWELL_HAS_SM100A

using KeySlot = tile::RingSlot<Config::kStages>;

// What a CTA works on.
struct WorkTile {
  int query, first_head;
};
HOPWELL_DEVICE WorkTile work_tile(const Params& p) {
  const int block = arch::block_index();
  return {block / p.head_tiles, block % p.head_tiles * Config::kHeads};
}
HOPWELL_DEVICE int steps_of(const Entries& entries) { return (entries.length + Config::kKeys - 1) / Config::kKeys; }

// ---- gather

// By a warp.
template <int kDqk>
HOPWELL_DEVICE void gather(const GatherParams& p, SharedStorage<kDqk>& s, const Entries& entries) {
  const int lane = arch::lane_index(), steps = steps_of(entries);
  int keys[4];
  tile::load_gathered_keys(keys, entries, 0, lane);
  for (int step = 0; step < steps; ++step) {
    const KeySlot slot{s.key_barriers, step};
    tile::gather_tile<SharedStorage<kDqk>::kPanels>(slot, s.keys[slot.stage()], p.keys, keys);
    tile::load_gathered_keys(keys, entries, (step + 1) * Config::kKeys, lane);
  }
}

// ---- issue

// S [64 heads][64 keys] = Q Kᵀ, where that of two steps ago was: P came of it, for which multiply_values has waited.
template <int kDqk>
HOPWELL_DEVICE void multiply_scores(SharedStorage<kDqk>& s, int step) {
  constexpr uint32_t kShape = arch::instruction_descriptor({.m = Config::kHeads, .n = Config::kKeys});
  const KeySlot slot{s.key_barriers, step};
  const uint32_t d = arch::tmem_address(s.tmem, 0, Tmem::kScores + step % 2 * Tmem::kScoreColumns);
  slot.wait_full();
  arch::tcgen05_fence_after_thread_sync();
  HOPWELL_NO_UNROLL
  for (int panel = 0; panel < SharedStorage<kDqk>::kPanels; ++panel) {
    const uint32_t keys = arch::shared_address(s.keys[slot.stage()][panel]);
    HOPWELL_UNROLL
    for (int k = 0; k < 4; ++k) {
      const uint64_t b = arch::at_address(tile::kTcgen05RowsAlongK, keys + uint32_t(32 * k));
      if (panel < Config::kTmemPanels)
        arch::tcgen05_mma_ws_f16_ts(d, arch::tmem_address(s.tmem, 0, Tmem::kQ + 32 * panel + 8 * k), b, kShape,
                                    panel + k > 0);
      else
        arch::tcgen05_mma_ws_f16(
            d,
            arch::at_address(tile::kTcgen05RowsAlongK,
                             arch::shared_address(s.q[panel - Config::kTmemPanels]) + uint32_t(32 * k)),
            b, kShape, true);
    }
  }
  arch::tcgen05_commit<1>(s.s_full[step % 2]);
}

// O [64 heads][512 columns] (+)= P V, V the first 512 columns of the keys.
template <int kDqk>
HOPWELL_DEVICE void multiply_values(SharedStorage<kDqk>& s, int step) {
  constexpr uint32_t kShape = arch::instruction_descriptor({.m = Config::kHeads, .n = 256, .b_major = Major::mn});
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
          arch::at_address(tile::kTcgen05RowsAcrossK<Config::kKeys>, keys + 4 * half * tile::kPanelBytes + 2048 * k),
          kShape, step > 0 || k > 0);
  }
  arch::tcgen05_commit<1>(slot.empty());
  arch::tcgen05_commit<1>(s.out_full[step % 2]);
}

// By one thread. Its last commit is one that math waits for, so that the CTA does not exit before its products end.
template <int kDqk>
HOPWELL_DEVICE void issue(SharedStorage<kDqk>& s, int steps) {
  if (steps == 0) return;
  arch::mbarrier_wait(s.q_full, 0);
  multiply_scores(s, 0);
  for (int step = 0; step < steps; ++step) {
    if (step + 1 < steps) multiply_scores(s, step + 1);
    multiply_values(s, step);
  }
}

// ---- math

// A thread's head, and which half of a step's keys and of O's columns it has.
struct MathThread {
  int warp = arch::warp_index() % 4, row = (32 * warp + arch::lane_index()) % 64, half = warp / 2;
};

// The warps of the two halves meet.
HOPWELL_DEVICE void meet(const MathThread& at, arch::Site site = arch::Site::current()) {
  arch::barrier_sync(kMathBarrier + at.warp % 2, 64, site);
}

HOPWELL_DEVICE const bf16* q_row(const Params& p, const WorkTile& work, int row) {
  return p.q + work.query * p.q_stride_s + (work.first_head + row) * p.q_stride_h;
}

// Q: 384 columns of a thread's head to its lane of tensor memory; all threads copy the rest of all heads. Zeros for heads
// that do not exist.
template <int kDqk>
HOPWELL_DEVICE void load_q(const Params& p, SharedStorage<kDqk>& s, const WorkTile& work, const MathThread& at) {
  constexpr int kColumns = 64 * Config::kTmemPanels, kChunks = 8 * SharedStorage<kDqk>::kQPanels;
  const int thread = arch::thread_index() % Config::kMathThreads, heads = p.h_q - work.first_head;
  for (int i = thread; i < Config::kHeads * kChunks; i += Config::kMathThreads) {
    const int row = i / kChunks, chunk = i % kChunks;
    arch::cp_async(arch::shared_address(s.q[chunk / 8]) + tile::swizzled(row, chunk % 8),
                   q_row(p, work, row < heads ? row : 0) + kColumns + 8 * chunk, row < heads ? 16 : 0);
  }
  arch::cp_async_commit();
  const bf16* const from = q_row(p, work, at.row < heads ? at.row : 0);
  HOPWELL_NO_UNROLL
  for (int column = 0; column < kColumns; column += 64) {
    uint32_t words[32];
    HOPWELL_UNROLL
    for (int i = 0; i < 32; i += 4) {
      const arch::Words4 loaded = at.row < heads ? arch::load_streaming(from + column + 2 * i) : arch::Words4{};
      HOPWELL_UNROLL
      for (int j = 0; j < 4; ++j) words[i + j] = loaded.w[j];
    }
    arch::tmem_store<arch::TmemShape::b32x32>(arch::tmem_address(s.tmem, 32 * at.warp, Tmem::kQ + column / 2), words);
  }
  arch::tmem_wait_store();
  arch::tcgen05_fence_before_thread_sync();
  arch::cp_async_wait<0>();
  arch::fence_proxy_async();
  arch::mbarrier_arrive(s.q_full);
}

// A bit for each of this thread's 32 keys: whether its entry counts.
HOPWELL_DEVICE uint32_t valid_keys(const Entries& entries, int step, const MathThread& at) {
  return arch::ballot(entries.key(step * Config::kKeys + 32 * at.half + arch::lane_index()) >= 0);
}

// This thread's columns of O times `factor`, once the products so far have ended.
template <int kDqk>
HOPWELL_DEVICE void scale_out(SharedStorage<kDqk>& s, const MathThread& at, int step, float factor) {
  arch::mbarrier_wait(s.out_full[(step - 1) % 2], uint32_t((step - 1) / 2 & 1));
  arch::tcgen05_fence_after_thread_sync();
  HOPWELL_NO_UNROLL
  for (int column = 0; column < Config::kDv / 2; column += 32) {
    const uint32_t address = arch::tmem_address(s.tmem, 32 * at.warp, Tmem::kOut + column);
    uint32_t out[32];
    arch::tmem_load<arch::TmemShape::b32x32>(out, address);
    arch::tmem_wait_load(out);
    HOPWELL_UNROLL
    for (int i = 0; i < 32; ++i) out[i] = arch::bit_cast<uint32_t>(arch::bit_cast<float>(out[i]) * factor);
    arch::tmem_store<arch::TmemShape::b32x32>(address, out);
  }
  arch::tmem_wait_store();
}

// A head's running softmax; both threads of a head have the same reference.
struct RunningSoftmax {
  float reference = -INFINITY, max = -INFINITY, sum = 0;
};

// Scores of a step, in registers, in units of log 2; −inf where the entry does not count.
template <int kDqk>
HOPWELL_DEVICE void load_scores(float (&x)[32], const Params& p, SharedStorage<kDqk>& s, const MathThread& at, int step,
                                uint32_t valid) {
  uint32_t loaded[32];
  arch::mbarrier_wait(s.s_full[step % 2], uint32_t(step / 2 & 1));
  arch::tcgen05_fence_after_thread_sync();
  arch::tmem_load<arch::TmemShape::b32x32>(
      loaded, arch::tmem_address(s.tmem, 32 * at.warp, Tmem::kScores + step % 2 * Tmem::kScoreColumns));
  arch::tmem_wait_load(loaded);
  HOPWELL_UNROLL
  for (int i = 0; i < 32; ++i) x[i] = valid >> i & 1 ? arch::bit_cast<float>(loaded[i]) * p.scale_log2 : -INFINITY;
}

// Moves the reference if this step's maximum passes it by more than the slack, and O and the sum with it.
template <int kDqk>
HOPWELL_DEVICE void follow_max(RunningSoftmax& softmax, SharedStorage<kDqk>& s, const MathThread& at, int step,
                               float own_max) {
  s.max[step % 2][at.half][at.row] = own_max;
  meet(at);
  const float max = fmaxf(own_max, s.max[step % 2][at.half ^ 1][at.row]);
  softmax.max = fmaxf(softmax.max, max);
  const float next = tile::next_reference(softmax.reference, max);
  const float factor = tile::move_reference(softmax.reference, softmax.sum, next);
  if (step > 0 && arch::ballot(factor != 1)) scale_out(s, at, step, factor);
}

// P of this thread's keys to shared memory, where that of two steps ago was: its products were issued before this step's S.
template <int kDqk>
HOPWELL_DEVICE void store_p(RunningSoftmax& softmax, SharedStorage<kDqk>& s, const MathThread& at, int step,
                            float (&x)[32]) {
  const float reference = tile::finite_reference(softmax.reference);
  const uint32_t to = arch::shared_address(s.p[step % 2]);
  HOPWELL_UNROLL
  for (int i = 0; i < 32; ++i) x[i] = arch::exp2_approx(x[i] - reference), softmax.sum += x[i];
  HOPWELL_UNROLL
  for (int v = 0; v < 4; ++v) {
    arch::Words4 words;
    HOPWELL_UNROLL
    for (int i = 0; i < 4; ++i) words.w[i] = arch::pack_bf16(x[8 * v + 2 * i], x[8 * v + 2 * i + 1]);
    arch::store_shared_v4(to + tile::swizzled(at.row, 4 * at.half + v), words);
  }
  arch::fence_proxy_async();
  arch::tcgen05_fence_before_thread_sync();  // S has been read, O may have been scaled
  arch::mbarrier_arrive(s.p_full[step % 2]);
}

// 32 columns of O at a time, scaled, to global memory; zeros where there was no step.
template <int kDqk>
HOPWELL_DEVICE void store_out(const Params& p, SharedStorage<kDqk>& s, const WorkTile& work, const MathThread& at,
                              int steps, float scale) {
  const int head = work.first_head + at.row;
  bf16* const out = p.out + work.query * p.out_stride_s + head * p.out_stride_h;
  HOPWELL_NO_UNROLL
  for (int column = 0; column < Config::kDv / 2; column += 32) {
    uint32_t x[32] = {};
    if (steps > 0) {
      arch::tmem_load<arch::TmemShape::b32x32>(x, arch::tmem_address(s.tmem, 32 * at.warp, Tmem::kOut + column));
      arch::tmem_wait_load(x);
    }
    const auto value = [&](int i) { return scale == 0 ? 0 : arch::bit_cast<float>(x[i]) * scale; };
    HOPWELL_UNROLL
    for (int i = 0; i < 32; i += 8) {
      arch::Words4 words;
      HOPWELL_UNROLL
      for (int j = 0; j < 4; ++j) words.w[j] = arch::pack_bf16(value(i + 2 * j), value(i + 2 * j + 1));
      // Lanes 0 to 63 have the first 128 of each 256 columns.
      if (head < p.h_q) store_columns(p, out + column % 128 + column / 128 * 256 + 128 * at.half + i, words);
    }
  }
}

template <int kDqk>
HOPWELL_DEVICE void finish(const Params& p, SharedStorage<kDqk>& s, const WorkTile& work, const MathThread& at,
                           const RunningSoftmax& softmax, int steps) {
  const int head = work.first_head + at.row;
  s.sum[at.half][at.row] = softmax.sum;
  meet(at);
  const float sum = s.sum[0][at.row] + s.sum[1][at.row], reference = tile::finite_reference(softmax.reference);
  const float lse = tile::lse_of(reference, sum);
  if (steps > 0) {
    arch::mbarrier_wait(s.out_full[(steps - 1) % 2], uint32_t((steps - 1) / 2 & 1));
    arch::tcgen05_fence_after_thread_sync();
  }
  store_out(p, s, work, at, steps, output_scale(p, head, 1, sum, lse));
  if (head < p.h_q && at.half == 0) store_statistics(p, work.query, head, tile::max_or_nan(softmax.max, sum), lse);
  arch::tcgen05_fence_before_thread_sync();
}

template <int kDqk>
HOPWELL_DEVICE void math(const Params& p, SharedStorage<kDqk>& s, const WorkTile& work, const Entries& entries) {
  const MathThread at;
  const int steps = steps_of(entries);
  RunningSoftmax softmax;
  uint32_t valid = valid_keys(entries, 0, at);
  if (steps > 0) load_q(p, s, work, at);
  for (int step = 0; step < steps; ++step) {
    const uint32_t next = valid_keys(entries, step + 1, at);
    float x[32];
    load_scores(x, p, s, at, step, valid);
    float max = x[0];
    HOPWELL_UNROLL
    for (int i = 1; i < 32; ++i) max = fmaxf(max, x[i]);
    follow_max(softmax, s, at, step, max);
    store_p(softmax, s, at, step, x);
    valid = next;
  }
  finish(p, s, work, at, softmax, steps);
}

#endif

// ---- kernel

template <int kDqk>
__global__ void __launch_bounds__(Config::kThreads, 1) attention_kernel(const __grid_constant__ GatherParams p) {
#if HOPWELL_HAS_SM100A
  auto& s = arch::dynamic_smem<SharedStorage<kDqk>>();
  const WorkTile work = work_tile(p);
  const Entries entries = tile::entries_of(p.selection, work.query);
  const int warp = arch::warp_index();
  if (arch::thread_index() == 0) {
    s.key_barriers.init(1, 1);
    arch::mbarrier_init(s.q_full, Config::kMathThreads);
    for (int i = 0; i < 2; ++i) {
      arch::mbarrier_init(s.s_full[i], 1);
      arch::mbarrier_init(s.p_full[i], Config::kMathThreads);
      arch::mbarrier_init(s.out_full[i], 1);
    }
    arch::fence_mbarrier_init();
  }
  arch::syncwarp();  // kept: a lane branched off
  if (warp == kIssue) {
    arch::tmem_allocate<1>(s.tmem, Tmem::kColumns);
    arch::tmem_relinquish<1>();
  }
  arch::syncthreads();
  if (warp == kGather) gather(p, s, entries);
  if (warp == kIssue && arch::elect_one()) issue(s, steps_of(entries));
  if (warp >= Config::kFirstMathWarp) math(p, s, work, entries);
  arch::syncwarp();  // kept: lanes branched off
  arch::syncthreads();
  if (warp == kIssue) {
    arch::tcgen05_fence_after_thread_sync();  // kept: PTX's examples do without
    arch::tmem_deallocate<1>(s.tmem, Tmem::kColumns);
  }
#endif
}

}  // namespace hopwell::ops::sparse_mla_forward::HOPWELL_TARGET
