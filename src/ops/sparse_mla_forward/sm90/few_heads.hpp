// sparse_mla_forward for Hopper with up to 32 heads, with swapped operands: keys and output columns are the 64 rows of
// a product, heads its 16 or 32 columns, so that no product multiplies padding.
//
//     Sᵀ = K Qᵀ        Oᵀ = Vᵀ Pᵀ
//
// Tile      one query, all heads of the launch; 64 keys at a time. CTAs are persistent: see plan.hpp.
//           With WindowParams the first keys of a query are rows of window_kv; only the gather knows.
// Roles     warpgroups 0 and 1  math    one query each, with all of its tiles and one stage; if there are fewer queries
//                                       than SMs, warpgroup 0 alternates between both stages and 1 is idle
//           warpgroup 2         gather  producer, two warps per stage: see sm90/gather.hpp
// Timeline  math 0    Sᵀ ▓▓▓▓│exp│ Oᵀ ▓▓▓▓        Sᵀ ▓▓▓▓│exp│ Oᵀ ▓▓▓▓
//           math 1          Sᵀ ▓▓▓▓│exp│ Oᵀ ▓▓▓▓        Sᵀ ▓▓▓▓│exp│ Oᵀ      independent of math 0
//           gather 0  ▓▓▓▓        rope, columns of V ▓▓▓▓▓▓▓▓       ▓▓▓▓▓▓▓▓
// Softmax   The keys of a head are spread over the warps of a warpgroup, so no warp knows the maximum. The warps use
//           the current row_max. Only if a score exceeds it by more than 8 do they synchronise,
//           compute a new row_max, and recompute P.
// Sums      of exponentials are exchanged through the RoPE panel, which is free after S. Afterwards a thread has the
//           sum of one head over keys 2 c and 2 c + 1 of every eight, added as in many_heads.hpp.
// Budget    32 heads: shared: Q 2 × 36,864 + K 2 × 73,728 + P 2 × 4,096 + 1,600 = 230,976 B
//           registers: 128 for O + 16 for S + ~50 (216); gather 72
// Bound     per 64 keys: the gather, 1,450 clocks in L2; shared memory 139 KB + 70 KB of operands + 74 KB, 2,210 clocks
//           (16 heads: 1,940)
#pragma once

#include <cmath>
#include <type_traits>

#include "arch/sm80/convert.hpp"
#include "arch/sm90/cluster.hpp"
#include "arch/sm90/wgmma.hpp"
#include "ops/sparse_mla_forward/sm90/gather.hpp"
#include "tile/gpu/fragment.hpp"

namespace hopwell::ops::sparse_mla_forward::HOPWELL_TARGET {
namespace few_heads {

// With GroupedParams, the kernel for ungrouped queries.
template <int kHeads_, int kDqk_, class KernelParams_ = Params>
struct SharedStorage {
  using KernelParams = KernelParams_;
  static constexpr bool kOfGroups = false;
  static constexpr int kHeads = kHeads_, kDqk = kDqk_;
  static constexpr int kThreads = 384, kMathRegisters = 216, kGatherRegisters = 72;
  static constexpr int kStagesOfWarp = 1;                                       // stages that a gather warp copies to
  static constexpr int kSlices = 8;                                             // blocks of the output: 64 columns each
  static constexpr int kPairs = kHeads / 8;                                     // pairs of adjacent heads in a thread
  static constexpr int kGroups = 4 + (kDqk > 512), kValueGroups = kGroups - 4;  // RoPE first: released first
  static constexpr int kParts = 2;  // parts in which a tile is copied and waited for

  static constexpr HOPWELL_HOST_DEVICE int first_group(int part) {
    return part == 0 ? 0 : part == 1 ? kGroups - 2 : kGroups;
  }
  static constexpr HOPWELL_HOST_DEVICE PanelGroup panels(int group) {
    return group < kValueGroups ? PanelGroup{8, 1} : PanelGroup{2 * (group - kValueGroups), 2};
  }
  static HOPWELL_DEVICE int queries_at_once(const Params& p) { return p.queries_at_once; }

