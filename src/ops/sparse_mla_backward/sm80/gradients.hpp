// sparse_mla_backward by mma.sync, for any NVIDIA GPU from Ampere on. One pass over a query's selected keys; their
// gradients are added to global memory.
//
//     P  = exp2(Q Kᵀ · sm_scale · log2e − lse'·log2e)      lse' = log(exp(lse) + exp(attn_sink))
//     dS = P (dO Vᵀ − delta) sm_scale                      V = K[:, :512], delta = Σ_d out · d_out
//     dQ = dS K            dKV[keys] += dSᵀ Q, and Pᵀ dO to the first 512 columns
//     d_sink = −Σ_s exp(attn_sink − lse') delta
//
// Tile      one query; 32 heads and 16 keys per step, or 64 and 32 if a CTA may have 181 KiB; d_qk 576 or 512. Q, dO
//           and keys are panels of 64 columns, 128B-swizzled; P and dS have one row per head.
// Roles     eight warps. Scores: warps 0–3 S → P, warps 4–7 dP → dS, 16 heads and 8 or 32 keys each.
//           Gradients: warp w has columns 64 w to 64 w + 63 of dQ, in registers, and of dKV; of the last 64 columns of
//           d_qk 576 each warp has eight of dQ, and the first warps have 32 of dKV of 16 keys.
// Timeline  step       0                                                     1
//           copies                             keys 1 ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓
//           warps 0–3  S ▓▓▓▓▓ │ P │    │ dQ ▓▓▓ │ dKV ▓▓▓ add ▓▓▓ add ▓▓▓ add │ S ▓▓▓▓▓
//           warps 4–7  dP ▓▓▓▓ │   │ dS │ dQ ▓▓▓ │ dKV ▓▓▓ add ▓▓▓ add         │ dP ▓▓▓▓
// Budget    shared: Q 36,864 + dO 32,768 + keys 18,432 + P, dS 3,072 + vectors 700 = 91,836 B (of 101,376 on the
//           smallest GPU); with 64 heads 73,728 + 65,536 + 36,864 + 10,240 + 1,600
//           registers: dQ 72 (144) + dKV 32 + 16 of operands + ~50, of 255
// Demands   a step of 16 keys, 32 heads, d_qk 576, in clocks of an A100's SM: 1,376 of tensor cores; 2,500 of shared
//           memory, including 1,632 for scores; 36,864 B of additions. 32 keys, 64 heads: 5,504; 6,100; 73,728 B.
// Bound     shared memory, and the additions if few heads share them
//
// Keys of invalid entries are −1: their rows are zeros, nothing is added for them, and the exponent is clamped, so that
// 0 · P is 0. Padding heads have Q = dO = 0 and lse = +inf.
#pragma once

#include "arch/sm80/async_copy.hpp"
#include "arch/sm80/matrix.hpp"
#include "ops/sparse_mla_backward/add_dkv.hpp"
#include "ops/sparse_mla_backward/passes/main_pass.hpp"
#include "ops/sparse_mla_backward/prologue.hpp"
#include "ops/sparse_mla_backward/throttle.hpp"
#include "tile/gpu/fragment.hpp"
#include "tile/gpu/panel.hpp"

namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET {

// kDqk: 576 or 512. kHeadGroups: groups of 16 heads. kKeyGroups: groups of 16 keys.
template <int kTheDqk, int kTheHeadGroups, int kTheKeyGroups>
struct Tile {
  static constexpr int kDqk = kTheDqk, kHeadGroups = kTheHeadGroups, kKeyGroups = kTheKeyGroups;
  static constexpr int kHeads = 16 * kHeadGroups, kKeys = 16 * kKeyGroups, kWarps = 8, kThreads = 32 * kWarps;
  static constexpr int kPanels = kDqk / 64, kPanelsV = kDv / 64;
  static constexpr bool kSmall = kHeadGroups <= 2;      // others are only for Hopper: elsewhere they would spill
  static constexpr bool kHasRope = kPanels > kPanelsV;  // a ninth panel; each warp has its own of the first eight
  static constexpr int kScoreWarps = kWarps / 2,
                       kScoreKeys = kKeys * kHeadGroups / kScoreWarps;  // of S or dP, per warp
  static constexpr int kPitch = kKeys + 8;  // of P and dS, elements: rows of eight matrices are in different banks
  static_assert(kPanelsV == kWarps && kScoreKeys % 8 == 0 && (!kHasRope || 2 * kKeyGroups <= kWarps));
};
constexpr float kLargestExponent = 64;

template <int kRows>
struct RowsPanel {
  alignas(1024) bf16 x[kRows][64];
};

template <class T>
struct SharedStorage {
  RowsPanel<T::kHeads> q[T::kPanels], d_out[T::kPanelsV];
  RowsPanel<T::kKeys> keys[T::kPanels];
  alignas(16) bf16 p[T::kHeads][T::kPitch];
  alignas(16) bf16 ds[T::kHeads][T::kPitch];
  HeadValues<T::kHeads> heads;
  float head_sums[T::kHeadGroups][T::kKeys];  // of attn
  int key[2][T::kKeys];                       // of this step and the next; -1 if invalid
  int last_valid[T::kWarps];
};
static_assert(sizeof(SharedStorage<Tile<576, 2, 1>>) <= 99 * 1024);

// ---- Q, dO and keys

// Starts the copies of kColumns columns of the tile's heads; padding heads are filled with zeros.
template <class T, int kColumns>
HOPWELL_DEVICE void load_heads(RowsPanel<T::kHeads>* panels, const bf16* source, int64_t stride, int heads) {
  for (int e = arch::thread_index(); e < T::kHeads * (kColumns / 8); e += T::kThreads) {
    const int row = e / (kColumns / 8), chunk = e % (kColumns / 8);
    arch::cp_async(arch::shared_address(&panels[chunk / 8]) + tile::swizzled(row, chunk % 8),
                   source + (row < heads ? row : 0) * stride + 8 * chunk, row < heads ? 16 : 0);
  }
}

// Number of threads that copy a row.
template <class T>
constexpr int kCopiersOfKey = T::kThreads / T::kKeys;

// The key of this thread's row.
template <class T, class List>
HOPWELL_DEVICE int load_key(const List& entries, int step) {
  return entries.key(step * T::kKeys + arch::thread_index() / kCopiersOfKey<T>);
}

// Starts the copies of a step's keys, and publishes the keys for the additions.
template <class T, class P>
HOPWELL_DEVICE void gather(const P& p, SharedStorage<T>& s, int key, int step) {
  const int row = arch::thread_index() / kCopiersOfKey<T>, first = arch::thread_index() % kCopiersOfKey<T>;
  if (first == 0) s.key[step % 2][row] = key;
  const bf16* source = p.kv + (key < 0 ? 0 : row_offset(p, key));
  HOPWELL_UNROLL
  for (int chunk = first; chunk < T::kDqk / 8; chunk += kCopiersOfKey<T>)
    arch::cp_async(arch::shared_address(&s.keys[chunk / 8]) + tile::swizzled(row, chunk % 8), source + 8 * chunk,
                   key < 0 ? 0 : 16);
  arch::cp_async_commit();
}

// prefetch_dkv_accum: prefetches the rows of dkv_accum to L2 before the additions.
template <class T>
HOPWELL_DEVICE void prefetch_dkv_rows(const Params& p, int key) {
  if (key < 0 || !(p.dkv || p.fixed_dkv)) return;
  const void* row = p.dkv ? static_cast<const void*>(p.dkv + int64_t{key} * p.dkv_stride)
                          : static_cast<const void*>(p.fixed_dkv + int64_t{key} * (T::kDqk / 2));
  for (int line = arch::thread_index() % kCopiersOfKey<T>; line < T::kDqk / 32; line += kCopiersOfKey<T>)
    arch::prefetch_l2(static_cast<const char*>(row) + 128 * line);
}

// ---- S, dP, P and dS

// The scores of a warp: 16 heads of one of the two products, and kScoreKeys keys.
template <class T>
struct ScoreTile {
  int product, head_group, first_key;

  HOPWELL_DEVICE explicit ScoreTile(int warp)
      : product(warp / T::kScoreWarps),
        head_group(warp % T::kHeadGroups),
        first_key(warp % T::kScoreWarps / T::kHeadGroups * T::kScoreKeys) {}
};

// acc [16 heads][kScoreKeys keys] = A · keysᵀ over kPanels panels, 32 columns at a time.
template <class T, int kPanels>
HOPWELL_DEVICE void multiply_scores(float (&acc)[T::kScoreKeys / 8][4], const RowsPanel<T::kHeads>* a,
                                    const RowsPanel<T::kKeys>* keys, const ScoreTile<T>& tile) {
  const int lane = arch::lane_index();
  const uint32_t left = arch::shared_address(a), right = arch::shared_address(keys);
  const int row = 16 * tile.head_group + lane % 16, key = tile.first_key + lane % 8;
  HOPWELL_UNROLL
  for (int step = 0; step < 2 * kPanels; ++step) {
    const uint32_t of_a = left + uint32_t(step / 2 * sizeof(RowsPanel<T::kHeads>)),
                   of_keys = right + uint32_t(step / 2 * sizeof(RowsPanel<T::kKeys>));
    uint32_t fragment[2][4];
    HOPWELL_UNROLL
    for (int half = 0; half < 2; ++half)
      arch::ldmatrix(fragment[half], of_a + tile::swizzled(row, step % 2 * 4 + 2 * half + lane / 16));
    HOPWELL_UNROLL
    for (int n = 0; n < T::kScoreKeys / 8; ++n) {
      uint32_t b[4];
      arch::ldmatrix(b, of_keys + uint32_t(n * 8 * 128) + tile::swizzled(key, step % 2 * 4 + lane / 8));
      HOPWELL_UNROLL
      for (int half = 0; half < 2; ++half) {
        const uint32_t pair[2] = {b[2 * half], b[2 * half + 1]};
        arch::mma_m16n8k16_bf16(acc[n], fragment[half], pair);
      }
    }
  }
}

// Two adjacent elements of P or dS that a lane has in its accumulators: row `half` of its two, group n of eight keys.
template <class T>
HOPWELL_DEVICE uint32_t* pair_of(bf16 (&rows)[T::kHeads][T::kPitch], const ScoreTile<T>& tile, int n, int half) {
  const int row = 16 * tile.head_group + tile::fragment_row() + 8 * half;
  return reinterpret_cast<uint32_t*>(&rows[row][tile.first_key + 8 * n + tile::fragment_column()]);
}

// Sums exp(score − lse) of a key over the warp's 16 heads.
template <class T>
HOPWELL_DEVICE void sum_heads(const float (&acc)[T::kScoreKeys / 8][4], SharedStorage<T>& s, const ScoreTile<T>& tile) {
  const int lane = arch::lane_index();
  HOPWELL_UNROLL
  for (int n = 0; n < T::kScoreKeys / 8; ++n) HOPWELL_UNROLL
  for (int i = 0; i < 2; ++i) {
    const float sum = tile::sum_of_column(acc[n][i] + acc[n][i + 2]);
    if (lane < 4) s.head_sums[tile.head_group][tile.first_key + 8 * n + 2 * lane + i] = sum;
  }
}

// Converts scores to P in shared memory, and with attn computes their sums over heads.
template <class T, bool kAttn>
HOPWELL_DEVICE void store_p(const Params& p, SharedStorage<T>& s, float (&acc)[T::kScoreKeys / 8][4],
                            const ScoreTile<T>& tile) {
  const int row = 16 * tile.head_group + tile::fragment_row();
  HOPWELL_UNROLL
  for (int half = 0; half < 2; ++half) {
    const float lse_log2 = s.heads.lse_log2[row + 8 * half],
                sink_scale = kAttn ? s.heads.sink_scale[row + 8 * half] : 1;
    HOPWELL_UNROLL
    for (int n = 0; n < T::kScoreKeys / 8; ++n) {
      float* e = &acc[n][2 * half];
      HOPWELL_UNROLL
      for (int i = 0; i < 2; ++i) {
        const float x = e[i] * p.scale_log2 - lse_log2;
        e[i] = arch::exp2_approx(x > kLargestExponent ? kLargestExponent : x);  // NaN stays NaN
      }
      *pair_of<T>(s.p, tile, n, half) =
          kAttn ? arch::pack_bf16(e[0] * sink_scale, e[1] * sink_scale) : arch::pack_bf16(e[0], e[1]);
    }
  }
  if constexpr (kAttn) sum_heads<T>(acc, s, tile);
}

// Converts dP and P to dS in shared memory.
template <class T>
HOPWELL_DEVICE void store_ds(const Params& p, SharedStorage<T>& s, const float (&acc)[T::kScoreKeys / 8][4],
                             const ScoreTile<T>& tile) {
  const int row = 16 * tile.head_group + tile::fragment_row();
  HOPWELL_UNROLL
  for (int half = 0; half < 2; ++half) {
    const float delta = s.heads.delta[row + 8 * half];
    HOPWELL_UNROLL
    for (int n = 0; n < T::kScoreKeys / 8; ++n) {
      const uint32_t probability = *pair_of<T>(s.p, tile, n, half);
      const float low = arch::bit_cast<float>(probability << 16),
                  high = arch::bit_cast<float>(probability & 0xffff0000);
      *pair_of<T>(s.ds, tile, n, half) = arch::pack_bf16(low * (acc[n][2 * half] * p.sm_scale - delta),
                                                         high * (acc[n][2 * half + 1] * p.sm_scale - delta));
    }
  }
}

// S and dP of a step in parallel; then P, then dS.
template <class T, bool kAttn>
HOPWELL_DEVICE void score(const Params& p, SharedStorage<T>& s, const ScoreTile<T>& tile) {
  float acc[T::kScoreKeys / 8][4] = {};
  if (tile.product == 0) {
    multiply_scores<T, T::kPanels>(acc, s.q, s.keys, tile);
    store_p<T, kAttn>(p, s, acc, tile);
  } else {
    multiply_scores<T, T::kPanelsV>(acc, s.d_out, s.keys, tile);
  }
  arch::syncthreads();
  if (tile.product == 1) store_ds<T>(p, s, acc, tile);
  arch::syncthreads();
}

// Adds the sums of the head groups to attn, which holds 0 or the sum of other heads. In the order of the selection,
// sorted or not: sparse_mla_bwd_restore_attn_order moves sums to their entries.
template <class T, class P>
HOPWELL_DEVICE void add_attn(const P& p, const SharedStorage<T>& s, const WorkTile& work,
                             const typename P::Entries& entries, int step) {
  const int t = arch::thread_index(), entry = step * T::kKeys + t;
  if (t >= T::kKeys || s.key[step % 2][t] < 0 || !has_slot(entries, entry)) return;
  float sum = 0;
  HOPWELL_UNROLL
  for (int group = 0; group < T::kHeadGroups; ++group) sum += s.head_sums[group][t];
  arch::red_add(p.attn + work.query * p.attn_stride + first_slot(p, work, entries) + entry, sum);
}

// ---- dQ

// A warp's columns of dQ, as accumulators of mma: eight columns for each n.
template <class T>
struct DqTile {
  float own[T::kHeadGroups][8][4] = {};
  float rope[T::kHasRope ? T::kHeadGroups : 1][4] = {};
};

// dq += dS · keys: the warp's own panel, and eight columns of the last panel.
template <class T>
HOPWELL_DEVICE void multiply_dq(DqTile<T>& dq, const SharedStorage<T>& s, int warp) {
  const int lane = arch::lane_index();
  HOPWELL_UNROLL
  for (int k = 0; k < T::kKeyGroups; ++k) {
    uint32_t a[T::kHeadGroups][4];
    HOPWELL_UNROLL
    for (int m = 0; m < T::kHeadGroups; ++m)
      arch::ldmatrix(a[m], arch::shared_address(&s.ds[16 * m + lane % 16][16 * k + lane / 16 * 8]));
    const int row = 16 * k + lane % 16;
    const uint32_t panel = arch::shared_address(&s.keys[warp]);
    HOPWELL_UNROLL
    for (int n = 0; n < 8; n += 2) {
      uint32_t b[4];
      arch::ldmatrix<arch::Transpose::yes>(b, panel + tile::swizzled(row, n + lane / 16));
      const uint32_t left[2] = {b[0], b[1]}, right[2] = {b[2], b[3]};
      HOPWELL_UNROLL
      for (int m = 0; m < T::kHeadGroups; ++m) {
        arch::mma_m16n8k16_bf16(dq.own[m][n], a[m], left);
        arch::mma_m16n8k16_bf16(dq.own[m][n + 1], a[m], right);
      }
    }
    if constexpr (T::kHasRope) {
      uint32_t b[2];
      arch::ldmatrix<arch::Transpose::yes>(b, arch::shared_address(&s.keys[T::kPanelsV]) + tile::swizzled(row, warp));
      HOPWELL_UNROLL
      for (int m = 0; m < T::kHeadGroups; ++m) arch::mma_m16n8k16_bf16(dq.rope[m], a[m], b);
    }
  }
}

// Stores two adjacent columns of a head to dq or to the buffer of a split.
template <class T>
HOPWELL_DEVICE void store_dq_pair(const Params& p, const WorkTile& work, int row, int column, float x, float y) {
  const int head = work.first_head + row;
  if (work.split >= 0) {
    float* at = p.dq_splits + (int64_t{work.split} * T::kHeads + row) * T::kDqk + column;
    at[0] = x, at[1] = y;
  } else if (head < p.h_q) {
    *reinterpret_cast<uint32_t*>(p.dq + work.query * p.dq_stride_s + head * p.dq_stride_h + column) =
        arch::pack_bf16(x, y);
  }
}

template <class T>
HOPWELL_DEVICE void store_dq(const Params& p, const WorkTile& work, const DqTile<T>& dq, int warp) {
  if (!p.dq) return;
  const int pair = tile::fragment_column();
  HOPWELL_UNROLL
  for (int m = 0; m < T::kHeadGroups; ++m) HOPWELL_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int row = 16 * m + 8 * half + tile::fragment_row();
    HOPWELL_UNROLL
    for (int n = 0; n < 8; ++n)
      store_dq_pair<T>(p, work, row, 64 * warp + 8 * n + pair, dq.own[m][n][2 * half], dq.own[m][n][2 * half + 1]);
    if constexpr (T::kHasRope)
      store_dq_pair<T>(p, work, row, kDv + 8 * warp + pair, dq.rope[m][2 * half], dq.rope[m][2 * half + 1]);
  }
}

