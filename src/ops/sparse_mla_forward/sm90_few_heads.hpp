// sparse_mla_forward for Hopper with up to 32 heads, operands swapped: keys and output columns are the 64 rows of a product, heads
// its 16 or 32 columns, so that no product multiplies padding.
//
//     Sᵀ = K Qᵀ        Oᵀ = Vᵀ Pᵀ
//
// Tile      one query, all of its heads; a step is two tiles of 64 keys. CTAs are persistent, one for each multiprocessor.
// Roles     warpgroups 0 and 1  math    one tile of every step each, S to O: they meet at the end of a query only
//           warpgroup 2         gather  see sm90_gather.hpp
// Timeline  math 0   Sᵀ ▓▓▓▓│exp│ Oᵀ ▓▓▓▓        Sᵀ ▓▓▓▓│exp│ Oᵀ ▓▓▓▓
//           math 1          Sᵀ ▓▓▓▓│exp│ Oᵀ ▓▓▓▓        Sᵀ ▓▓▓▓│exp│ Oᵀ
//           gather   1 ▓▓▓▓▓▓▓▓ 0 ▓▓▓▓▓▓▓▓ 1 ▓▓▓▓▓▓▓▓ 0 ▓▓▓▓▓▓▓▓
// Softmax   A head's keys are spread over the warps of a warpgroup, so none knows the maximum. They take the reference they have, and
//           only if a score passes it by more than 8 do they meet, find a new one, and make P again. In the end the sums of both
//           warpgroups are brought to the greater reference; each adds up and writes one half of the columns.
// Budget    32 heads: shared: Q 36,864 + K 2 × 73,728 + P 2 × 4,096 + exchange 32,768 + 3,072 = 228,352 B
//           registers: 128 of O + 16 of S + ~50 (216); gather 72
// Bound     64 keys: the gather, 1,450 clocks in L2; shared memory 139 KB + 70 KB of operands + 74 KB, 2,210 clocks (16 heads: 1,940)
#pragma once

#include <cmath>

#include "arch/sm80/convert.hpp"
#include "arch/sm90/cluster.hpp"
#include "arch/sm90/wgmma.hpp"
#include "ops/sparse_mla_forward/sm90_gather.hpp"

namespace hopwell::ops::sparse_mla_forward {
namespace {
namespace few_heads {

template <int kHeads_, int kDqk_>
struct Shared {
  static constexpr int kHeads = kHeads_, kDqk = kDqk_;
  static constexpr int kThreads = 384, kMathRegisters = 216, kGatherRegisters = 72;
  static constexpr int kSlices = 8,
                       kOwnSlices = 4;       // of 64 columns of the output; those that a warpgroup writes come first
  static constexpr int kPairs = kHeads / 8;  // of neighbouring heads in a thread
  static constexpr int kGroups = 4 + (kDqk > 512), kValueGroups = kGroups - 4;  // RoPE first: it is done with first
  static constexpr int kParts = 2;    // in which a tile is copied and waited for
  static constexpr float kSlack = 8;  // log2 of how far a score may pass the reference

  static constexpr HOPWELL_HOST_DEVICE int first_group(int part) {
    return part == 0 ? 0 : part == 1 ? kGroups - 2 : kGroups;
  }
  static constexpr HOPWELL_HOST_DEVICE Group group(int stage, int i) {
    return i < kValueGroups ? Group{8, 1} : Group{2 * ((i - kValueGroups) ^ 2 * stage), 2};
  }