  // Per warpgroup: its query, Pᵀ with one row per head, at the end 64 columns of the output.
  alignas(1024) unsigned char q[2][kHeads * kDqk * 2];
  alignas(1024) unsigned char p[2][kHeads * kKeys * 2];
  alignas(1024) unsigned char keys[kStages][9 * tile::kPanelBytes];  // sums use the last panel
  float max[2][4][kHeads];                                           // over a warp's keys
  float scale[2][kHeads];                                            // of the output
  uint32_t exceeded[2][2][4];              // last even and odd tile in which a score of a warp exceeded row_max too far
  alignas(16) uint32_t valid[kStages][2];  // one bit per row of a gather warp
  int tiles[kStages][2];  // remaining tiles of the query from this step on, written by each gather warp
  tile::RingBarriers<kStages, kParts, kGroups> key_ring;
};
static_assert(sizeof(SharedStorage<32, 576>) <= arch::sm90::kMaxSharedBytes);

#if HOPWELL_HAS_SM90A

enum NamedBarrier { kWarpgroup = 1 };  // and the next one: one per warpgroup

// A tile of a warpgroup: its number, counted during the lifetime of the CTA, and the stage and phase parity of its
// keys.
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
HOPWELL_DEVICE int head_of(int i) { return i / 2 * 8 + tile::fragment_column() + i % 2; }

// A thread's values for its heads, in units of log 2. max: over its own keys.
template <class Storage>
struct SoftmaxState {
  float row_max[Storage::kPairs][2], max[Storage::kPairs][2];
};

// Sums of a head of the thread over part of the keys: 2 c and 2 c + 1 of every eight, c = lane / 8, even and odd tiles
// separately. The threads of a warpgroup together cover every head and c; with 16 heads, twice.
using PartialSums = float[2];
template <class Storage>
HOPWELL_DEVICE int place_of_sums() {
  return arch::lane_index() / 4 % 2 * Storage::kPairs + arch::warp_index() % Storage::kPairs;
}
// Selects the value for the head of the sums from a thread's values for its heads.
template <class Storage>
HOPWELL_DEVICE float of_sums(const float (&values)[Storage::kPairs][2]) {
  const int place = place_of_sums<Storage>();
  float value = values[0][0];
  HOPWELL_UNROLL
  for (int i = 1; i < 2 * Storage::kPairs; ++i) value = place == i ? values[i / 2][i % 2] : value;
  return value;
}

// Sᵀ = K Qᵀ: 64 keys, all heads, in the order in which the keys arrive. `valid`: the valid keys of the tile, 32 per
// word.
template <class Storage>
HOPWELL_DEVICE void multiply_keys(Storage& s, const Tile& at, float (&scores)[Storage::kHeads / 2],
                                  uint32_t (&valid)[2]) {
  // Read again in every tile; otherwise the compiler keeps all descriptors in registers and spills.
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
      const uint32_t panel = uint32_t(tile::score_panel<Storage::kDqk>(i)), inside = step * 32;
      arch::wgmma_ss(scores, a + ((panel * tile::kPanelBytes + inside) >> 4),
                     b + ((panel * Storage::kHeads * 128 + inside) >> 4), i > 0 || step > 0);
    }
  }
  arch::wgmma_commit();
  arch::wgmma_wait<0>(scores);
  valid[0] = s.valid[at.stage][0], valid[1] = s.valid[at.stage][1];
}

// Masks the scores and computes the maximum over the thread's own keys for each head, in log 2. `exceeds`: whether a
// maximum exceeds row_max by more than rescale_threshold. Returns the unit of the scores in log 2.
template <class Storage>
HOPWELL_DEVICE float mask_scores(float scale_log2, const uint32_t (&valid)[2], float (&scores)[Storage::kHeads / 2],
                                 float (&max)[Storage::kPairs][2], SoftmaxState<Storage>& heads, bool& exceeds) {
  float unit = scale_log2;
  if ((valid[0] & valid[1]) != 0xffffffff || !(scale_log2 > 0)) {
    unit = 1;
    const int warp = arch::warp_index() % 4;
    const uint32_t mine = (warp < 2 ? valid[0] : valid[1]) >> (warp % 2 * 16 + tile::fragment_row());
    HOPWELL_UNROLL
    for (int i = 0; i < Storage::kHeads / 2; ++i)
      scores[i] = mine >> i / 2 % 2 * 8 & 1 ? scores[i] * scale_log2 : -INFINITY;
  }
  exceeds = false;
  HOPWELL_UNROLL
  for (int i = 0; i < 2 * Storage::kPairs; ++i) {
    max[i / 2][i % 2] = fmaxf(scores[i / 2 * 4 + i % 2], scores[i / 2 * 4 + 2 + i % 2]) * unit;
    heads.max[i / 2][i % 2] = fmaxf(heads.max[i / 2][i % 2], max[i / 2][i % 2]);
    exceeds = exceeds || max[i / 2][i % 2] > heads.row_max[i / 2][i % 2] + tile::kRescaleThreshold;
  }
  return unit;
}

// Writes the maximum over a warp's keys for every head.
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

