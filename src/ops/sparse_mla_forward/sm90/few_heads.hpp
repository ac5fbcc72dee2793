// sparse_mla_forward for Hopper with up to 32 heads, operands swapped: keys and output columns are the 64 rows of a
// product, heads its 16 or 32 columns, so that no product multiplies padding.
//
//     Sᵀ = K Qᵀ        Oᵀ = Vᵀ Pᵀ
//
// Tile      one query, all of its heads; a step is two tiles of 64 keys. CTAs are persistent: see plan.hpp.
// Roles     warpgroups 0 and 1  math    one tile of every step each, S to O: they meet at the end of a query only
//           warpgroup 2         gather  see sm90/gather.hpp
// Timeline  math 0   Sᵀ ▓▓▓▓│exp│ Oᵀ ▓▓▓▓        Sᵀ ▓▓▓▓│exp│ Oᵀ ▓▓▓▓
//           math 1          Sᵀ ▓▓▓▓│exp│ Oᵀ ▓▓▓▓        Sᵀ ▓▓▓▓│exp│ Oᵀ
//           gather   1 ▓▓▓▓▓▓▓▓ 0 ▓▓▓▓▓▓▓▓ 1 ▓▓▓▓▓▓▓▓ 0 ▓▓▓▓▓▓▓▓
// Softmax   A head's keys are spread over the warps of a warpgroup, so none knows the maximum. They take the reference
//           they have, and only if a score exceeds it by more than 8 do they meet, find a new one, and make P again. In
//           the end the sums of both warpgroups are brought to the greater reference; each adds up and writes one half
//           of the columns.
// Budget    32 heads: shared: Q 36,864 + K 2 × 73,728 + P 2 × 4,096 + exchange 32,768 + 3,072 = 228,352 B
//           registers: 128 of O + 16 of S + ~50 (216); gather 72
// Bound     64 keys: the gather, 1,450 clocks in L2; shared memory 139 KB + 70 KB of operands + 74 KB, 2,210 clocks
//           (16 heads: 1,940)
#pragma once

#include <cmath>

#include "arch/sm80/convert.hpp"
#include "arch/sm90/cluster.hpp"
#include "arch/sm90/wgmma.hpp"
#include "ops/sparse_mla_forward/sm90/gather.hpp"

namespace hopwell::ops::sparse_mla_forward::HOPWELL_TARGET {
namespace few_heads {

template <int kHeads_, int kDqk_>
struct SharedStorage {
  static constexpr int kHeads = kHeads_, kDqk = kDqk_;
  static constexpr int kThreads = 384, kMathRegisters = 216, kGatherRegisters = 72;
  // Slices of the output have 64 columns; those that a warpgroup writes come first.
  static constexpr int kSlices = 8, kOwnSlices = 4;
  static constexpr int kPairs = kHeads / 8;                                     // of neighbouring heads in a thread
  static constexpr int kGroups = 4 + (kDqk > 512), kValueGroups = kGroups - 4;  // RoPE first: it is done with first
  static constexpr int kParts = 2;  // in which a tile is copied and waited for

  static constexpr HOPWELL_HOST_DEVICE int first_group(int part) {
    return part == 0 ? 0 : part == 1 ? kGroups - 2 : kGroups;
  }
  static constexpr HOPWELL_HOST_DEVICE PanelGroup panels(int stage, int group) {
    return group < kValueGroups ? PanelGroup{8, 1} : PanelGroup{2 * ((group - kValueGroups) ^ 2 * stage), 2};
  }

