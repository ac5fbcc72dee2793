// sparse_mla_forward on Blackwell: the kernel for one query and 64 heads on one CTA.
//
//     out[s,h,:] = Σ_i exp2(score[s,h,i] − m) · kv[indices[s,i], :512] / Σ_i exp2(…)
//                                                     scores in units of log 2, m: row_max
//
// Tile      one query, 64 heads, 64 keys per step; d_qk 576 or 512. The keys in shared memory serve as K of S and V of
//           O.
// Products  tcgen05.mma.ws. S [64 heads][64 keys] = Q Kᵀ with M 64; Oᵀ [512 columns][64 heads] = Vᵀ Pᵀ with M 128, in
//           parts of 128 columns. So P is the second operand, and four collector buffers keep it, 16 keys each, for all
//           parts. S has Q in tensor memory and its keys alternate between two collector buffers: one is filled while
//           the other is multiplied.
// Ring      A stage: 128 columns of 64 keys, a part of a step. O releases it right after its products. The last 64 of
//           576 columns have two buffers of their own, which S releases. So the keys of almost three steps are present
//           or in flight.
// Roles     warp 0      gather    producer: four rows of a panel of 64 columns per instruction
//           warp 1      issue     mma: all products
//           warps 4-7   math      Q to tensor memory; softmax: S → P, one head and half of the keys per thread;
//                                 epilogue: four rows of Oᵀ per thread, which are output columns, for all heads
// Timeline  gather  │ keys 0 ▒▒▒▒│ keys 1 ▒▒▒▒│ keys 2 ▒▒▒│ (O 0 frees, part by part) keys 2, 3 ▒▒▒▒│ …
//           issue                │ S 0 ▓▓▓│ S 1 ▓▓▓│ O 0 ▓▓│ S 2 ▓▓▓│ O 1 ▓▓│ …
//           math                          │ P 0    │ P 1            │ P 2 …
// Budget    shared: (Q 2 + keys 11 × 2 + 2 + P 2) panels of 8,192 B = 229,376, values and barriers 2,100 (of 232,448);
//           tensor memory: Oᵀ 256 + Q 224 + S 32 = 512 columns
// Bound     shared memory: S 90,112 + O 73,728 B of operands, 73,728 B of arriving keys, 8,192 B of stored P: 1,920
//           cycles per step. The gather takes 1,728. Products take 1,364 (28 × 16 + 8 × 32 and 4 × 48 + 12 × 39); 1,088
//           at the full rate. So the kernel can reach 0.57 of the matmul rate. Without collector buffers, O would read
//           98,304 B, and a step would take 2,112 cycles.
#pragma once

#include "ops/sparse_mla_forward/sm100/tile.hpp"