// Updates row_max to the maxima over all 64 keys where these exceed it. Rescales O and the sums.
template <class Storage>
HOPWELL_DEVICE void update_row_max_of_heads(Storage& s, int self, const float (&max)[Storage::kPairs][2],
                                            SoftmaxState<Storage>& heads, PartialSums& partial,
                                            float (&out)[Storage::kSlices][Storage::kHeads / 2]) {
  float factor[Storage::kPairs][2];
  store_max(s, self, max);
  arch::barrier_sync(kWarpgroup + self, 128);
  HOPWELL_UNROLL
  for (int i = 0; i < 2 * Storage::kPairs; ++i) {
    float& row_max = heads.row_max[i / 2][i % 2];
    factor[i / 2][i % 2] = tile::update_row_max(row_max, tile::next_row_max(row_max, max_of(s, self, head_of(i))));
  }
  const float factor_of_sums = of_sums<Storage>(factor);
  HOPWELL_UNROLL
  for (int i = 0; i < 2; ++i) partial[i] = tile::rescaled(partial[i], factor_of_sums);
  HOPWELL_UNROLL
  for (int i = 0; i < Storage::kSlices * Storage::kHeads / 2; ++i) {
    const int n = i % (Storage::kHeads / 2);
    out[i / (Storage::kHeads / 2)][n] *= factor[n / 4][n % 2];
  }
}

// Address of a lane's row for stmatrix: the 8 × 8 matrices of head blocks 2 i and 2 i + 1 and of a warp's 16 keys or
// columns.
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

// Buffer for a tile's sums over pairs of lane groups, on the way to the threads that add the warps' sums. Even and odd
// tiles have separate buffers, because without a RoPE panel nothing waits until a buffer has been read.
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
  const float sum = tile::sum_of_tile(sums);
  partial[0] = odd ? partial[0] : partial[0] + sum;
  partial[1] = odd ? partial[1] + sum : partial[1];
}

// Computes P from scores, and recomputes it if row_max changes.
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
      probabilities[i] = arch::exp2_approx(fmaf(scores[i], unit, -tile::finite_row_max(heads.row_max[i / 4][i % 2])));
    store_transposed(s, self, probabilities);
    arch::fence_proxy_async();
    store_sums(s, at, probabilities);
    arch::barrier_sync(kWarpgroup + self, 128);
    if (settled || (exceeded[0] != mark && exceeded[1] != mark && exceeded[2] != mark && exceeded[3] != mark)) break;
    update_row_max_of_heads(s, self, max, heads, partial, out);
  }
}

template <class Storage>
using Output = float[Storage::kSlices][Storage::kHeads / 2];

// Oᵀ += Vᵀ Pᵀ: all 512 columns. Releases each pair of panels after its products. Adds the sums while the products
// execute.
template <class Storage>
HOPWELL_DEVICE void multiply_values(Storage& s, const Tile& at, int tile_of_query, PartialSums& partial,
                                    Output<Storage>& out) {
  constexpr arch::WgmmaOptions kOptions{.a_major = arch::Major::mn};
  const int self = arch::warpgroup_index();  // read again: see multiply_keys
  const uint64_t a = arch::at_address(tile::kRowsAcrossK, arch::shared_address(s.keys[at.stage]));
  const uint64_t b = arch::at_address(tile::kRowsAlongK, arch::shared_address(s.p[self]));
  const auto slot = tile::ring_stage(s.key_ring, at.stage);
  arch::wgmma_fence();  // kept: O may be rescaled after the fence in multiply_keys; the emulator does not check this
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

// Writes max_logits and lse. `scale`: final scale of O. Reuses the space of P, which has been read.
template <class Storage>
HOPWELL_DEVICE void finalize_softmax(const Params& p, Storage& s, int self, int query,
                                     const SoftmaxState<Storage>& heads, const PartialSums& partial,
                                     float (&scale)[Storage::kPairs][2]) {
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
  const float sum = total[0] + total[1], lse = tile::lse_of(of_sums<Storage>(heads.row_max), sum);
  const float max = tile::max_or_nan(max_of(s, self, head), sum);
  if (arch::lane_index() < 8 && warp < Storage::kPairs) {
    s.scale[self][head] = output_scale(p, head, 1, sum, lse);
    if (head < p.h_q) store_statistics(p, query, head, max, lse);
  }
  arch::barrier_sync(kWarpgroup + self, 128);
  HOPWELL_UNROLL
  for (int i = 0; i < 2 * Storage::kPairs; ++i) scale[i / 2][i % 2] = s.scale[self][head_of(i)];
}

// Writes the output. A warp stages its 16 columns of each slice in its own part of the space of P.
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
    for (int i = 0; i < 2 * Storage::kPairs; ++i) heads.row_max[i / 2][i % 2] = heads.max[i / 2][i % 2] = -INFINITY;
    PartialSums partial = {0, 0};
    Output<Storage> out{};
    const Tile first = tile_of(p, self, number_of_tile);
    const auto slot = tile::ring_stage(s.key_ring, first.stage, first.parity);
    slot.wait_full(1);  // Q arrived before this part
    slot.wait_full(0);
    const int tiles = s.tiles[first.stage][0];  // computing it here would take registers
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
    finalize_softmax(p, s, self, int(number), heads, partial, scale);  // a query has one work tile
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