  alignas(1024) unsigned char q[kHeads * kDqk * 2];
  alignas(1024) unsigned char keys[kStages][kDqk / 64 * tile::kPanelBytes];
  // Pᵀ: a row for each head. In the end 64 columns of the output.
  alignas(1024) unsigned char p[kStages][kHeads * kKeys * 2];
  alignas(16) float exchange[kOwnSlices * kHeads / 8][128][4];
  float max[kStages][4][kHeads], sum[kStages][4][kHeads];  // of a warp's keys
  float reference[kStages][kHeads];                        // in the end
  // The last of the even and odd steps in which a score of a warp exceeded its reference.
  uint32_t exceeded[kStages][2][4];
  alignas(16) uint32_t valid[kStages][4];  // a bit for every row of a gather warp
  int steps[kStages][4];  // that are left of the query, from the stage's tile on, says each gather warp
  arch::mbarrier q_empty;
  tile::RingBarriers<kStages, kParts, kGroups> key_ring;
};
static_assert(sizeof(SharedStorage<32, 576>) <= arch::sm90::kMaxSharedBytes);

#if HOPWELL_HAS_SM90A

enum NamedBarrier { kAllMath = 1, kWarpgroup = 2 };  // and the next: one for each warpgroup

// What a thread knows of its heads, 8 i + 2 (lane % 4) and the next, in units of log 2; max and sum: of its own keys.
template <class Storage>
struct SoftmaxState {
  float reference[Storage::kPairs][2], max[Storage::kPairs][2], sum[Storage::kPairs][2];
};

// Head i of a thread.
HOPWELL_DEVICE int head_of(int i) { return i / 2 * 8 + arch::lane_index() % 4 * 2 + i % 2; }

// Sᵀ = K Qᵀ: 64 keys, all heads, as the keys come. Returns which of the warp's 16 keys count.
template <class Storage>
HOPWELL_DEVICE uint32_t multiply_keys(Storage& s, uint32_t parity, float (&scores)[Storage::kHeads / 2]) {
  // Asked for in every step: otherwise the compiler would keep all descriptors in registers that it does not have.
  const int self = arch::warpgroup_index();
  const uint64_t a = arch::at_address(tile::kRowsAlongK, arch::shared_address(s.keys[self]));
  const uint64_t b = arch::at_address(tile::kRowsAlongK, arch::shared_address(s.q));
  const auto slot = tile::ring_stage(s.key_ring, self, parity);
  HOPWELL_UNROLL
  for (int i = 0; i < Storage::kGroups; ++i) {
    if (i == 0 || i == Storage::first_group(1)) {
      slot.wait_full(i > 0);
      arch::fence_proxy_async();
      arch::wgmma_fence();
    }
    HOPWELL_UNROLL
    for (int step = 0; step < 4 * Storage::panels(0, i).count; ++step) {
      const uint32_t panel = uint32_t(Storage::panels(self, i).first + step / 4), inside = uint32_t(step % 4) * 32;
      arch::wgmma_ss(scores, a + ((panel * tile::kPanelBytes + inside) >> 4),
                     b + ((panel * Storage::kHeads * 128 + inside) >> 4), i > 0 || step > 0);
    }
  }
  arch::wgmma_commit();
  arch::wgmma_wait<0>(scores);
  const uint32_t valid = s.valid[self][arch::warp_index() % 4];
  if constexpr (Storage::kDqk > 512) slot.release(0);
  return valid;
}

// A thread's values of its heads become its warp's, in all lanes.
template <class Storage, class Join>
HOPWELL_DEVICE void reduce_over_lanes(float (&value)[Storage::kPairs][2], Join join) {
  HOPWELL_UNROLL
  for (int i = 0; i < 2 * Storage::kPairs; ++i) value[i / 2][i % 2] = tile::reduce<4, 16>(value[i / 2][i % 2], join);
}

// Brings the scores to log 2, masks them, and says whether one of the thread's exceeds its head's reference too far.
template <class Storage>
HOPWELL_DEVICE bool mask_scores(float scale_log2, uint32_t valid, float (&scores)[Storage::kHeads / 2],
                                float (&max)[Storage::kPairs][2], SoftmaxState<Storage>& heads) {
  bool exceeds = false;
  valid >>= arch::lane_index() / 4;
  HOPWELL_UNROLL
  for (int i = 0; i < Storage::kHeads / 2; ++i)
    scores[i] = valid >> i / 2 % 2 * 8 & 1 ? scores[i] * scale_log2 : -INFINITY;
  HOPWELL_UNROLL
  for (int i = 0; i < 2 * Storage::kPairs; ++i) {
    max[i / 2][i % 2] = fmaxf(scores[i / 2 * 4 + i % 2], scores[i / 2 * 4 + 2 + i % 2]);
    heads.max[i / 2][i % 2] = fmaxf(heads.max[i / 2][i % 2], max[i / 2][i % 2]);
    exceeds = exceeds || max[i / 2][i % 2] > heads.reference[i / 2][i % 2] + tile::kReferenceSlack;
  }
  return exceeds;
}

// Moves the references to the maxima of all 64 keys where those pass them. O and the sums shrink by as much.
template <class Storage>
HOPWELL_DEVICE void move_references(Storage& s, int self, float (&max)[Storage::kPairs][2],
                                    SoftmaxState<Storage>& heads, float (&out)[Storage::kSlices][Storage::kHeads / 2]) {
  float factor[Storage::kPairs][2];
  reduce_over_lanes<Storage>(max, tile::Larger{});
  const int lane = arch::lane_index(), warp = arch::warp_index() % 4;
  HOPWELL_UNROLL
  for (int i = 0; i < 2 * Storage::kPairs; ++i)
    if (lane < 4) s.max[self][warp][head_of(i)] = max[i / 2][i % 2];
  arch::barrier_sync(kWarpgroup + self, 128);
  HOPWELL_UNROLL
  for (int i = 0; i < 2 * Storage::kPairs; ++i) {
    float greatest = -INFINITY;
    HOPWELL_UNROLL
    for (int n = 0; n < 4; ++n) greatest = fmaxf(greatest, s.max[self][n][head_of(i)]);
    float& reference = heads.reference[i / 2][i % 2];
    factor[i / 2][i % 2] =
        tile::move_reference(reference, heads.sum[i / 2][i % 2], tile::next_reference(reference, greatest));
  }
  HOPWELL_UNROLL
  for (int i = 0; i < Storage::kSlices * Storage::kHeads / 2; ++i) {
    const int n = i % (Storage::kHeads / 2);
    out[i / (Storage::kHeads / 2)][n] *= factor[n / 4][n % 2];
  }
}

// Where a lane's row of the 8 × 8 matrices of blocks of heads 2 i and 2 i + 1 lies, that a warp's 16 keys or columns
// make.
template <class Storage>
HOPWELL_DEVICE uint32_t matrices_address(const Storage& s, int self, int i) {
  const uint32_t lane = uint32_t(arch::lane_index());
  return arch::shared_address(s.p[self]) + tile::swizzled(uint32_t(i) * 16 + lane / 16 * 8 + lane % 8,
                                                          uint32_t(arch::warp_index() % 4) * 2 + lane / 8 % 2);
}

template <class Storage>
HOPWELL_DEVICE void store_transposed(Storage& s, int self, const float (&values)[Storage::kHeads / 2]) {
  HOPWELL_UNROLL
  for (int i = 0; i < Storage::kHeads / 16; ++i) {
    uint32_t words[4];
    HOPWELL_UNROLL
    for (int n = 0; n < 4; ++n) words[n] = arch::pack_bf16(values[8 * i + 2 * n], values[8 * i + 2 * n + 1]);
    arch::stmatrix<arch::Transpose::yes>(matrices_address(s, self, i), words);
  }
}

// Makes P from scores, and again if a reference has to move. `step` counts from 1.
template <class Storage>
HOPWELL_DEVICE void softmax(const Params& p, Storage& s, int self, uint32_t step, uint32_t valid,
                            float (&scores)[Storage::kHeads / 2], SoftmaxState<Storage>& heads,
                            float (&out)[Storage::kSlices][Storage::kHeads / 2]) {
  float max[Storage::kPairs][2], probabilities[Storage::kHeads / 2];
  const bool exceeds = arch::ballot(mask_scores<Storage>(p.scale_log2, valid, scores, max, heads)) != 0;
  uint32_t (&exceeded)[4] = s.exceeded[self][step % 2];
  const int warp = arch::warp_index() % 4;
  if (exceeds && arch::lane_index() == 0) exceeded[warp] = step;
  HOPWELL_NO_UNROLL
  for (bool settled = false;; settled = true) {
    HOPWELL_UNROLL
    for (int i = 0; i < Storage::kHeads / 2; ++i) {
      probabilities[i] = arch::exp2_approx(scores[i] - tile::finite_reference(heads.reference[i / 4][i % 2]));
    }
    store_transposed(s, self, probabilities);
    arch::fence_proxy_async();
    arch::barrier_sync(kWarpgroup + self, 128);
    if (settled || (exceeded[0] != step && exceeded[1] != step && exceeded[2] != step && exceeded[3] != step)) break;
    move_references(s, self, max, heads, out);
  }
  HOPWELL_UNROLL
  for (int i = 0; i < Storage::kHeads / 2; ++i) heads.sum[i / 4][i % 2] += probabilities[i];
}

template <class Storage>
using Output = float[Storage::kSlices][Storage::kHeads / 2];

// Oᵀ += Vᵀ Pᵀ: all 512 columns, this warpgroup's own first. Each pair of panels is freed as it is done with.
template <class Storage>
HOPWELL_DEVICE void multiply_values(Storage& s, Output<Storage>& out, bool first) {
  constexpr arch::WgmmaOptions kOptions{.a_major = arch::Major::mn};
  const int self = arch::warpgroup_index();  // asked for again: see multiply_keys
  const uint64_t a = arch::at_address(tile::kRowsAcrossK, arch::shared_address(s.keys[self]));
  const uint64_t b = arch::at_address(tile::kRowsAlongK, arch::shared_address(s.p[self]));
  const auto slot = tile::ring_stage(s.key_ring, self);
  arch::wgmma_fence();  // kept: O may have shrunk since the fence in multiply_keys, which the emulator does not see
  HOPWELL_UNROLL
  for (int slice = 0; slice < Storage::kSlices; ++slice) {
    HOPWELL_UNROLL
    for (uint32_t step = 0; step < 4; ++step)
      arch::wgmma_ss<kOptions>(out[slice], a + ((uint32_t(slice ^ 4 * self) * tile::kPanelBytes + step * 2048) >> 4),
                               b + (step * 32 >> 4), !first || step > 0);
    if (slice % 2 == 1) arch::wgmma_commit();
  }
  arch::wgmma_wait<3>(out[0], out[1]);
  slot.release(Storage::kValueGroups);
  arch::wgmma_wait<2>(out[2], out[3]);
  slot.release(Storage::kValueGroups + 1);
  arch::wgmma_wait<1>(out[4], out[5]);
  slot.release(Storage::kValueGroups + 2);
  arch::wgmma_wait<0>(out[6], out[7]);
  slot.release(Storage::kValueGroups + 3);
}

// Brings both warpgroups' sums together. Warpgroup 0 writes max_logits and lse. `scale`: what this one's O counts in the
// result.
template <class Storage>
HOPWELL_DEVICE void finish_softmax(const Params& p, Storage& s, int self, int query, SoftmaxState<Storage>& heads,
                                   float (&scale)[Storage::kPairs][2]) {
  const int lane = arch::lane_index(), warp = arch::warp_index() % 4;
  reduce_over_lanes<Storage>(heads.sum, tile::Plus{});
  reduce_over_lanes<Storage>(heads.max, tile::Larger{});
  HOPWELL_UNROLL
  for (int i = 0; i < 2 * Storage::kPairs; ++i) {
    if (lane >= 4) continue;
    s.sum[self][warp][head_of(i)] = heads.sum[i / 2][i % 2];
    s.max[self][warp][head_of(i)] = heads.max[i / 2][i % 2];
    if (warp == 0) s.reference[self][head_of(i)] = heads.reference[i / 2][i % 2];
  }
  arch::barrier_sync(kAllMath, 256);
  HOPWELL_UNROLL
  for (int i = 0; i < 2 * Storage::kPairs; ++i) {
    const int head = head_of(i);
    const float reference = fmaxf(s.reference[0][head], s.reference[1][head]);
    const float shift = tile::finite_reference(reference);
    float total = 0, both = -INFINITY;
    HOPWELL_UNROLL
    for (int n = 0; n < 8; ++n) {
      total += s.sum[n / 4][n % 4][head] * arch::exp2_approx(s.reference[n / 4][head] - shift);
      both = fmaxf(both, s.max[n / 4][n % 4][head]);
    }
    const float lse = tile::lse_of(reference, total), max = tile::max_or_nan(both, total);
    const float weight = arch::exp2_approx(heads.reference[i / 2][i % 2] - shift);
    scale[i / 2][i % 2] = output_scale(p, head, weight, total, lse);
    if (self == 0 && warp == 0 && lane < 4 && head < p.h_q) store_statistics(p, query, head, max, lse);
  }
}

// Sends the other warpgroup its slices, or adds those that it sent: a thread's to the same thread of the other.
template <class Storage>
HOPWELL_DEVICE void send_partial(Storage& s, const Output<Storage>& out) {
  constexpr int kQuads = Storage::kHeads / 8;
  HOPWELL_UNROLL
  for (int i = 0; i < Storage::kOwnSlices * kQuads; ++i) {
    const float* from = &out[Storage::kOwnSlices + i / kQuads][i % kQuads * 4];
    arch::store_shared_v4(arch::shared_address(s.exchange[i][arch::thread_index() % 128]),
                          {arch::bit_cast<uint32_t>(from[0]), arch::bit_cast<uint32_t>(from[1]),
                           arch::bit_cast<uint32_t>(from[2]), arch::bit_cast<uint32_t>(from[3])});
  }
}
template <class Storage>
HOPWELL_DEVICE void add_partial(const Storage& s, Output<Storage>& out) {
  constexpr int kQuads = Storage::kHeads / 8;
  HOPWELL_UNROLL
  for (int i = 0; i < Storage::kOwnSlices * kQuads; ++i) {
    const arch::Words4 words = arch::load_shared_v4(arch::shared_address(s.exchange[i][arch::thread_index() % 128]));
    HOPWELL_UNROLL
    for (int n = 0; n < 4; ++n) out[i / kQuads][i % kQuads * 4 + n] += arch::bit_cast<float>(words.w[n]);
  }
}

// Writes this warpgroup's slices. A warp's 16 columns of each go through its own part of P's place.
template <class Storage>
HOPWELL_DEVICE void store_slices(const Params& p, Storage& s, int self, int query, const Output<Storage>& out) {
  const int lane = arch::lane_index(), warp = arch::warp_index() % 4;
  HOPWELL_UNROLL
  for (int slice = 0; slice < Storage::kOwnSlices; ++slice) {
    store_transposed(s, self, out[slice]);
    arch::syncwarp();
    HOPWELL_UNROLL
    for (int i = 0; i < Storage::kHeads / 16; ++i) {
      const int head = 16 * i + lane / 2, chunk = 2 * warp + lane % 2;
      const arch::Words4 words =
          arch::load_shared_v4(arch::shared_address(s.p[self]) + tile::swizzled(uint32_t(head), uint32_t(chunk)));
      bf16* target = p.out + query * p.out_stride_s + head * p.out_stride_h + 256 * self + slice * 64 + chunk * 8;
      if (head >= p.h_q) continue;
      store_columns(p, target, words);
    }
    arch::syncwarp();
  }
}

// Puts both warpgroups' O together: each scales its own, and writes the half of the columns that it receives.
template <class Storage>
HOPWELL_DEVICE void finish_work(const Params& p, Storage& s, int self, int query, SoftmaxState<Storage>& heads,
                                Output<Storage>& out) {
  float scale[Storage::kPairs][2];
  finish_softmax(p, s, self, query, heads, scale);
  HOPWELL_UNROLL
  for (int i = 0; i < Storage::kSlices * Storage::kHeads / 2; ++i) {
    const int n = i % (Storage::kHeads / 2);
    float& value = out[i / (Storage::kHeads / 2)][n];
    value = scale[n / 4][n % 2] == 0 ? 0 : value * scale[n / 4][n % 2];
  }
  HOPWELL_NO_UNROLL
  for (int receiver = 0; receiver < 2; ++receiver) {
    if (self != receiver) send_partial(s, out);
    arch::barrier_sync(kAllMath, 256);
    if (self == receiver) add_partial(s, out);
  }
  store_slices(p, s, self, query, out);
}

template <class Storage>
HOPWELL_DEVICE void math(const Params& p, Storage& s, int self) {
  uint32_t parity = 0, step = 0;
  HOPWELL_NO_UNROLL
  for (uint32_t number = uint32_t(arch::block_index()); number < p.work_tiles; number += uint32_t(arch::grid_size())) {
    SoftmaxState<Storage> heads;
    HOPWELL_UNROLL
    for (int i = 0; i < 2 * Storage::kPairs; ++i)
      heads.reference[i / 2][i % 2] = heads.max[i / 2][i % 2] = -INFINITY, heads.sum[i / 2][i % 2] = 0;
    Output<Storage> out{};
    const auto slot = tile::ring_stage(s.key_ring, self, parity);
    slot.wait_full(1 - self);  // Q came before
    slot.wait_full(0);
    const int steps = s.steps[self][arch::warp_index() % 4];  // to find it out here would take registers
    HOPWELL_NO_UNROLL
    for (int i = 0; i < steps; ++i, parity ^= 1) {
      float scores[Storage::kHeads / 2];
      const uint32_t valid = multiply_keys(s, parity, scores);
      if (i == steps - 1) tile::arrive_warp(s.q_empty);
      softmax(p, s, self, ++step, valid, scores, heads, out);
      multiply_values(s, out, i == 0);
    }
    finish_work(p, s, self, int(number), heads, out);  // a query has one tile
  }
}

template <class Storage>
HOPWELL_DEVICE void initialise(Storage& s) {
  constexpr uint32_t kWarps = 4, kGatherThreads = 128;
  arch::mbarrier_init(s.q_empty, 2 * kWarps);
  s.key_ring.init(kGatherThreads, kWarps, kWarps);
  for (int i = 0; i < 8 * kStages; ++i) s.exceeded[i / 8][i / 4 % 2][i % 4] = 0;
  arch::fence_mbarrier_init();
}

#endif

}  // namespace few_heads
}  // namespace hopwell::ops::sparse_mla_forward::HOPWELL_TARGET