namespace hopwell::ops::sparse_mla_forward::HOPWELL_TARGET {

struct SingleConfig {
  static constexpr int kThreads = 256, kGatherWarp = 0, kIssueWarp = 1;
  static constexpr int kPartPanels = 2, kPartColumns = 64 * kPartPanels, kParts = Config::kDv / kPartColumns;
  static constexpr int kTails = 2;
};

template <int kDqk>
struct SingleStorage : MathStorage<kDqk, 1, 7> {
  static constexpr bool kHasTail = kDqk > Config::kDv;
  static constexpr int kStages = kHasTail ? 11 : 12;  // as many as fit
  alignas(1024) unsigned char keys[kStages][SingleConfig::kPartPanels][tile::kPanelBytes];
  alignas(
      1024) unsigned char tail[SingleConfig::kTails][kHasTail ? tile::kPanelBytes : 16];  // columns that are not values
  float max[2][2][Config::kHeads];           // [of this step, of all][half of the keys]
  float factor[Config::kHeads];              // row_scale of O
  bool moves[2][Config::kMathThreads / 32];  // [step % 2][warp]: whether a row_max changes
  tile::RingBarriers<kStages> key_barriers;
  tile::RingBarriers<SingleConfig::kTails> tail_barriers;
  arch::mbarrier q_full;
};
static_assert(sizeof(SingleStorage<576>) <= arch::sm90::kMaxSharedBytes &&
              sizeof(SingleStorage<512>) <= arch::sm90::kMaxSharedBytes);

#if HOPWELL_HAS_SM100A

// The ring's items are parts of a step's keys.
template <int kDqk>
HOPWELL_DEVICE tile::RingSlot<SingleStorage<kDqk>::kStages> part_slot(SingleStorage<kDqk>& s, int step, int part) {
  return {s.key_barriers, SingleConfig::kParts * step + part};
}
using SingleTailSlot = tile::RingSlot<SingleConfig::kTails>;

// Executed by one warp.
template <int kDqk>
HOPWELL_DEVICE void gather(const GatherParams& p, SingleStorage<kDqk>& s, const Entries& entries) {
  using Storage = SingleStorage<kDqk>;
  const int lane = arch::lane_index(), steps = entries.tiles(Storage::kKeys);
  int keys[4];
  tile::load_gathered_keys(keys, entries, 0, lane);
  for (int step = 0; step < steps; ++step) {
    HOPWELL_NO_UNROLL
    for (int part = 0; part < SingleConfig::kParts; ++part) {
      const auto slot = part_slot(s, step, part);
      tile::gather_tile<SingleConfig::kPartPanels>(slot, s.keys[slot.stage()], p.keys, keys,
                                                   SingleConfig::kPartColumns * part);
    }
    if constexpr (Storage::kHasTail) {
      const SingleTailSlot slot{s.tail_barriers, step};
      tile::gather_tile<1>(slot, s.tail[slot.stage()], p.keys, keys, Config::kDv);
    }
    tile::load_gathered_keys(keys, entries, (step + 1) * Storage::kKeys, lane);
  }
}

// Q, copied by the math warps: 448 columns of a thread's head to its lane of tensor memory, the rest of all heads to
// shared memory.
template <int kDqk>
HOPWELL_DEVICE void load_queries(const Params& p, SingleStorage<kDqk>& s, const WorkTile& work) {
  constexpr int kColumns = 64 * SingleStorage<kDqk>::kTmemPanels;
  const MathThread at{s.tmem};
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
    arch::tmem_store<arch::TmemShape::b32x32>(arch::tmem_address(at.tmem, 32 * at.warp, Tmem::kQ + column / 2), words);
  }
  arch::tmem_wait_store();
  arch::tcgen05_fence_before_thread_sync();
  arch::cp_async_wait<0>();
  arch::fence_proxy_async();
  tell_issue<SingleStorage<kDqk>>(s.q_full);
}

// S (+)= Q Kᵀ over 16 columns, number `k` of a panel. kBuffer: collector buffer of the keys.
template <int kBuffer, int kDqk>
HOPWELL_DEVICE void multiply_columns(SingleStorage<kDqk>& s, uint32_t tmem, int panel, int k, const unsigned char* keys,
                                     bool accumulate) {
  constexpr auto kDiscard = arch::CollectorUsage::discard;
  constexpr int kTmemPanels = SingleStorage<kDqk>::kTmemPanels;
  constexpr uint32_t kShape = arch::instruction_descriptor({.m = 64, .n = 64});
  const uint32_t d = arch::tmem_address(tmem, 0, SingleStorage<kDqk>::kScores);
  const uint64_t b = columns_along_k(keys, k);
  if (panel < kTmemPanels)
    arch::tcgen05_mma_ws_f16_ts<kDiscard, kBuffer>(d, arch::tmem_address(tmem, 0, Tmem::kQ + 32 * panel + 8 * k), b,
                                                   kShape, accumulate);
  else
    arch::tcgen05_mma_ws_f16<kDiscard, kBuffer>(d, columns_along_k(s.q[panel - kTmemPanels], k), b, kShape, accumulate);
}

// S (+)= Q Kᵀ over a panel.
template <int kDqk>
HOPWELL_DEVICE void multiply_panel(SingleStorage<kDqk>& s, uint32_t tmem, int panel, const unsigned char* keys) {
  HOPWELL_UNROLL
  for (int k = 0; k < 4; k += 2) {
    multiply_columns<0>(s, tmem, panel, k, keys, panel + k > 0);
    multiply_columns<1>(s, tmem, panel, k + 1, keys, true);
  }
}