  alignas(1024) unsigned char q[kHeads * kDqk * 2];
  alignas(1024) unsigned char keys[kStages][kDqk / 64 * tile::kPanelBytes];
  alignas(1024) unsigned char p[kStages]
                               [kHeads * kKeys * 2];  // Pᵀ: a row for each head; in the end 64 columns of the output
  alignas(16) float exchange[kOwnSlices * kHeads / 8][128][4];
  float max[kStages][4][kHeads], sum[kStages][4][kHeads];  // of a warp's keys
  float reference[kStages][kHeads];                        // in the end
  uint32_t passed[kStages][2][4];  // the last of the even and odd steps in which a score of a warp passed the reference
  alignas(16) uint32_t valid[kStages][4];  // a bit for every row of a gather warp
  arch::mbarrier q_empty, keys_full[kStages][kParts], keys_empty[kStages][kGroups];
};
static_assert(sizeof(Shared<32, 576>) <= arch::sm90::kMaxSharedBytes);

#if HOPWELL_HAS_SM90A

enum NamedBarrier { kAllMath = 1, kWarpgroup = 2 };  // and the next: one for each warpgroup

// What a thread knows of its heads, 8 i + 2 (lane % 4) and the next, in units of log 2; max and sum are of its own keys.
template <class Kernel>
struct HeadState {
  float reference[Kernel::kPairs][2], max[Kernel::kPairs][2], sum[Kernel::kPairs][2];
};

// Head i of a thread.
HOPWELL_DEVICE int head_of(int i) { return i / 2 * 8 + arch::lane_index() % 4 * 2 + i % 2; }

// Sᵀ = K Qᵀ: 64 keys, all heads, as the keys come. Returns which of the warp's 16 keys count.
template <class Kernel>
HOPWELL_DEVICE uint32_t multiply_keys(Kernel& s, uint32_t parity, float (&scores)[Kernel::kHeads / 2]) {
  // Asked anew in every step, since else the compiler would keep all descriptors in registers that it does not have.
  const int self = arch::warpgroup_index();
  const uint64_t a = arch::at_address(tile::kRowsAlongK, arch::shared_address(s.keys[self]));
  const uint64_t b = arch::at_address(tile::kRowsAlongK, arch::shared_address(s.q));
  HOPWELL_UNROLL
  for (int i = 0; i < Kernel::kGroups; ++i) {
    if (i == 0 || i == Kernel::first_group(1)) {
      arch::mbarrier_wait(s.keys_full[self][i > 0], parity);
      arch::fence_proxy_async();
      arch::wgmma_fence();
    }
    HOPWELL_UNROLL
    for (int step = 0; step < 4 * Kernel::group(0, i).count; ++step) {
      const uint32_t panel = uint32_t(Kernel::group(self, i).first + step / 4), inside = uint32_t(step % 4) * 32;
      arch::wgmma_ss(scores, a + ((panel * tile::kPanelBytes + inside) >> 4),
                     b + ((panel * Kernel::kHeads * 128 + inside) >> 4), i > 0 || step > 0);
    }
  }
  arch::wgmma_commit();
  arch::wgmma_wait<0>(scores);
  const uint32_t valid = s.valid[self][arch::warp_index() % 4];
  if constexpr (Kernel::kDqk > 512) arrive_warp(s.keys_empty[self][0]);
  return valid;
}

// A thread's values of its heads become its warp's, in all lanes.
template <class Kernel, class Join>
HOPWELL_DEVICE void across_lanes(float (&value)[Kernel::kPairs][2], Join join) {
  HOPWELL_UNROLL
  for (int i = 0; i < 2 * Kernel::kPairs; ++i) value[i / 2][i % 2] = tile::reduce<4, 16>(value[i / 2][i % 2], join);
}

// Brings the scores to log 2, masks them, and says whether one of the thread's passes its head's reference too far.
template <class Kernel>
HOPWELL_DEVICE bool look_at_scores(float scale_log2, uint32_t valid, float (&scores)[Kernel::kHeads / 2],
                                   float (&max)[Kernel::kPairs][2], HeadState<Kernel>& heads) {
  bool passes = false;
  valid >>= arch::lane_index() / 4;
  HOPWELL_UNROLL
  for (int i = 0; i < Kernel::kHeads / 2; ++i)
    scores[i] = valid >> i / 2 % 2 * 8 & 1 ? scores[i] * scale_log2 : -INFINITY;
  HOPWELL_UNROLL
  for (int i = 0; i < 2 * Kernel::kPairs; ++i) {
    max[i / 2][i % 2] = fmaxf(scores[i / 2 * 4 + i % 2], scores[i / 2 * 4 + 2 + i % 2]);
    heads.max[i / 2][i % 2] = fmaxf(heads.max[i / 2][i % 2], max[i / 2][i % 2]);
    passes = passes || max[i / 2][i % 2] > heads.reference[i / 2][i % 2] + Kernel::kSlack;
  }
  return passes;
}

// Moves the references to the maxima of all 64 keys where those pass them. O and the sums shrink by as much.
template <class Kernel>
HOPWELL_DEVICE void move_references(Kernel& s, int self, float (&max)[Kernel::kPairs][2], HeadState<Kernel>& heads,
                                    float (&out)[Kernel::kSlices][Kernel::kHeads / 2]) {
  float factor[Kernel::kPairs][2];
  across_lanes<Kernel>(max, tile::Larger{});
  const int lane = arch::lane_index(), warp = arch::warp_index() % 4;
  HOPWELL_UNROLL
  for (int i = 0; i < 2 * Kernel::kPairs; ++i)
    if (lane < 4) s.max[self][warp][head_of(i)] = max[i / 2][i % 2];
  arch::barrier_sync(kWarpgroup + self, 128);
  HOPWELL_UNROLL
  for (int i = 0; i < 2 * Kernel::kPairs; ++i) {
    float &reference = heads.reference[i / 2][i % 2], greatest = -INFINITY;
    const float before = reference;
    HOPWELL_UNROLL
    for (int n = 0; n < 4; ++n) greatest = fmaxf(greatest, s.max[self][n][head_of(i)]);
    if (greatest > reference + Kernel::kSlack) reference = greatest;
    factor[i / 2][i % 2] = reference == before ? 1 : arch::exp2_approx(before - reference);
    heads.sum[i / 2][i % 2] *= factor[i / 2][i % 2];
  }
  HOPWELL_UNROLL
  for (int i = 0; i < Kernel::kSlices * Kernel::kHeads / 2; ++i) {
    const int n = i % (Kernel::kHeads / 2);
    out[i / (Kernel::kHeads / 2)][n] *= factor[n / 4][n % 2];
  }
}

// Where a lane's row of the 8 × 8 matrices of blocks of heads 2 i and 2 i + 1 lies, that a warp's 16 keys or columns make.
template <class Kernel>
HOPWELL_DEVICE uint32_t matrices_address(const Kernel& s, int self, int i) {
  const uint32_t lane = uint32_t(arch::lane_index());
  return arch::shared_address(s.p[self]) + tile::swizzled(uint32_t(i) * 16 + lane / 16 * 8 + lane % 8,
                                                          uint32_t(arch::warp_index() % 4) * 2 + lane / 8 % 2);
}

template <class Kernel>
HOPWELL_DEVICE void store_transposed(Kernel& s, int self, const float (&values)[Kernel::kHeads / 2]) {
  HOPWELL_UNROLL
  for (int i = 0; i < Kernel::kHeads / 16; ++i) {
    uint32_t words[4];
    HOPWELL_UNROLL
    for (int n = 0; n < 4; ++n) words[n] = arch::pack_bf16(values[8 * i + 2 * n], values[8 * i + 2 * n + 1]);
    arch::stmatrix<arch::Transpose::yes>(matrices_address(s, self, i), words);
  }
}

// Makes P from scores, and again if a reference has to move. `step` counts from 1.
template <class Kernel>
HOPWELL_DEVICE void softmax(const Params& p, Kernel& s, int self, uint32_t step, uint32_t valid,
                            float (&scores)[Kernel::kHeads / 2], HeadState<Kernel>& heads,
                            float (&out)[Kernel::kSlices][Kernel::kHeads / 2]) {
  float max[Kernel::kPairs][2], probabilities[Kernel::kHeads / 2];
  const bool passes = arch::ballot(look_at_scores<Kernel>(p.scale_log2, valid, scores, max, heads)) != 0;
  uint32_t (&passed)[4] = s.passed[self][step % 2];
  const int warp = arch::warp_index() % 4;
  if (passes && arch::lane_index() == 0) passed[warp] = step;
  HOPWELL_NO_UNROLL
  for (bool settled = false;; settled = true) {
    HOPWELL_UNROLL
    for (int i = 0; i < Kernel::kHeads / 2; ++i) {
      const float reference = heads.reference[i / 4][i % 2];
      probabilities[i] = arch::exp2_approx(scores[i] - (reference == -INFINITY ? 0 : reference));
    }
    store_transposed(s, self, probabilities);
    arch::fence_proxy_async();
    arch::barrier_sync(kWarpgroup + self, 128);
    if (settled || (passed[0] != step && passed[1] != step && passed[2] != step && passed[3] != step)) break;
    move_references(s, self, max, heads, out);
  }
  HOPWELL_UNROLL
  for (int i = 0; i < Kernel::kHeads / 2; ++i) heads.sum[i / 4][i % 2] += probabilities[i];
}

template <class Kernel>
using Output = float[Kernel::kSlices][Kernel::kHeads / 2];

// Oᵀ += Vᵀ Pᵀ: all 512 columns, this warpgroup's own first. Each pair of panels is freed as it is done with.
template <class Kernel>
HOPWELL_DEVICE void multiply_values(Kernel& s, Output<Kernel>& out, bool first) {
  constexpr arch::WgmmaOptions kOptions{.a_major = arch::Major::mn};
  const int self = arch::warpgroup_index();  // anew: see multiply_keys
  const uint64_t a = arch::at_address(tile::kRowsAcrossK, arch::shared_address(s.keys[self]));
  const uint64_t b = arch::at_address(tile::kRowsAlongK, arch::shared_address(s.p[self]));
  arch::wgmma_fence();  // kept: O may have shrunk since the fence in multiply_keys, which the emulator does not see
  HOPWELL_UNROLL
  for (int slice = 0; slice < Kernel::kSlices; ++slice) {
    HOPWELL_UNROLL
    for (uint32_t step = 0; step < 4; ++step)
      arch::wgmma_ss<kOptions>(out[slice], a + ((uint32_t(slice ^ 4 * self) * tile::kPanelBytes + step * 2048) >> 4),
                               b + (step * 32 >> 4), !first || step > 0);
    if (slice % 2 == 1) arch::wgmma_commit();
  }
  arch::wgmma_wait<3>(out[0], out[1]);
  arrive_warp(s.keys_empty[self][Kernel::kValueGroups]);
  arch::wgmma_wait<2>(out[2], out[3]);
  arrive_warp(s.keys_empty[self][Kernel::kValueGroups + 1]);
  arch::wgmma_wait<1>(out[4], out[5]);
  arrive_warp(s.keys_empty[self][Kernel::kValueGroups + 2]);
  arch::wgmma_wait<0>(out[6], out[7]);
  arrive_warp(s.keys_empty[self][Kernel::kValueGroups + 3]);
}

// Brings both warpgroups' sums together. Warpgroup 0 writes max_logits and lse. `scale`: what this one's O counts in the result.
template <class Kernel>
HOPWELL_DEVICE void finish_heads(const Params& p, Kernel& s, int self, const Piece& piece, HeadState<Kernel>& heads,
                                 float (&scale)[Kernel::kPairs][2]) {
  const int lane = arch::lane_index(), warp = arch::warp_index() % 4;
  across_lanes<Kernel>(heads.sum, tile::Plus{});
  across_lanes<Kernel>(heads.max, tile::Larger{});
  HOPWELL_UNROLL
  for (int i = 0; i < 2 * Kernel::kPairs; ++i) {
    if (lane >= 4) continue;
    s.sum[self][warp][head_of(i)] = heads.sum[i / 2][i % 2];
    s.max[self][warp][head_of(i)] = heads.max[i / 2][i % 2];
    if (warp == 0) s.reference[self][head_of(i)] = heads.reference[i / 2][i % 2];
  }
  arch::barrier_sync(kAllMath, 256);
  HOPWELL_UNROLL
  for (int i = 0; i < 2 * Kernel::kPairs; ++i) {
    const int head = head_of(i);
    const float reference = fmaxf(s.reference[0][head], s.reference[1][head]);
    const float shift = reference == -INFINITY ? 0 : reference;
    float total = 0, both = -INFINITY;
    HOPWELL_UNROLL
    for (int n = 0; n < 8; ++n) {
      total += s.sum[n / 4][n % 4][head] * arch::exp2_approx(s.reference[n / 4][head] - shift);
      both = fmaxf(both, s.max[n / 4][n % 4][head]);
    }
    const float lse = tile::lse_of(reference, total), max = tile::max_or_nan(both, total);
    float factor = total == 0 ? 0 : arch::exp2_approx(heads.reference[i / 2][i % 2] - shift) / total;
    if (p.attn_sink && total != 0 && head < p.h_q) factor /= tile::sink_divisor(p.attn_sink[head * p.sink_stride], lse);
    scale[i / 2][i % 2] = factor;
    const bool writes = self == 0 && warp == 0 && lane < 4 && head < p.h_q;
    if (writes && p.max_logits) p.max_logits[piece.query * p.max_stride_s + head * p.max_stride_h] = max * tile::kLn2;
    if (writes && p.lse) p.lse[piece.query * p.lse_stride_s + head * p.lse_stride_h] = lse;
  }
}

// Gives the other warpgroup its slices, or adds those it gave: a thread's to the same thread of the other.
template <class Kernel>
HOPWELL_DEVICE void give(Kernel& s, const Output<Kernel>& out) {
  constexpr int kQuads = Kernel::kHeads / 8;
  HOPWELL_UNROLL
  for (int i = 0; i < Kernel::kOwnSlices * kQuads; ++i) {
    const float* from = &out[Kernel::kOwnSlices + i / kQuads][i % kQuads * 4];
    arch::store_shared_v4(arch::shared_address(s.exchange[i][arch::thread_index() % 128]),
                          {arch::bit_cast<uint32_t>(from[0]), arch::bit_cast<uint32_t>(from[1]),
                           arch::bit_cast<uint32_t>(from[2]), arch::bit_cast<uint32_t>(from[3])});
  }
}
template <class Kernel>
HOPWELL_DEVICE void take(const Kernel& s, Output<Kernel>& out) {
  constexpr int kQuads = Kernel::kHeads / 8;
  HOPWELL_UNROLL
  for (int i = 0; i < Kernel::kOwnSlices * kQuads; ++i) {
    const arch::Words4 words = arch::load_shared_v4(arch::shared_address(s.exchange[i][arch::thread_index() % 128]));
    HOPWELL_UNROLL
    for (int n = 0; n < 4; ++n) out[i / kQuads][i % kQuads * 4 + n] += arch::bit_cast<float>(words.w[n]);
  }
}

// Writes this warpgroup's slices. A warp's 16 columns of each go through its own part of P's place.
template <class Kernel>
HOPWELL_DEVICE void store_slices(const Params& p, Kernel& s, int self, const Piece& piece, const Output<Kernel>& out) {
  const int lane = arch::lane_index(), warp = arch::warp_index() % 4;
  HOPWELL_UNROLL
  for (int slice = 0; slice < Kernel::kOwnSlices; ++slice) {
    store_transposed(s, self, out[slice]);
    arch::syncwarp();
    HOPWELL_UNROLL
    for (int i = 0; i < Kernel::kHeads / 16; ++i) {
      const int head = 16 * i + lane / 2, chunk = 2 * warp + lane % 2;
      const arch::Words4 words =
          arch::load_shared_v4(arch::shared_address(s.p[self]) + tile::swizzled(uint32_t(head), uint32_t(chunk)));
      bf16* target = p.out + piece.query * p.out_stride_s + head * p.out_stride_h + 256 * self + slice * 64 + chunk * 8;
      if (head < p.h_q && p.out_aligned) arch::store_streaming(target, words);
      HOPWELL_UNROLL
      for (int n = 0; n < 8; ++n)
        if (head < p.h_q && !p.out_aligned) target[n].bits = uint16_t(words.w[n / 2] >> 16 * (n % 2));
    }
    arch::syncwarp();
  }
}

// Puts both warpgroups' O together: each scales its own, and writes the half of the columns that it is given.
template <class Kernel>
HOPWELL_DEVICE void finish_piece(const Params& p, Kernel& s, int self, const Piece& piece, HeadState<Kernel>& heads,
                                 Output<Kernel>& out) {
  float scale[Kernel::kPairs][2];
  finish_heads(p, s, self, piece, heads, scale);
  HOPWELL_UNROLL
  for (int i = 0; i < Kernel::kSlices * Kernel::kHeads / 2; ++i) {
    const int n = i % (Kernel::kHeads / 2);
    float& value = out[i / (Kernel::kHeads / 2)][n];
    value = scale[n / 4][n % 2] == 0 ? 0 : value * scale[n / 4][n % 2];
  }
  HOPWELL_NO_UNROLL
  for (int taker = 0; taker < 2; ++taker) {
    if (self != taker) give(s, out);
    arch::barrier_sync(kAllMath, 256);
    if (self == taker) take(s, out);
  }
  store_slices(p, s, self, piece, out);
}

template <class Kernel>
HOPWELL_DEVICE void math(const Params& p, Kernel& s, int self) {
  uint32_t parity = 0, step = 0;
  HOPWELL_NO_UNROLL
  for (uint32_t number = uint32_t(arch::block_index()); number < p.pieces; number += uint32_t(arch::grid_size())) {
    const Piece piece = piece_of(p, number, Kernel::kHeads);
    HeadState<Kernel> heads;
    HOPWELL_UNROLL
    for (int i = 0; i < 2 * Kernel::kPairs; ++i)
      heads.reference[i / 2][i % 2] = heads.max[i / 2][i % 2] = -INFINITY, heads.sum[i / 2][i % 2] = 0;
    Output<Kernel> out{};
    arch::mbarrier_wait(s.keys_full[self][1 - self], parity);  // Q came before
    HOPWELL_NO_UNROLL
    for (int i = 0; i < piece.steps; ++i, parity ^= 1) {
      float scores[Kernel::kHeads / 2];
      const uint32_t valid = multiply_keys(s, parity, scores);
      if (i == piece.steps - 1) arrive_warp(s.q_empty);
      softmax(p, s, self, ++step, valid, scores, heads, out);
      multiply_values(s, out, i == 0);
    }
    finish_piece(p, s, self, piece, heads, out);
  }
}

template <class Kernel>
HOPWELL_DEVICE void initialise(Kernel& s) {
  constexpr uint32_t kWarps = 4, kGatherThreads = 128;
  arch::mbarrier_init(s.q_empty, 2 * kWarps);
  for (int stage = 0; stage < kStages; ++stage) {
    for (int part = 0; part < Kernel::kParts; ++part)
      arch::mbarrier_init(s.keys_full[stage][part], kGatherThreads + (part == 0 ? kWarps : 0));
    for (int i = 0; i < Kernel::kGroups; ++i) arch::mbarrier_init(s.keys_empty[stage][i], kWarps);
    for (int i = 0; i < 8; ++i) s.passed[stage][i / 4][i % 4] = 0;
  }
  arch::fence_mbarrier_init();
}

#endif

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1) kernel(const __grid_constant__ Params p) {
#if HOPWELL_HAS_SM90A
  auto& s = arch::dynamic_smem<Kernel>();
  if (arch::thread_index() == 0) initialise(s);
  arch::syncthreads();
  const int warpgroup = arch::warpgroup_index();
  if (warpgroup == 2) {
    arch::setmaxnreg_dec<Kernel::kGatherRegisters>();
    gather(p, s);
  } else {
    arch::setmaxnreg_inc<Kernel::kMathRegisters>();
    math(p, s, warpgroup);
  }
#endif
}

}  // namespace few_heads
}  // namespace
}  // namespace hopwell::ops::sparse_mla_forward