// ---- dKV

// acc [kM · 16 keys][32 columns] += aᵀ · half of a panel, a [heads][keys].
template <class T, int kM>
HOPWELL_DEVICE void multiply_transposed(float (&acc)[kM][16], const bf16 (&a)[T::kHeads][T::kPitch], int first_key,
                                        const RowsPanel<T::kHeads>& panel, int half) {
  const int lane = arch::lane_index();
  HOPWELL_UNROLL
  for (int k = 0; k < T::kHeadGroups; ++k) {
    uint32_t left[kM][4];
    HOPWELL_UNROLL
    for (int m = 0; m < kM; ++m)  // heads 0–7 of eight keys and of the next eight, then heads 8–15
      arch::ldmatrix<arch::Transpose::yes>(
          left[m], arch::shared_address(&a[16 * k + lane / 16 * 8 + lane % 8][first_key + 16 * m + lane / 8 % 2 * 8]));
    HOPWELL_UNROLL
    for (int n = 0; n < 4; n += 2) {
      uint32_t b[4];
      arch::ldmatrix<arch::Transpose::yes>(
          b, arch::shared_address(&panel) + tile::swizzled(16 * k + lane % 16, 4 * half + n + lane / 16));
      HOPWELL_UNROLL
      for (int m = 0; m < kM; ++m) HOPWELL_UNROLL
      for (int i = 0; i < 2; ++i) {
        float (&d)[4] = *reinterpret_cast<float (*)[4]>(&acc[m][4 * (n + i)]);
        const uint32_t right[2] = {b[2 * i], b[2 * i + 1]};
        arch::mma_m16n8k16_bf16(d, left[m], right);
      }
    }
  }
}