// S [64 heads][64 keys] = Q Kᵀ, in the columns of the previous step's S.
template <int kDqk>
HOPWELL_DEVICE void multiply_scores(SingleStorage<kDqk>& s, uint32_t tmem, int step) {
  constexpr int kPartPanels = SingleConfig::kPartPanels;
  wait_scores_read(s, step);
  HOPWELL_NO_UNROLL
  for (int part = 0; part < SingleConfig::kParts; ++part) {
    const auto slot = part_slot(s, step, part);
    slot.wait_full();
    HOPWELL_NO_UNROLL
    for (int i = 0; i < kPartPanels; ++i) multiply_panel(s, tmem, kPartPanels * part + i, s.keys[slot.stage()][i]);
  }
  if constexpr (SingleStorage<kDqk>::kHasTail) {
    const SingleTailSlot slot{s.tail_barriers, step};
    slot.wait_full();
    multiply_panel(s, tmem, Config::kDv / 64, s.tail[slot.stage()]);
    arch::tcgen05_commit<1>(slot.empty());
  }
  arch::tcgen05_commit<1>(s.s_full[step % 2]);
}

// Oᵀ [512 columns][64 heads] (+)= Vᵀ Pᵀ over a step's keys, for one part of the columns. V is the first 512 columns of
// the keys. kUsage: use of the collector buffers for P.
template <arch::CollectorUsage kUsage, int kDqk>
HOPWELL_DEVICE void multiply_part(SingleStorage<kDqk>& s, uint32_t tmem, int step, int part) {
  constexpr uint32_t kShape = arch::instruction_descriptor({.m = 128, .n = 64, .a_major = Major::mn});
  const auto slot = part_slot(s, step, part);
  const unsigned char* const p = s.p[step % 2][0];
  const uint32_t d = arch::tmem_address(tmem, 0, Tmem::kOut + 64 * part),
                 values = arch::shared_address(s.keys[slot.stage()]);
  const auto a = [&](uint32_t k) { return arch::at_address(tile::kTcgen05RowsAcrossK<64>, values + 2048 * k); };
  arch::tcgen05_mma_ws_f16<kUsage, 0>(d, a(0), columns_along_k(p, 0), kShape, step > 0);
  arch::tcgen05_mma_ws_f16<kUsage, 1>(d, a(1), columns_along_k(p, 1), kShape, true);
  arch::tcgen05_mma_ws_f16<kUsage, 2>(d, a(2), columns_along_k(p, 2), kShape, true);
  arch::tcgen05_mma_ws_f16<kUsage, 3>(d, a(3), columns_along_k(p, 3), kShape, true);
  arch::tcgen05_commit<1>(slot.empty());
}

template <int kDqk>
HOPWELL_DEVICE void multiply_values(SingleStorage<kDqk>& s, uint32_t tmem, int step) {
  constexpr int kLast = SingleConfig::kParts - 1;
  tile::wait_tensor_memory(s.p_full[step % 2], uint32_t(step / 2 & 1));
  multiply_part<arch::CollectorUsage::fill>(s, tmem, step, 0);
  HOPWELL_NO_UNROLL
  for (int part = 1; part < kLast; ++part) multiply_part<arch::CollectorUsage::use>(s, tmem, step, part);
  multiply_part<arch::CollectorUsage::lastuse>(s, tmem, step, kLast);
  arch::tcgen05_commit<1>(s.out_full[step % 2]);
}

// Executed by one thread. Math waits for its last commit, so that the CTA does not exit before its products end.
template <int kDqk>
HOPWELL_DEVICE void issue(SingleStorage<kDqk>& s, int steps) {
  if (steps == 0) return;
  const uint32_t tmem = s.tmem;
  arch::mbarrier_wait(s.q_full, 0);
  multiply_scores(s, tmem, 0);
  for (int step = 0; step < steps; ++step) {
    if (step + 1 < steps) multiply_scores(s, tmem, step + 1);
    multiply_values(s, tmem, step);
  }
}

