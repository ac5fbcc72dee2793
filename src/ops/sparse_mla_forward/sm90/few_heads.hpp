// sparse_mla_forward for Hopper with up to 32 heads, operands swapped: keys and output columns are the 64 rows of a
// product, heads its 16 or 32 columns, so that no product multiplies padding.
//
//     Sᵀ = K Qᵀ        Oᵀ = Vᵀ Pᵀ
//
// Tile      one query, all of its heads; 64 keys at a time. CTAs are persistent: see plan.hpp.
// Roles     warpgroups 0 and 1  math    a query each, all of its tiles, with a stage each; where there are fewer queries
//                                       than SMs, warpgroup 0 has both stages in turn and 1 has nothing to do
//           warpgroup 2         gather  two warps a stage, see sm90/gather.hpp
// Timeline  math 0    Sᵀ ▓▓▓▓│exp│ Oᵀ ▓▓▓▓        Sᵀ ▓▓▓▓│exp│ Oᵀ ▓▓▓▓
//           math 1          Sᵀ ▓▓▓▓│exp│ Oᵀ ▓▓▓▓        Sᵀ ▓▓▓▓│exp│ Oᵀ      they know nothing of each other
//           gather 0  ▓▓▓▓        rope, columns of V ▓▓▓▓▓▓▓▓       ▓▓▓▓▓▓▓▓
// Softmax   A head's keys are spread over the warps of a warpgroup, so none knows the maximum. They take the reference
//           they have, and only if a score exceeds it by more than 8 do they meet, find a new one, and make P again.
// Sums      of exponentials go through the RoPE panel, which nobody needs after S: afterwards a thread has the sum of
//           one head over keys 2 c and 2 c + 1 of every eight, added as in many_heads.hpp.
// Budget    32 heads: shared: Q 2 × 36,864 + K 2 × 73,728 + P 2 × 4,096 + 1,600 = 230,976 B
//           registers: 128 of O + 16 of S + ~50 (216); gather 72
// Bound     64 keys: the gather, 1,450 clocks in L2; shared memory 139 KB + 70 KB of operands + 74 KB, 2,210 clocks
//           (16 heads: 1,940)
#pragma once

#include <cmath>
#include <type_traits>

#include "arch/sm80/convert.hpp"
#include "arch/sm90/cluster.hpp"
#include "arch/sm90/wgmma.hpp"
#include "ops/sparse_mla_forward/sm90/gather.hpp"

namespace hopwell::ops::sparse_mla_forward::HOPWELL_TARGET {
namespace few_heads {

// kRest: of queries that no group has.
template <int kHeads_, int kDqk_, bool kRest = false>
struct SharedStorage {
  using KernelParams = std::conditional_t<kRest, GroupedParams, Params>;
  static constexpr bool kOfGroups = false;
  static constexpr int kHeads = kHeads_, kDqk = kDqk_;
  static constexpr int kThreads = 384, kMathRegisters = 216, kGatherRegisters = 72;
  static constexpr int kStagesOfWarp = 1;                                       // that a gather warp copies to
  static constexpr int kSlices = 8;                                             // of the output: 64 columns each
  static constexpr int kPairs = kHeads / 8;                                     // of neighbouring heads in a thread
  static constexpr int kGroups = 4 + (kDqk > 512), kValueGroups = kGroups - 4;  // RoPE first: it is done with first
  static constexpr int kParts = 2;  // in which a tile is copied and waited for

  static constexpr HOPWELL_HOST_DEVICE int first_group(int part) {
    return part == 0 ? 0 : part == 1 ? kGroups - 2 : kGroups;
  }
  static constexpr HOPWELL_HOST_DEVICE PanelGroup panels(int group) {
    return group < kValueGroups ? PanelGroup{8, 1} : PanelGroup{2 * (group - kValueGroups), 2};
  }
  static HOPWELL_DEVICE int queries_at_once(const Params& p) { return p.queries_at_once; }

