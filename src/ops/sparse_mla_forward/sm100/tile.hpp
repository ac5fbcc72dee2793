// sparse_mla_forward on Blackwell: shared by the kernels for 64 and for 128 heads. Each CTA has 64 heads: Q in tensor
// and shared memory, and the math role except for O, whose layout differs. Formula: single.hpp; roles, timelines and
// budgets: there and in pair.hpp.
//
// Scores of 64 heads fill all 128 lanes: the two halves of the keys are stacked in the lanes. So one math thread has a
// head and half of a step's keys, another thread has the other half.
//
// Q         As many columns as fit beside O are in tensor memory, duplicated in both halves of the lanes, each of which
//           multiplies half of the keys. The other columns are in shared memory.
// Softmax   row_max m changes only when a row's maximum exceeds it by more than 8. Then O and the
//           sum are rescaled by exp2(m_old − m). P ≤ 2^8, which is as accurate in bf16 as P ≤ 1.
//
// Keys of invalid entries are −1: the copy engine fills their rows with zeros, and their P is 0.
#pragma once

#include <cmath>

#include "arch/sm100/memory.hpp"
#include "arch/sm80/async_copy.hpp"
#include "arch/sm90/cluster.hpp"
#include "ops/sparse_mla_forward/params.hpp"
#include "tile/gpu/ring.hpp"
#include "tile/gpu/tcgen05_panel.hpp"
#include "tile/gpu/tensor_memory.hpp"