// ---- math: Oᵀ's rows are output columns; a thread has four of them, for all heads

HOPWELL_DEVICE void meet(arch::Site site = arch::Site::current()) {
  arch::barrier_sync(kMathBarrier, Config::kMathThreads, site);
}

// Whether `moves` is true in any math thread.
template <int kDqk>
HOPWELL_DEVICE bool any_moves(SingleStorage<kDqk>& s, const MathThread& at, int step, bool moves) {
  auto& votes = s.moves[step % 2];
  const int lane = arch::lane_index();
  const uint32_t of_warp = arch::ballot(moves);
  if (lane == 0) votes[at.warp] = of_warp != 0;
  meet();
  return arch::ballot(lane < Config::kMathThreads / 32 && votes[lane]) != 0;
}

// A lane's two of all heads' row_scale: for heads l and l + 32.
template <int kDqk>
HOPWELL_DEVICE void share_factors(float (&of_lane)[2], SingleStorage<kDqk>& s, const MathThread& at, float factor) {
  if (at.half == 0) s.factor[at.row] = factor;
  meet();
  HOPWELL_UNROLL
  for (int i = 0; i < 2; ++i) of_lane[i] = s.factor[arch::lane_index() + 32 * i];
}

// Updates row_max where this step's maxima exceed it by more than rescale_threshold; then rescales O and the sums. This
// is rare.
template <int kDqk>
HOPWELL_DEVICE void follow_max(RunningSoftmax& softmax, SingleStorage<kDqk>& s, const MathThread& at, const Step& step,
                               float own_max) {
  softmax.max = fmaxf(softmax.max, own_max);  // over this thread's keys
  const bool moves = tile::next_row_max(softmax.row_max, own_max) != softmax.row_max;
  if (!any_moves(s, at, step.number, moves)) return;
  s.max[0][at.half][at.row] = own_max;
  meet();
  const float next = tile::next_row_max(softmax.row_max, fmaxf(own_max, s.max[0][at.half ^ 1][at.row]));
  const float factor = tile::update_row_max(softmax.row_max, softmax.sum, next);
  if (step.first) return;
  float factors[2];
  share_factors(factors, s, at, factor);
  scale_out(s, at, step.number,
            [&](int column, int i) { return arch::shuffle(column % 64 == 0 ? factors[0] : factors[1], i); });
}

// Lanes at a distance of `distance` exchange every second group of `width` words. Afterwards each lane has groups twice
// as wide for half as many heads, with the columns of the lower lane first.
HOPWELL_DEVICE void widen_pieces(uint32_t (&x)[16], int width, int distance) {
  const bool upper = arch::lane_index() & distance;
  HOPWELL_UNROLL
  for (int i = 0; i < 16; i += 2 * width) {
    HOPWELL_UNROLL
    for (int j = i; j < i + width; ++j) {
      const uint32_t low = x[j], high = x[j + width], got = arch::shuffle_xor(upper ? low : high, distance);
      x[j] = upper ? got : low;
      x[j + width] = upper ? high : got;
    }
  }
}

// Input: a column of 32 heads per lane. Output: 16 columns of two heads: heads (lane mod 16) + 16 i, columns from 16
// (lane / 16) on.
HOPWELL_DEVICE void transpose_out(uint32_t (&words)[16], const float (&x)[32]) {
  const bool upper = arch::lane_index() & 1;
  HOPWELL_UNROLL
  for (int i = 0; i < 16; ++i) {
    const float got = arch::shuffle_xor(upper ? x[2 * i] : x[2 * i + 1], 1);
    words[i] = arch::pack_bf16(upper ? got : x[2 * i], upper ? x[2 * i + 1] : got);
  }
  widen_pieces(words, 1, 2);
  widen_pieces(words, 2, 4);
  widen_pieces(words, 4, 8);
}