  // Of a warpgroup: its query, Pᵀ with a row for each head, in the end 64 columns of the output.
  alignas(1024) unsigned char q[2][kHeads * kDqk * 2];
  alignas(1024) unsigned char p[2][kHeads * kKeys * 2];
  alignas(1024) unsigned char keys[kStages][9 * tile::kPanelBytes];  // sums go through the last panel
  float max[2][4][kHeads];                                           // of a warp's keys
  float scale[2][kHeads];                                            // of the output
  uint32_t exceeded[2][2][4];  // the last of the even and odd tiles in which a score of a warp exceeded its reference
  alignas(16) uint32_t valid[kStages][2];  // a bit for every row of a gather warp
  int steps[kStages][2];  // that are left of the query, from the stage's tile on, says each gather warp
  tile::RingBarriers<kStages, kParts, kGroups> key_ring;
};
static_assert(sizeof(SharedStorage<32, 576>) <= arch::sm90::kMaxSharedBytes);

#if HOPWELL_HAS_SM90A

enum NamedBarrier { kWarpgroup = 1 };  // and the next: one for each warpgroup

// A tile of a warpgroup: counted from 0 for as long as the CTA lives, and where its keys lie.
struct Tile {
  uint32_t number;
  int stage;
  uint32_t parity;
};
HOPWELL_DEVICE Tile tile_of(const Params& p, int self, uint32_t number) {
  const bool both_stages = p.queries_at_once == 1;
  return {number, both_stages ? int(number % 2) : self, (both_stages ? number / 2 : number) & 1};
}

// Head i of a thread.
HOPWELL_DEVICE int head_of(int i) { return i / 2 * 8 + arch::lane_index() % 4 * 2 + i % 2; }

// What a thread knows of its heads, in units of log 2; max: of its own keys.
template <class Storage>
struct SoftmaxState {
  float reference[Storage::kPairs][2], max[Storage::kPairs][2];
};

// A thread has the sums of one of its heads over a share of the keys: 2 c and 2 c + 1 of every eight, c = lane / 8, even
// and odd tiles apart. All threads of a warpgroup together have every head and c; with 16 heads, twice.
using PartialSums = float[2];
template <class Storage>
HOPWELL_DEVICE int place_of_sums() {
  return arch::lane_index() / 4 % 2 * Storage::kPairs + arch::warp_index() % Storage::kPairs;
}
// What belongs to the head of the sums, of what a thread has for each of its heads.
template <class Storage>
HOPWELL_DEVICE float of_sums(const float (&values)[Storage::kPairs][2]) {
  const int place = place_of_sums<Storage>();
  float value = values[0][0];
  HOPWELL_UNROLL
  for (int i = 1; i < 2 * Storage::kPairs; ++i) value = place == i ? values[i / 2][i % 2] : value;
  return value;
}

// Sᵀ = K Qᵀ: 64 keys, all heads, as the keys come. Returns which of the tile's keys count, 32 a word.
template <class Storage>
HOPWELL_DEVICE void multiply_keys(Storage& s, const Tile& at, float (&scores)[Storage::kHeads / 2],
                                  uint32_t (&valid)[2]) {
  // Asked for in every tile: otherwise the compiler would keep all descriptors in registers that it does not have.
  const int self = arch::warpgroup_index();
  const uint64_t a = arch::at_address(tile::kRowsAlongK, arch::shared_address(s.keys[at.stage]));
  const uint64_t b = arch::at_address(tile::kRowsAlongK, arch::shared_address(s.q[self]));
  const auto slot = tile::ring_stage(s.key_ring, at.stage, at.parity);
  constexpr int kPanels = Storage::kDqk / 64;
  HOPWELL_UNROLL
  for (int i = 0; i < kPanels; ++i) {
    if (i == 0 || i == kPanels - 4) {
      slot.wait_full(i > 0);
      arch::fence_proxy_async();
      arch::wgmma_fence();
    }
    HOPWELL_UNROLL
    for (uint32_t step = 0; step < 4; ++step) {
      const uint32_t panel = uint32_t(score_panel<Storage::kDqk>(i)), inside = step * 32;
      arch::wgmma_ss(scores, a + ((panel * tile::kPanelBytes + inside) >> 4),
                     b + ((panel * Storage::kHeads * 128 + inside) >> 4), i > 0 || step > 0);
    }
  }
  arch::wgmma_commit();
  arch::wgmma_wait<0>(scores);
  valid[0] = s.valid[at.stage][0], valid[1] = s.valid[at.stage][1];
}

// Masks the scores, finds the greatest of the thread's own of each head, in log 2, and says whether one exceeds its
// reference too far. Returns a unit of the scores in log 2.
template <class Storage>
HOPWELL_DEVICE float mask_scores(float scale_log2, const uint32_t (&valid)[2], float (&scores)[Storage::kHeads / 2],
                                 float (&max)[Storage::kPairs][2], SoftmaxState<Storage>& heads, bool& exceeds) {
  float unit = scale_log2;
  if ((valid[0] & valid[1]) != 0xffffffff || !(scale_log2 > 0)) {
    unit = 1;
    const int warp = arch::warp_index() % 4;
    const uint32_t mine = (warp < 2 ? valid[0] : valid[1]) >> (warp % 2 * 16 + arch::lane_index() / 4);
    HOPWELL_UNROLL
    for (int i = 0; i < Storage::kHeads / 2; ++i)
      scores[i] = mine >> i / 2 % 2 * 8 & 1 ? scores[i] * scale_log2 : -INFINITY;
  }
  exceeds = false;
  HOPWELL_UNROLL
  for (int i = 0; i < 2 * Storage::kPairs; ++i) {
    max[i / 2][i % 2] = fmaxf(scores[i / 2 * 4 + i % 2], scores[i / 2 * 4 + 2 + i % 2]) * unit;
    heads.max[i / 2][i % 2] = fmaxf(heads.max[i / 2][i % 2], max[i / 2][i % 2]);
    exceeds = exceeds || max[i / 2][i % 2] > heads.reference[i / 2][i % 2] + tile::kReferenceSlack;
  }
  return unit;
}

// Writes the maximum of a warp's keys for every head.
template <class Storage>
HOPWELL_DEVICE void store_max(Storage& s, int self, const float (&max)[Storage::kPairs][2]) {
  const int warp = arch::warp_index() % 4;
  HOPWELL_UNROLL
  for (int i = 0; i < 2 * Storage::kPairs; ++i) {
    const float of_warp = tile::reduce<4, 16>(max[i / 2][i % 2], tile::Larger{});
    if (arch::lane_index() < 4) s.max[self][warp][head_of(i)] = of_warp;
  }
}
template <class Storage>
HOPWELL_DEVICE float max_of(const Storage& s, int self, int head) {
  float greatest = -INFINITY;
  HOPWELL_UNROLL
  for (int n = 0; n < 4; ++n) greatest = fmaxf(greatest, s.max[self][n][head]);
  return greatest;
}

// Moves the references to the maxima of all 64 keys where those pass them. O and the sums shrink by as much.
template <class Storage>
HOPWELL_DEVICE void move_references(Storage& s, int self, const float (&max)[Storage::kPairs][2],
                                    SoftmaxState<Storage>& heads, PartialSums& partial,
                                    float (&out)[Storage::kSlices][Storage::kHeads / 2]) {
  float factor[Storage::kPairs][2];
  store_max(s, self, max);
  arch::barrier_sync(kWarpgroup + self, 128);
  HOPWELL_UNROLL
  for (int i = 0; i < 2 * Storage::kPairs; ++i) {
    float& reference = heads.reference[i / 2][i % 2];
    factor[i / 2][i % 2] =
        tile::move_reference(reference, tile::next_reference(reference, max_of(s, self, head_of(i))));
  }
  const float factor_of_sums = of_sums<Storage>(factor);
  HOPWELL_UNROLL
  for (int i = 0; i < 2; ++i) partial[i] = tile::shrunk(partial[i], factor_of_sums);
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

// Sums of a tile over keys that lanes of two eighths have, on their way to the threads that add those of the warps. Of
// even and odd tiles apart, since without a RoPE panel nobody waits until they have been read.
template <class Storage>
HOPWELL_DEVICE float* shared_sums(Storage& s, const Tile& at) {
  return reinterpret_cast<float*>(s.keys[at.stage] + 8 * tile::kPanelBytes) +
         at.number % 2 * (4 * 32 * Storage::kPairs);
}
template <class Storage>
HOPWELL_DEVICE void store_sums(Storage& s, const Tile& at, const float (&probabilities)[Storage::kHeads / 2]) {
  float sums[2 * Storage::kPairs];
  HOPWELL_UNROLL
  for (int i = 0; i < 2 * Storage::kPairs; ++i)
    sums[i] = probabilities[i / 2 * 4 + i % 2] + probabilities[i / 2 * 4 + i % 2 + 2];
  tile::share_sums(sums, Storage::kPairs, 4, arch::lane_index() / 4 % 2 != 0);
  float* const to = shared_sums(s, at) + arch::thread_index() % 128;
  HOPWELL_UNROLL
  for (int i = 0; i < Storage::kPairs; ++i) to[128 * i] = sums[i];
}
template <class Storage>
HOPWELL_DEVICE void add_sums(Storage& s, const Tile& at, bool odd, PartialSums& partial) {
  const float* const from = shared_sums(s, at) + arch::warp_index() % Storage::kPairs * 128 + arch::lane_index();
  float sums[4];
  HOPWELL_UNROLL
  for (int warp = 0; warp < 4; ++warp) sums[warp] = from[32 * warp];
  const float sum = sum_of_tile(sums);
  partial[0] = odd ? partial[0] : partial[0] + sum;
  partial[1] = odd ? partial[1] + sum : partial[1];
}

// Makes P from scores, and again if a reference has to move.
template <class Storage>
HOPWELL_DEVICE void softmax(const Params& p, Storage& s, int self, const Tile& at, const uint32_t (&valid)[2],
                            float (&scores)[Storage::kHeads / 2], SoftmaxState<Storage>& heads, PartialSums& partial,
                            float (&out)[Storage::kSlices][Storage::kHeads / 2]) {
  float max[Storage::kPairs][2];
  bool exceeds;
  const float unit = mask_scores<Storage>(p.scale_log2, valid, scores, max, heads, exceeds);
  uint32_t (&exceeded)[4] = s.exceeded[self][at.number % 2];
  const uint32_t mark = at.number + 1;
  const int warp = arch::warp_index() % 4;
  if (arch::ballot(exceeds) != 0 && arch::lane_index() == 0) exceeded[warp] = mark;
  HOPWELL_NO_UNROLL
  for (bool settled = false;; settled = true) {
    float probabilities[Storage::kHeads / 2];
    HOPWELL_UNROLL
    for (int i = 0; i < Storage::kHeads / 2; ++i)
      probabilities[i] =
          arch::exp2_approx(fmaf(scores[i], unit, -tile::finite_reference(heads.reference[i / 4][i % 2])));
    store_transposed(s, self, probabilities);
    arch::fence_proxy_async();
    store_sums(s, at, probabilities);
    arch::barrier_sync(kWarpgroup + self, 128);
    if (settled || (exceeded[0] != mark && exceeded[1] != mark && exceeded[2] != mark && exceeded[3] != mark)) break;
    move_references(s, self, max, heads, partial, out);
  }
}

template <class Storage>
using Output = float[Storage::kSlices][Storage::kHeads / 2];

// Oᵀ += Vᵀ Pᵀ: all 512 columns. Each pair of panels is freed as it is done with. Meanwhile the sums are added.
template <class Storage>
HOPWELL_DEVICE void multiply_values(Storage& s, const Tile& at, int tile_of_query, PartialSums& partial,
                                    Output<Storage>& out) {
  constexpr arch::WgmmaOptions kOptions{.a_major = arch::Major::mn};
  const int self = arch::warpgroup_index();  // asked for again: see multiply_keys
  const uint64_t a = arch::at_address(tile::kRowsAcrossK, arch::shared_address(s.keys[at.stage]));
  const uint64_t b = arch::at_address(tile::kRowsAlongK, arch::shared_address(s.p[self]));
  const auto slot = tile::ring_stage(s.key_ring, at.stage);
  arch::wgmma_fence();  // kept: O may have shrunk since the fence in multiply_keys, which the emulator does not see
  HOPWELL_UNROLL
  for (int slice = 0; slice < Storage::kSlices; ++slice) {
    HOPWELL_UNROLL
    for (uint32_t step = 0; step < 4; ++step)
      arch::wgmma_ss<kOptions>(out[slice], a + ((uint32_t(slice) * tile::kPanelBytes + step * 2048) >> 4),
                               b + (step * 32 >> 4), tile_of_query > 0 || step > 0);
    if (slice % 2 == 1) arch::wgmma_commit();
  }
  add_sums(s, at, tile_of_query % 2 != 0, partial);
  if constexpr (Storage::kDqk > 512) slot.release(0);
  arch::wgmma_wait<3>(out[0], out[1]);
  slot.release(Storage::kValueGroups);
  arch::wgmma_wait<2>(out[2], out[3]);
  slot.release(Storage::kValueGroups + 1);
  arch::wgmma_wait<1>(out[4], out[5]);
  slot.release(Storage::kValueGroups + 2);
  arch::wgmma_wait<0>(out[6], out[7]);
  slot.release(Storage::kValueGroups + 3);
}

// Writes max_logits and lse. `scale`: what O counts in the result. P's place has been read.
template <class Storage>
HOPWELL_DEVICE void finish_softmax(const Params& p, Storage& s, int self, int query, const SoftmaxState<Storage>& heads,
                                   const PartialSums& partial, float (&scale)[Storage::kPairs][2]) {
  const int head = head_of(place_of_sums<Storage>()), warp = arch::warp_index() % 4;
  auto& sums = reinterpret_cast<float (&)[2][4][Storage::kHeads]>(s.p[self]);
  store_max(s, self, heads.max);
  HOPWELL_UNROLL
  for (int i = 0; i < 2; ++i)
    if (warp < Storage::kPairs) sums[i][arch::lane_index() / 8][head] = partial[i];
  arch::barrier_sync(kWarpgroup + self, 128);
  float total[2];
  HOPWELL_UNROLL
  for (int i = 0; i < 2; ++i) total[i] = (sums[i][0][head] + sums[i][1][head]) + (sums[i][2][head] + sums[i][3][head]);
  const float sum = total[0] + total[1], lse = tile::lse_of(of_sums<Storage>(heads.reference), sum);
  const float max = tile::max_or_nan(max_of(s, self, head), sum);
  if (arch::lane_index() < 8 && warp < Storage::kPairs) {
    s.scale[self][head] = output_scale(p, head, 1, sum, lse);
    if (head < p.h_q) store_statistics(p, query, head, max, lse);
  }
  arch::barrier_sync(kWarpgroup + self, 128);
  HOPWELL_UNROLL
  for (int i = 0; i < 2 * Storage::kPairs; ++i) scale[i / 2][i % 2] = s.scale[self][head_of(i)];
}

// Writes the output. A warp's 16 columns of each slice go through its own part of P's place.
template <class Storage>
HOPWELL_DEVICE void store_out(const Params& p, Storage& s, int self, int query,
                              const float (&scale)[Storage::kPairs][2], Output<Storage>& out) {
  const int lane = arch::lane_index(), warp = arch::warp_index() % 4;
  HOPWELL_UNROLL
  for (int slice = 0; slice < Storage::kSlices; ++slice) {
    HOPWELL_UNROLL
    for (int n = 0; n < Storage::kHeads / 2; ++n)
      out[slice][n] = scale[n / 4][n % 2] == 0 ? 0 : out[slice][n] * scale[n / 4][n % 2];
    store_transposed(s, self, out[slice]);
    arch::syncwarp();
    HOPWELL_UNROLL
    for (int i = 0; i < Storage::kHeads / 16; ++i) {
      const int head = 16 * i + lane / 2, chunk = 2 * warp + lane % 2;
      const arch::Words4 words =
          arch::load_shared_v4(arch::shared_address(s.p[self]) + tile::swizzled(uint32_t(head), uint32_t(chunk)));
      bf16* target = p.out + query * p.out_stride_s + head * p.out_stride_h + slice * 64 + chunk * 8;
      if (head >= p.h_q) continue;
      store_columns(p, target, words);
    }
    arch::syncwarp();
  }
}

template <class Storage>
HOPWELL_DEVICE void math(const typename Storage::KernelParams& p, Storage& s, int self) {
  if (self >= p.queries_at_once) return;
  const uint32_t stride = uint32_t(p.queries_at_once * arch::grid_size());
  uint32_t number_of_tile = 0;
  TilesOfCta<typename Storage::KernelParams> tiles;
  HOPWELL_NO_UNROLL
  for (uint32_t number = tiles.first(p, uint32_t(arch::block_index() + self * arch::grid_size()), stride);
       number < p.work_tiles; number = tiles.next(p, number, stride)) {
    SoftmaxState<Storage> heads;
    HOPWELL_UNROLL
    for (int i = 0; i < 2 * Storage::kPairs; ++i) heads.reference[i / 2][i % 2] = heads.max[i / 2][i % 2] = -INFINITY;
    PartialSums partial = {0, 0};
    Output<Storage> out{};
    const Tile first = tile_of(p, self, number_of_tile);
    const auto slot = tile::ring_stage(s.key_ring, first.stage, first.parity);
    slot.wait_full(1);  // Q came before
    slot.wait_full(0);
    const int tiles = s.steps[first.stage][0] * (3 - p.queries_at_once);  // to find it out here would take registers
    HOPWELL_NO_UNROLL
    for (int i = 0; i < tiles; ++i) {
      const Tile at = tile_of(p, self, number_of_tile++);
      float scores[Storage::kHeads / 2];
      uint32_t valid[2];
      multiply_keys(s, at, scores, valid);
      softmax(p, s, self, at, valid, scores, heads, partial, out);
      multiply_values(s, at, i, partial, out);
    }
    float scale[Storage::kPairs][2];
    finish_softmax(p, s, self, int(number), heads, partial, scale);  // a query has one tile
    store_out(p, s, self, int(number), scale, out);
  }
}

template <class Storage>
HOPWELL_DEVICE void initialise(Storage& s) {
  constexpr uint32_t kWarps = 4, kGatherWarps = 2;
  s.key_ring.init(32 * kGatherWarps, kWarps, kGatherWarps);
  for (int i = 0; i < 16; ++i) s.exceeded[i / 8][i / 4 % 2][i % 4] = 0;
  arch::fence_mbarrier_init();
}

#endif

}  // namespace few_heads
}  // namespace hopwell::ops::sparse_mla_forward::HOPWELL_TARGET