// 32 columns of the gradients of kM · 16 keys. kOfV: the columns belong to V too.
template <class T, int kM, bool kOfV, bool kFixed>
HOPWELL_DEVICE void add_half_panel(const Params& p, const SharedStorage<T>& s, const SumRows<kFixed> (&rows)[kM],
                                   int first_key, int panel, int half) {
  float acc[kM][16] = {};
  if constexpr (kOfV) multiply_transposed<T, kM>(acc, s.p, first_key, s.d_out[panel], half);
  multiply_transposed<T, kM>(acc, s.ds, first_key, s.q[panel], half);
  HOPWELL_UNROLL
  for (int m = 0; m < kM; ++m) add_panel(p, acc[m], 64 * panel + 32 * half, rows[m]);
}

// The warp's own panel for all keys, and its part of the last panel.
template <class T, bool kFixed>
HOPWELL_DEVICE void add_gradients(const Params& p, const SharedStorage<T>& s, int step, int warp) {
  const int lane = arch::lane_index();
  const auto& keys = s.key[step % 2];
  SumRows<kFixed> rows[T::kKeyGroups];
  HOPWELL_UNROLL
  for (int m = 0; m < T::kKeyGroups; ++m) rows[m] = load_sum_rows<T::kDqk, kFixed>(p, keys, 32 * m + lane);
  HOPWELL_NO_UNROLL
  for (int half = 0; half < 2; ++half) add_half_panel<T, T::kKeyGroups, true, kFixed>(p, s, rows, 0, warp, half);
  if (T::kHasRope && warp < 2 * T::kKeyGroups) {
    const int group = warp / 2;
    const SumRows<kFixed> of_group[1] = {load_sum_rows<T::kDqk, kFixed>(p, keys, 32 * group + lane)};
    add_half_panel<T, 1, false, kFixed>(p, s, of_group, 16 * group, T::kPanels - 1, warp % 2);
  }
}