// Stores Oᵀ times the heads' scales to global memory, 32 heads of this thread's columns at a time; zeros if there was
// no step.
template <int kDqk>
HOPWELL_DEVICE void store_out(const GatherParams& p, SingleStorage<kDqk>& s, const WorkTile& work, const MathThread& at,
                              int steps, const float (&factors)[2]) {
  const int lane = arch::lane_index();
  HOPWELL_NO_UNROLL
  for (int column = 0; column < Tmem::kQ; column += 32) {
    uint32_t loaded[32] = {}, words[16];
    if (steps > 0) tile::load_tensor_memory(loaded, arch::tmem_address(at.tmem, 32 * at.warp, Tmem::kOut + column));
    const float of_lane = column % 64 == 0 ? factors[0] : factors[1];
    float x[32];
    HOPWELL_UNROLL
    for (int i = 0; i < 32; ++i) {
      const float factor = arch::shuffle(of_lane, i);
      x[i] = factor == 0 ? 0 : arch::bit_cast<float>(loaded[i]) * factor;
    }
    transpose_out(words, x);
    HOPWELL_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int head = work.first_head + column % 64 + 16 * i + lane % 16;
      arch::Words8 row;
      HOPWELL_UNROLL
      for (int j = 0; j < 8; ++j) row.w[j] = words[8 * i + j];
      if (head < p.h_q)
        store_columns(p,
                      p.out + work.query * p.out_stride_s + head * p.out_stride_h + 128 * (column / 64) + 32 * at.warp +
                          16 * (lane / 16),
                      row);
    }
  }
}

template <int kDqk>
HOPWELL_DEVICE void finish(const GatherParams& p, SingleStorage<kDqk>& s, const WorkTile& work, const MathThread& at,
                           const RunningSoftmax& softmax, int steps, int last) {
  const int head = work.first_head + at.row;
  float sum = 0, max = -INFINITY, factors[2];
  if (steps > 0) {
    s.sum[at.half][at.row] = softmax.sum;
    s.max[1][at.half][at.row] = softmax.max;
    meet();
    sum = s.sum[0][at.row] + s.sum[1][at.row];
    max = fmaxf(s.max[1][0][at.row], s.max[1][1][at.row]);
    wait_out(s, last);
    arch::tcgen05_fence_after_thread_sync();
  }
  const float lse = tile::lse_of(tile::finite_row_max(softmax.row_max), sum);
  share_factors(factors, s, at, output_scale(p, head, 1, sum, lse));
  store_out(p, s, work, at, steps, factors);
  if (head < p.h_q && at.half == 0) store_statistics(p, work.query, head, tile::max_or_nan(max, sum), lse);
  arch::tcgen05_fence_before_thread_sync();
}

#endif

template <int kDqk>
__global__ void __launch_bounds__(SingleConfig::kThreads, 1)
    sparse_mla_fwd_sm100_single(const __grid_constant__ GatherParams p) {
#if HOPWELL_HAS_SM100A
  auto& s = arch::dynamic_smem<SingleStorage<kDqk>>();
  const WorkTile work{int(arch::block_index()), p.first_head};
  const Entries entries = tile::entries_of(p.selection, work.query);
  const int warp = arch::warp_index();
  if (arch::thread_index() == 0) {
    s.key_barriers.init(1, 1);
    s.tail_barriers.init(1, 1);
    arch::mbarrier_init(s.q_full, Config::kMathThreads / 32);
    init_math_barriers(s);
    arch::fence_mbarrier_init();
  }
  arch::syncwarp();  // kept: a lane has diverged
  if (warp == SingleConfig::kIssueWarp) s.tmem.allocate();
  arch::syncthreads();
  if (warp == SingleConfig::kGatherWarp) gather(p, s, entries);
  if (warp == SingleConfig::kIssueWarp && arch::elect_one()) issue(s, entries.tiles(SingleStorage<kDqk>::kKeys));
  if (warp >= Config::kFirstMathWarp) {
    if (entries.length > 0) load_queries(p, s, work);
    math(p, s, work, entries, 0);
  }
  arch::syncwarp();  // kept: lanes have diverged
  arch::syncthreads();
  if (warp == SingleConfig::kIssueWarp) s.tmem.free();
#endif
}

}  // namespace hopwell::ops::sparse_mla_forward::HOPWELL_TARGET