namespace hopwell::ops::sparse_mla_forward::HOPWELL_TARGET {

using arch::Major;
using tile::Entries;

struct Config {
  static constexpr int kHeads = 64, kDv = 512, kFirstMathWarp = 4, kMathThreads = 128;
};
struct Tmem {
  static constexpr int kOut = 0, kQ = 256, kColumns = 512;  // scores follow Q
};
enum NamedBarrier { kMathBarrier = 1 };  // and following: between math warps

// Parameters, with a tensor map of the keys: 64 columns of a row.
struct GatherParams : Params {
  arch::TensorMap keys;
  int first_head;    // first head of this launch
  bool out_sectors;  // rows of out are 32-byte aligned
};

// Shared by math and the issue of products. A step has 64 keys for each of kTheCtas CTAs. There are buffers for P of
// two steps of one CTA, or of one step of two CTAs, and for S of one step. kTheTmemPanels panels (64 columns each) of Q
// are in tensor memory.
template <int kDqk, int kTheCtas, int kTheTmemPanels>
struct MathStorage {
  static constexpr int kCtas = kTheCtas, kKeys = 64 * kCtas, kThreadKeys = kKeys / 2, kBuffers = 2 / kCtas;
  static constexpr int kTmemPanels = kTheTmemPanels, kPanels = kDqk / 64, kQPanels = kPanels - kTmemPanels;
  static constexpr int kScores = Tmem::kQ + 32 * kTmemPanels;  // columns of tensor memory
  static_assert(kQPanels > 0 && kScores + kThreadKeys <= Tmem::kColumns);
  alignas(1024) unsigned char q[kQPanels][tile::kPanelBytes];
  alignas(1024) unsigned char p[kBuffers][kCtas][tile::kPanelBytes];
  float sum[2][Config::kHeads];                               // [half of the keys], final sums
  arch::mbarrier s_full[2], s_empty, p_full[2], out_full[2];  // out_full: O includes P of the step
  tile::TensorMemory<Tmem::kColumns, kCtas> tmem;
};

// Work tile of a CTA.
struct WorkTile {
  int query, first_head;
};
// A step: its number among all steps of the CTA.
struct Step {
  int number;
  bool first;  // first step of its work tile
};

#if HOPWELL_HAS_SM100A

// Executed by one thread.
template <class Storage>
HOPWELL_DEVICE void init_math_barriers(Storage& s) {
  constexpr uint32_t kMathWarps = Storage::kCtas * Config::kMathThreads / 32;
  tile::init_barriers(kMathWarps, s.s_empty, s.p_full);
  tile::init_barriers(1, s.s_full, s.out_full);
}

HOPWELL_DEVICE uint32_t in_first_cta(arch::mbarrier& barrier) {
  return arch::map_to_rank(arch::shared_address(&barrier), 0);
}
// Executed by one warp: arrives at a barrier of the CTA that issues products, the first of the pair.
template <class Storage>
HOPWELL_DEVICE void tell_issue(arch::mbarrier& barrier, arch::Site site = arch::Site::current()) {
  if constexpr (Storage::kCtas == 2) {
    arch::syncwarp();
    if (arch::lane_index() == 0) arch::mbarrier_arrive_cluster(in_first_cta(barrier), site);
  } else {
    tile::arrive_warp(barrier, site);
  }
}

// ---- queries

HOPWELL_DEVICE const bf16* q_row(const Params& p, const WorkTile& work, int row) {
  return p.q + work.query * p.q_stride_s + (work.first_head + row) * p.q_stride_h;
}

// Starts the copies of kPanels panels of Q, from `column` on, to shared memory. Executed by kThreads threads. Padding
// heads are filled with zeros.
template <int kPanels, int kThreads>
HOPWELL_DEVICE void copy_queries(const Params& p, unsigned char (*panels)[tile::kPanelBytes], const WorkTile& work,
                                 int column, int thread) {
  constexpr int kChunks = 8 * kPanels;
  const int heads = p.h_q - work.first_head;
  for (int i = thread; i < Config::kHeads * kChunks; i += kThreads) {
    const int row = i / kChunks, chunk = i % kChunks;
    arch::cp_async(arch::shared_address(panels[chunk / 8]) + tile::swizzled(row, chunk % 8),
                   q_row(p, work, row < heads ? row : 0) + column + 8 * chunk, row < heads ? 16 : 0);
  }
  arch::cp_async_commit();
}

// ---- products

// Waits until the scores of the previous step have been read, because the next scores overwrite them.
template <class Storage>
HOPWELL_DEVICE void wait_scores_read(Storage& s, int number, arch::Site site = arch::Site::current()) {
  const uint32_t parity = uint32_t(number & 1) ^ 1;
  if constexpr (Storage::kCtas == 2)
    arch::mbarrier_wait_cluster(s.s_empty, parity, site);
  else
    arch::mbarrier_wait(s.s_empty, parity, site);
  arch::tcgen05_fence_after_thread_sync(site);
}

// 16 columns of 64 rows in shared memory, as a K-major operand.
HOPWELL_DEVICE uint64_t columns_along_k(const unsigned char* panel, int k) {
  return arch::at_address(tile::kTcgen05RowsAlongK, arch::shared_address(panel) + uint32_t(32 * k));
}

// ---- math

// A thread's head, and the half of a step's keys that it has. tmem: the address of the CTA's tensor memory.
struct MathThread {
  uint32_t tmem;
  int warp = arch::warp_index() % 4, row = (32 * warp + arch::lane_index()) % 64, half = warp / 2;
};

// One bit per key of this thread: whether its entry is valid.
template <int kThreadKeys>
struct ValidKeys {
  uint32_t bits[kThreadKeys / 32];
  HOPWELL_DEVICE void load(const Entries& entries, int step, const MathThread& at) {
    const int first = (2 * step + at.half) * kThreadKeys + arch::lane_index();
    HOPWELL_UNROLL
    for (int i = 0; i < kThreadKeys / 32; ++i) bits[i] = arch::ballot(entries.key(first + 32 * i) >= 0);
  }
  HOPWELL_DEVICE bool operator[](int i) const { return bits[i / 32] >> i % 32 & 1; }
};

// Waits until the products of P of a step have ended.
template <class Storage>
HOPWELL_DEVICE void wait_out(Storage& s, int number, arch::Site site = arch::Site::current()) {
  arch::mbarrier_wait(s.out_full[number % 2], uint32_t(number / 2 & 1), site);
}

// Multiplies this thread's 256 columns of O by factor(column / 32 · 32, column % 32), after the products before a step
// have ended.
template <class Storage, class Factor>
HOPWELL_DEVICE void scale_out(Storage& s, const MathThread& at, int number, const Factor& factor) {
  wait_out(s, number - 1);
  arch::tcgen05_fence_after_thread_sync();
  HOPWELL_NO_UNROLL
  for (int column = 0; column < Tmem::kQ; column += 32) {
    const uint32_t address = arch::tmem_address(at.tmem, 32 * at.warp, Tmem::kOut + column);
    uint32_t out[32];
    tile::load_tensor_memory(out, address);
    HOPWELL_UNROLL
    for (int i = 0; i < 32; ++i) out[i] = arch::bit_cast<uint32_t>(arch::bit_cast<float>(out[i]) * factor(column, i));
    arch::tmem_store<arch::TmemShape::b32x32>(address, out);
  }
  arch::tmem_wait_store();
}

// Running softmax of a head. Both threads of a head have the same row_max.
struct RunningSoftmax {
  float row_max = -INFINITY, max = -INFINITY, sum = 0;
};

// Scores of a step, in registers, in units of log 2; −inf if the entry is invalid.
template <class Storage, int kKeys>
HOPWELL_DEVICE void load_scores(float (&x)[kKeys], const Params& p, Storage& s, const MathThread& at, int number,
                                const ValidKeys<kKeys>& valid) {
  uint32_t loaded[kKeys];
  tile::wait_tensor_memory(s.s_full[number % 2], uint32_t(number / 2 & 1));
  tile::load_tensor_memory(loaded, arch::tmem_address(at.tmem, 32 * at.warp, Storage::kScores));
  arch::tcgen05_fence_before_thread_sync();
  tell_issue<Storage>(s.s_empty);
  HOPWELL_UNROLL
  for (int i = 0; i < kKeys; ++i) x[i] = valid[i] ? arch::bit_cast<float>(loaded[i]) * p.scale_log2 : -INFINITY;
}

// Writes P of this thread's keys to shared memory. With two buffers, the buffer of two steps ago is free, because its
// products were issued before this step's S.
template <class Storage, int kKeys>
HOPWELL_DEVICE void store_p(RunningSoftmax& softmax, Storage& s, const MathThread& at, const Step& step,
                            float (&x)[kKeys]) {
  const float row_max = tile::finite_row_max(softmax.row_max);
  HOPWELL_UNROLL
  for (int i = 0; i < kKeys; ++i) x[i] = arch::exp2_approx(x[i] - row_max), softmax.sum += x[i];
  if (Storage::kBuffers == 1 && !step.first) wait_out(s, step.number - 1);
  HOPWELL_UNROLL
  for (int v = 0; v < kKeys / 8; ++v) {
    const int chunk = kKeys / 8 * at.half + v;
    arch::store_shared_v4(
        arch::shared_address(s.p[step.number % Storage::kBuffers][chunk / 8]) + tile::swizzled(at.row, chunk % 8),
        tile::pack_chunk(x + 8 * v));
  }
  arch::fence_proxy_async();
  arch::tcgen05_fence_before_thread_sync();  // O may have been rescaled
  tell_issue<Storage>(s.p_full[step.number % 2]);
}

// Stores 16 columns of an output row.
HOPWELL_DEVICE void store_columns(const GatherParams& p, bf16* to, const arch::Words8& words) {
  if (p.out_sectors) return arch::store_streaming(to, words);
  HOPWELL_UNROLL
  for (int i = 0; i < 2; ++i)
    store_columns(p, to + 8 * i,
                  arch::Words4{{words.w[4 * i], words.w[4 * i + 1], words.w[4 * i + 2], words.w[4 * i + 3]}});
}

// Math role for one work tile. `done`: number of earlier steps of the CTA. Each kernel has its own follow_max and
// finish, which know the layout of O.
template <class Storage>
HOPWELL_DEVICE void math(const GatherParams& p, Storage& s, const WorkTile& work, const Entries& entries, int done) {
  constexpr int kKeys = Storage::kThreadKeys;
  const MathThread at{s.tmem};
  const int steps = entries.tiles(Storage::kKeys);
  RunningSoftmax softmax;
  ValidKeys<kKeys> valid, next;
  valid.load(entries, 0, at);
  for (int i = 0; i < steps; ++i) {
    const Step step{done + i, i == 0};
    next.load(entries, i + 1, at);
    float x[kKeys];
    load_scores(x, p, s, at, step.number, valid);
    float max = x[0];
    HOPWELL_UNROLL
    for (int key = 1; key < kKeys; ++key) max = fmaxf(max, x[key]);
    follow_max(softmax, s, at, step, max);
    store_p(softmax, s, at, step, x);
    valid = next;
  }
  finish(p, s, work, at, softmax, steps, done + steps - 1);
}

#endif

}  // namespace hopwell::ops::sparse_mla_forward::HOPWELL_TARGET