// ---- the kernel

// Loads Q, dO and the first keys, and computes the heads' values. Returns the entries up to the last valid one.
template <class T, bool kAttn, class P>
HOPWELL_DEVICE typename P::Entries prepare(const P& p, SharedStorage<T>& s, const WorkTile& work) {
  typename P::Entries entries = entries_of(p, work);
  const int heads = p.h_q - work.first_head;
  int batch[kEntryBatch];
  const int key = load_key<T>(entries, 0);
  load_entries<T::kThreads>(batch, entries, arch::thread_index());
  load_heads<T, T::kDqk>(s.q, p.q + work.query * p.q_stride_s + work.first_head * p.q_stride_h, p.q_stride_h, heads);
  load_heads<T, kDv>(s.d_out, p.d_out + work.query * p.d_out_stride_s + work.first_head * p.d_out_stride_h,
                     p.d_out_stride_h, heads);
  gather<T>(p, s, key, 0);
  prepare_heads<kAttn, T::kWarps>(p, s.heads, work);
  find_last_valid(s.last_valid, batch, entries);
  arch::cp_async_wait<0>();
  arch::syncthreads();
  entries.length = length_of(s.last_valid);
  return entries;
}

template <class T, bool kFixed, bool kAttn, class P>
HOPWELL_DEVICE void add_gradients_of_tile(const P& p) {
  auto& s = arch::dynamic_smem<SharedStorage<T>>();
  const WorkTile work = work_tile_of(p, arch::block_index(), T::kHeads);
  const typename P::Entries entries = prepare<T, kAttn>(p, s, work);
  const int warp = arch::warp_index(), steps = entries.tiles(T::kKeys);
  const bool throttled = p.progress && int(arch::block_index()) < p.whole_tiles;
  const ScoreTile<T> tile(warp);
  DqTile<T> dq;
  uint32_t seen = 0;
  HOPWELL_NO_UNROLL
  for (int step = 0; step < steps; ++step) {
    if (throttled && warp < 4) throttle_step<T::kKeys>(p, p.whole_tiles, seen, step);
    const int next_key = load_key<T>(entries, step + 1);
    score<T, kAttn>(p, s, tile);
    multiply_dq(dq, s, warp);
    arch::syncthreads();
    if (step + 1 < steps) {
      gather<T>(p, s, next_key, step + 1);
      if (p.prefetch_dkv_accum) prefetch_dkv_rows<T>(p, next_key);
    }
    if constexpr (kAttn) add_attn<T>(p, s, work, entries, step);
    add_gradients<T, kFixed>(p, s, step, warp);
    arch::cp_async_wait<0>();
    arch::syncthreads();
  }
  store_dq(p, work, dq, warp);
  count_missing_steps<T::kKeys>(p, throttled, steps, arch::thread_index());
}

// kFixed: dkv_accum is in fixed point; kAttn: attn is written too. P: Params, or WindowParams for queries with window
// keys.
template <class T, bool kFixed, bool kAttn, class P>
__global__ void __launch_bounds__(T::kThreads, 1) sparse_mla_bwd_sm80(const __grid_constant__ P p) {
  if constexpr (T::kSmall || HOPWELL_HAS_SM90) add_gradients_of_tile<T, kFixed, kAttn>(p);
}

// ---- launch

template <class T, class P>
void launch_tile(const Problem& problem, const Plan& plan, void* workspace, Stream stream) {
  constexpr std::size_t kBytes = sizeof(SharedStorage<T>);
  const P p = further_params_of<P>(problem, plan);
  if (plan.dkv_accum == DkvAccum::fixed_point)
    launch_main<sparse_mla_bwd_sm80<T, true, false, P>>(problem, plan, workspace, plan.singles, p, T::kThreads, kBytes,
                                                        stream);
  else if (problem.attn && !plan.distribution)
    launch_main<sparse_mla_bwd_sm80<T, false, true, P>>(problem, plan, workspace, plan.singles, p, T::kThreads, kBytes,
                                                        stream);
  else
    launch_main<sparse_mla_bwd_sm80<T, false, false, P>>(problem, plan, workspace, plan.singles, p, T::kThreads, kBytes,
                                                         stream);
}

}  // namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET
