// sparse_mla_forward for Hopper, tiles of 64 heads.
//
//     out[s,h,:] = Σ_i exp2(score[s,h,i] − m) · kv[indices[s,i], :512] / Σ_i exp2(…)
//                                                     scores in units of log 2, m: row_max
//
// Tile      one query, 64 heads; a step is two tiles of 64 keys, A and B; d_qk 576 or 512. CTAs are persistent: see
//           plan.hpp. 128 heads are two adjacent work tiles, which share keys in L2.
// Roles     warpgroup 0  low     S of tile A and its softmax; O += P V for columns 0 to 255 of both tiles
//           warpgroup 1  high    the same for tile B and columns 256 to 511
//           warpgroup 2  gather  producer: see sm90/gather.hpp
// Timeline  low      S_A ▓▓▓▓▓▓│exp│ O += P_A V_A ▓▓▓      ·      O += P_B V_B ▓▓▓│ S_A ▓▓▓▓▓▓│
//           high     ··········S_B ▓▓▓▓▓▓▓▓▓│exp│ O += P_A V_A ▓▓▓ O += P_B V_B ▓▓▓ ·····│ S_B ▓▓▓
//           gather   …B ▓▓▓▓▓          A low ▓▓▓▓▓      A rope, high ▓▓▓▓  B low ▓▓▓▓ B high ▓▓▓▓
// Panels    A tile is released in groups of panels of 64 columns, so that copies follow the products with V. S waits
//           for it in two parts, so that S follows the arriving copies. More parts would need more fences, which delay
//           the products.
// P         A warpgroup keeps its own P in registers as A fragments. It reads the other P from shared memory, from the
//           space of the RoPE panel, which is free after S.
// Softmax   row_max m changes only when a row's maximum exceeds it by more than 8. Then O and the sums are rescaled by
//           exp2(m_old − m). row_max passes from tile to tile: A, B, A, …
// Output    O is staged in the space of tile B, so that whole rows are stored. BoxParams: see Boxes.
// Window    With window keys (WindowParams, BoxParams) the first entries of a query are rows of window_kv. The tiles
//           are counted from the first one, so the results do not depend on where the window begins.
// Boxes     BoxParams: the kernel with TMA, for d_qk 512, aligned rows, and calls with window keys, without indices or
//           with short rows (window.cu). TMA brings Q and tiles of 64 consecutive keys (of the window, or of kv without
//           indices). Each of the four gather warps starts one panel group of a tile, and the last one also starts Q.
//           Rows are short, so the work between two queries weighs more. The sums are combined under the last products.
//           O leaves by TMA, a panel at a time, so that the next query's tiles arrive meanwhile. Without indices, tile B
//           of the last step is skipped if it has no keys.
//           low      O += P_A V_A ▓▓▓ O += P_B V_B ▓▓▓│ out ▓▓▓▓▓│ S_A ▓▓▓▓▓▓│
//           high     O += P_A V_A ▓▓▓ O += P_B V_B ▓▓▓│ out ▓▓▓▓▓│ ··········S_B ▓▓▓
//           gather   Q ▓▓▓▓▓  A low ▓▓▓  A high ▓▓▓  B low ▓▓▓  B high ▓▓▓           of the next query
// Code      All roles share one instruction cache, so the code is short: both math warpgroups run the same
//           instructions.
// Turn      S of tile B starts after S of tile A: measured, otherwise both end late. With boxes this also orders Q
//           before S of tile B, because the bytes of Q count on a barrier of tile A.
// Budget    shared: Q 73,728 + K 2 × 73,728 + 2,048 = 223,232 B; BoxParams: Q 65,536, and 16,384 for O: 231,424 B
//           registers: 128 for O + 32 for S + 2 × 16 for P + ~30 (224); gather 56. BoxParams: 216, gather 72
// Bound     per 64 keys: 2,176 clocks of the tensor cores; 301 KB through shared memory, 2,350 clocks; the gather 1,450
//           clocks in L2
// Groups    kOfGroups: a query is a group of adjacent queries with few heads. Its heads are the heads of all members,
//           its keys the union of their keys (tile/gpu/merge_rows.hpp). Scores of keys that a member lacks are masked.
#pragma once

#include <cmath>

#include "arch/sm80/convert.hpp"
#include "arch/sm90/cluster.hpp"
#include "arch/sm90/wgmma.hpp"
#include "ops/sparse_mla_forward/sm90/gather.hpp"
#include "tile/gpu/score_tile.hpp"

namespace hopwell::ops::sparse_mla_forward::HOPWELL_TARGET {
namespace many_heads {

// Space for a panel of each warpgroup's output.
struct OutPanels {
  alignas(1024) unsigned char out_panels[2][tile::kPanelBytes];
};
struct NoOutPanels {};

// With GroupedParams, the kernel for groups; with BoxParams, the one that stores by tensor copies.
template <int kDqk_, class KernelParams_ = Params, bool kSkipsTileB_ = std::is_same_v<KernelParams_, GroupedParams>>
struct SharedStorage : std::conditional_t<std::is_same_v<KernelParams_, BoxParams>, OutPanels, NoOutPanels> {
  using KernelParams = KernelParams_;
  static constexpr bool kOfGroups = std::is_same_v<KernelParams, GroupedParams>;
  static constexpr bool kBoxes = std::is_same_v<KernelParams, BoxParams>;
  static constexpr bool kSkipsTileB = kSkipsTileB_;  // if it has no keys, which is possible in the last step
  using ValidRows = std::conditional_t<kOfGroups, uint16_t[tile::kMostMembers][4], uint32_t[4]>;
  static constexpr int kHeads = 64, kDqk = kDqk_;
  static constexpr int kThreads = 384, kMathRegisters = kBoxes ? 216 : 224, kGatherRegisters = kBoxes ? 72 : 56;
  static constexpr int kStagesOfWarp = 2;  // stages that a gather warp copies to
  // A tile is released in groups of panels, and waited for in two parts.
  static constexpr int kGroups = 4 + (kDqk > 512), kRopeGroup = 2, kParts = 2;

  static constexpr HOPWELL_HOST_DEVICE int first_group(int part) { return part == 0 ? 0 : part == 1 ? 2 : kGroups; }
  // Panels of the low warpgroup's output columns, RoPE (P uses its space later), panels of the high warpgroup.
  static constexpr HOPWELL_HOST_DEVICE PanelGroup panels(int group) {
    if (kDqk == 512 || group < kRopeGroup) return {2 * group, 2};
    return group == kRopeGroup ? PanelGroup{8, 1} : PanelGroup{2 * group - 2, 2};
  }
  static HOPWELL_DEVICE int queries_at_once(const Params&) { return 1; }
  // First panel group of a warpgroup's output columns.
  static constexpr HOPWELL_HOST_DEVICE int first_group_of(int self) { return self * (kGroups - 2); }

  alignas(1024) unsigned char q[1][kHeads * kDqk * 2];
  alignas(1024) unsigned char keys[kStages][9 * tile::kPanelBytes];  // P uses the last panel
  float row_max[kStages][kHeads];                                    // row_max of this tile's P
  float sum[kStages][kHeads], max[kStages][kHeads];                  // final values
  alignas(16) ValidRows valid[kStages];  // one bit per row of a gather warp; for groups, per member
  // Remaining tiles of the query from a step on, by gather warp: the math warps need not read the query's lists. Not
  // used for groups.
  int tiles[kStages][4];
  arch::mbarrier q_empty;
  tile::RingBarriers<kStages, kParts, kGroups> key_ring;
  tile::RingBarriers<kStages> p_ring;
  arch::mbarrier row_max_full, sums_full, turn;
};
static_assert(sizeof(SharedStorage<576>) <= arch::sm90::kMaxSharedBytes);
static_assert(sizeof(SharedStorage<512, BoxParams>) <= arch::sm90::kMaxSharedBytes);

#if HOPWELL_HAS_SM90A

constexpr int kKeysOfStep = kStages * kKeys;

// The work tile of a math warpgroup. The number of keys of a group is already known. The gather tells the number of
// tiles of a query; until then it is two.
struct MathTile {
  int query, first_head, keys;
};

// Softmax state of a thread's two rows (heads): row_max and maximum in units of log 2, and the sum over the thread's
// own columns.
struct SoftmaxState {
  float row_max[2], max[2], sum[2];

  /// Returns row_scale of the row's output.
  HOPWELL_DEVICE float update_row_max(int r, float to) { return tile::update_row_max(row_max[r], sum[r], to); }
};

// S = Q Kᵀ: 64 heads, 64 keys, in the order in which the keys' panels arrive. The caller has waited for the first part
// of tile A and fenced it. `meanwhile()` runs while the products execute.
template <class Storage, class Meanwhile>
HOPWELL_DEVICE void multiply_scores(Storage& s, int stage, uint32_t parity, float (&scores)[32],
                                    const Meanwhile& meanwhile) {
  const uint64_t a = arch::at_address(tile::kRowsAlongK, arch::shared_address(s.q[0]));
  const uint64_t b = arch::at_address(tile::kRowsAlongK, arch::shared_address(s.keys[stage]));
  const auto slot = tile::ring_stage(s.key_ring, stage, parity);
  HOPWELL_UNROLL
  for (int i = 0; i < Storage::kDqk / 64; ++i) {
    if (i == 0 || i == 4) {
      if (i == 4 || stage == 1) {
        slot.wait_full(i / 4);
        arch::fence_proxy_async();
      }
      if (i == 0 && stage == 1) arch::mbarrier_wait(s.turn, parity);  // kept: for speed, and with boxes for Q; see Turn
      arch::wgmma_fence();
    }
    HOPWELL_UNROLL
    for (int step = 0; step < 4; ++step) {
      const uint64_t offset = tile::columns_on(4 * tile::score_panel<Storage::kDqk>(i) + step);
      arch::wgmma_ss(scores, a + offset, b + offset, i > 0 || step > 0);
    }
  }
  arch::wgmma_commit();
  meanwhile();
  if (stage == 0) tile::arrive_warp(s.turn);  // allows S_B only now: measured, otherwise both end late
  arch::wgmma_wait<0>(scores);
}

// Valid keys of a tile, 32 per word: for all heads, or per member of a group, for the members of a thread's rows r.
struct QueryMask : tile::TileMask {
  HOPWELL_DEVICE void read(const Params&, const uint32_t (&valid)[4], int) {
    low = valid[0] | valid[1] << 16, high = valid[2] | valid[3] << 16;
  }
};
struct MemberMasks {
  uint32_t words[2][2];

  HOPWELL_DEVICE void read(const GroupedParams& p, const uint16_t (&valid)[tile::kMostMembers][4], int row) {
    HOPWELL_UNROLL
    for (int i = 0; i < 4; ++i)
      words[i / 2][i % 2] = reinterpret_cast<const uint32_t*>(valid[member_of(p, row + i / 2 * 8)])[i % 2];
  }
  HOPWELL_DEVICE bool lacks_any() const {
    return (words[0][0] & words[0][1] & words[1][0] & words[1][1]) != 0xffffffff;
  }
  HOPWELL_DEVICE bool has(int r, int half, int column) const { return words[r][half] >> column & 1; }
};

template <class Storage>
using Mask = std::conditional_t<Storage::kOfGroups, MemberMasks, QueryMask>;

using tile::Probabilities;
template <class Storage>
HOPWELL_DEVICE uint32_t p_panel(const Storage& s, int stage) {
  return arch::shared_address(s.keys[stage]) + 8 * tile::kPanelBytes;
}

// Rounds the probabilities and stores them for the other warpgroup. With a RoPE panel, the scores have already waited
// until the space of P is free; without one, nothing has waited yet.
template <class Storage>
HOPWELL_DEVICE void store_p(Storage& s, int stage, uint32_t parity, const float (&scores)[32], Probabilities& own) {
  const auto slot = tile::ring_stage(s.p_ring, stage, parity);
  if constexpr (Storage::kDqk == 512) slot.wait_empty();
  own.round_and_store(scores, p_panel(s, stage));
  slot.commit();
}

template <class Storage>
HOPWELL_DEVICE void load_p(Storage& s, int stage, uint32_t parity, Probabilities& remote) {
  const auto slot = tile::ring_stage(s.p_ring, stage, parity);
  slot.wait_full();
  remote.load(p_panel(s, stage));
  if constexpr (Storage::kDqk == 512)
    slot.release();
  else
    tile::ring_stage(s.key_ring, stage).release(Storage::kRopeGroup);
}

// Reads the other warpgroup's row_max for rows `row` and `row + 8`. `factor`: row_scale of O before that tile.
template <class Storage>
HOPWELL_DEVICE void receive_row_max(Storage& s, int stage, int row, SoftmaxState& state, float (&factor)[2]) {
  HOPWELL_UNROLL
  for (int r = 0; r < 2; ++r) factor[r] = state.update_row_max(r, s.row_max[stage][row + 8 * r]);
}

// If tile B of a query's last step has no keys, it has no products and no P. Its space and the space of its P are
// passed on all the same, so that every barrier completes once per step. The low warpgroup waits for the high one, so
// that neither releases the space before the gather has passed it on.
template <class Storage>
HOPWELL_DEVICE void pass_tile_b(Storage& s, int self, uint32_t parity) {
  const auto keys = tile::ring_stage(s.key_ring, 1, parity);
  const auto p = tile::ring_stage(s.p_ring, 1, parity);
  if (self == 1) {
    keys.wait_full(Storage::kParts - 1);  // kept: on the emulator the gather is earlier
    p.commit();
  } else {
    p.wait_full();  // kept: the same
    if constexpr (Storage::kDqk == 512)
      p.release();
    else
      keys.release(Storage::kRopeGroup);
  }
  HOPWELL_UNROLL
  for (int i = 0; Storage::kBoxes && i < 2; ++i) keys.release(Storage::first_group_of(self) + i);
}

// Converts scores to probabilities. row_max changes if a row's maximum exceeds it; the high warpgroup starts from the
// low warpgroup's row_max. `factor`: row_scale of O before this tile.
template <class Storage>
HOPWELL_DEVICE void softmax(const Params& p, Storage& s, int self, const Mask<Storage>& mask, float (&scores)[32],
                            SoftmaxState& state, float (&factor)[2]) {
  const int row = tile::wgmma_row();
  float max[2];
  const float unit = tile::tile_row_max<Storage::kOfGroups>(p.scale_log2, mask, scores, max);
  HOPWELL_UNROLL
  for (int r = 0; r < 2; ++r) {
    state.max[r] = fmaxf(state.max[r], max[r]);
    factor[r] = state.update_row_max(r, tile::next_row_max(state.row_max[r], max[r]));
    if (tile::quad_lane() == 0) s.row_max[self][row + 8 * r] = state.row_max[r];
  }
  if (self == 0) tile::arrive_warp(s.row_max_full);
  tile::exponentiate(unit, state.row_max, scores, state.sum);
}

// Shares the sums and maxima over this warpgroup's keys.
template <class Storage>
HOPWELL_DEVICE void share_sums(Storage& s, int self, const SoftmaxState& state) {
  HOPWELL_UNROLL
  for (int r = 0; r < 2; ++r) {
    const int row = tile::wgmma_row() + 8 * r;
    const float sum = tile::sum_of_quad(state.sum[r]);
    if (tile::quad_lane() == 0) s.sum[self][row] = sum, s.max[self][row] = state.max[r];
  }
  tile::arrive_warp(s.sums_full);
}

// Combines the sums of both warpgroups. The low warpgroup writes max_logits and lse. Returns the scale of O.
template <class Storage>
HOPWELL_DEVICE void finalize_softmax(const typename Storage::KernelParams& p, Storage& s, int self,
                                     const MathTile& work, uint32_t parity, const SoftmaxState& state,
                                     float (&scale)[2]) {
  arch::mbarrier_wait(s.sums_full, parity);
  // Even threads of a quad compute its first row, odd threads its second row.
  const int r = tile::quad_lane() % 2, row = tile::wgmma_row() + 8 * r, head = work.first_head + row;
  const float total = s.sum[0][row] + s.sum[1][row], both = fmaxf(s.max[0][row], s.max[1][row]);
  const float row_max = r == 0 ? state.row_max[0] : state.row_max[1];
  const float lse = tile::lse_of(row_max, total), max = tile::max_or_nan(both, total);
  const float of_row = output_scale(p, head_with_sink(p, head), 1, total, lse);
  if (self == 0 && tile::quad_lane() < 2 && head < p.h_q) store_statistics(p, work.query, head, max, lse);
  HOPWELL_UNROLL
  for (int i = 0; i < 2; ++i) scale[i] = arch::shuffle(of_row, arch::lane_index() / 4 * 4 + i);
}

// ---- values ---------------------------------------------------------------------------------------------------------

// O = O · factor + P V: 64 heads, 64 keys, this warpgroup's 256 columns. Releases each group of panels after its
// products if `releases`. `meanwhile()` runs while the products execute.
template <class Storage, class Meanwhile>
HOPWELL_DEVICE void multiply_values(Storage& s, int self, int stage, const Probabilities& probabilities,
                                    const float (&factor)[2], float (&out)[2][64], bool first, bool releases,
                                    const Meanwhile& meanwhile) {
  constexpr arch::WgmmaOptions kOptions{.b_major = arch::Major::mn};
  const uint64_t v = arch::at_address(tile::kRowsAcrossK,
                                      arch::shared_address(s.keys[stage]) + uint32_t(self) * 4 * tile::kPanelBytes);
  if (!first && arch::ballot(factor[0] != 1 || factor[1] != 1) != 0) {
    HOPWELL_UNROLL
    for (int i = 0; i < 128; ++i) out[i / 64][i % 64] *= factor[i / 2 % 2];
  }
  const int first_group = Storage::first_group_of(self);
  const auto slot = tile::ring_stage(s.key_ring, stage);
  arch::wgmma_fence();
  HOPWELL_UNROLL
  for (int part = 0; part < 2; ++part) {
    HOPWELL_UNROLL
    for (int step = 0; step < 4; ++step) {
      const uint64_t offset = (uint32_t(step) * 16 * 128 + uint32_t(part) * 2 * tile::kPanelBytes) >> 4;
      arch::wgmma_rs<kOptions>(out[part], probabilities.fragment[step], v + offset, !first || step > 0);
    }
    arch::wgmma_commit();
  }
  arch::wgmma_wait<1>(out[0]);
  if (releases) slot.release(first_group);
  meanwhile();
  arch::wgmma_wait<0>(out[1]);
  if (releases) slot.release(first_group + 1);
}

// Clears rows whose scale is 0, because their sums may be NaN. Few queries have such rows.
HOPWELL_DEVICE void clear_unscaled(const float (&scale)[2], float (&out)[2][64]) {
  if (arch::ballot(scale[0] == 0 || scale[1] == 0) == 0) return;
  HOPWELL_UNROLL
  for (int i = 0; i < 128; ++i) out[i / 64][i % 64] = scale[i / 2 % 2] == 0 ? 0 : out[i / 64][i % 64];
}

// Rounds a thread's sums of columns 16 n to 16 n + 15, as operands of stmatrix.
HOPWELL_DEVICE void round_columns(const float (&out)[2][64], const float (&scale)[2], int n, uint32_t (&words)[4]) {
  HOPWELL_UNROLL
  for (int i = 0; i < 4; ++i) {
    const float* sums = &out[n / 8][n % 8 * 8 + 2 * i];
    words[i] = arch::pack_bf16(sums[0] * scale[i % 2], sums[1] * scale[i % 2]);
  }
}

// Waits until at most the last kPending batches of this warp's output still read their panels.
template <int kPending>
HOPWELL_DEVICE void await_out() {
  if (arch::lane_index() == 0) arch::bulk_wait_read<kPending>();
  arch::syncwarp();
}

// Writes this warpgroup's half of the output by TMA, a panel at a time. Each warp stages its 16 rows of a panel: even
// panels in out_panels, odd ones in the space of its P, which the other warpgroup has read before it sent its sums. So
// no space of a tile is needed, and the next query's tiles may arrive meanwhile.
template <class Storage>
HOPWELL_DEVICE void store_out(const BoxParams& p, Storage& s, int self, const MathTile& work, const float (&out)[2][64],
                              const float (&scale)[2]) {
  const uint32_t lane = uint32_t(arch::lane_index()), first = uint32_t(arch::warp_index() % 4 * 16);
  HOPWELL_UNROLL
  for (int panel = 0; panel < 4; ++panel) {
    const uint32_t place = (panel % 2 == 0 ? arch::shared_address(s.out_panels[self]) : p_panel(s, self)) + first * 128;
    if (panel >= 2) await_out<1>();
    HOPWELL_UNROLL
    for (int n = 0; n < 4; ++n) {
      uint32_t words[4];
      round_columns(out, scale, 4 * panel + n, words);
      arch::stmatrix(place + tile::swizzled(lane % 16, uint32_t(2 * n) + lane / 16), words);
    }
    arch::fence_proxy_async();
    arch::syncwarp();
    if (lane == 0) {
      arch::tma_store<3>(p.out_rows, {256 * self + 64 * panel, work.first_head + int(first), work.query}, place);
      arch::bulk_commit();
    }
  }
}

// Writes this warpgroup's half of the output: stages it in the space of its half of tile B, stores whole rows, then
// releases the space. Each warp handles its own 16 rows.
template <class Storage>
HOPWELL_DEVICE void store_out(const Params& p, Storage& s, int self, const MathTile& work, const float (&out)[2][64],
                              const float (&scale)[2]) {
  const uint32_t lane = uint32_t(arch::lane_index()), first = uint32_t(arch::warp_index() % 4 * 16);
  const uint32_t place = arch::shared_address(s.keys[1]) + uint32_t(self) * 4 * tile::kPanelBytes;
  HOPWELL_UNROLL
  for (int n = 0; n < 16; ++n) {
    uint32_t words[4];
    round_columns(out, scale, n, words);
    arch::stmatrix(place + uint32_t(n / 4) * tile::kPanelBytes +
                       tile::swizzled(first + lane % 16, uint32_t(n % 4 * 2) + lane / 16),
                   words);
  }
  arch::syncwarp();
  bf16* const target = p.out + work.query * p.out_stride_s + 256 * self + lane * 8;
  HOPWELL_NO_UNROLL
  for (uint32_t row = first; row < first + 16; row += 4) {
    HOPWELL_UNROLL
    for (uint32_t i = row; i < row + 4; ++i) {
      const int head = work.first_head + int(i);
      const arch::Words4 words =
          arch::load_shared_v4(place + lane / 8 * tile::kPanelBytes + tile::swizzled(i, lane % 8));
      bf16* to = target + head * p.out_stride_h;
      if (head >= p.h_q) continue;
      store_columns(p, to, words);
    }
  }
  HOPWELL_UNROLL
  for (int i = 0; i < 2; ++i) tile::ring_stage(s.key_ring, 1).release(Storage::first_group_of(self) + i);
}

template <class Storage, class Tiles>
HOPWELL_DEVICE MathTile math_tile(const typename Storage::KernelParams& p, const Tiles& tiles, uint32_t number) {
  if constexpr (Storage::kOfGroups) return {int(number), 0, tiles.keys_of_tile()};
  return {int(number / uint32_t(p.head_tiles)), int(number % uint32_t(p.head_tiles)) * Storage::kHeads, kKeysOfStep};
}

// In the first step of a query, while its scores execute: takes the number of tiles from the gather.
template <class Storage>
HOPWELL_DEVICE void begin_query(const Storage& s, int self, MathTile& work) {
  if constexpr (!Storage::kOfGroups) work.keys = s.tiles[self][0] * kKeys;
}

// Warpgroup `self` processes tile `self` of every step for the scores, and output columns 256 · self and following. O
// adds the tiles in order. Both warpgroups run the same instructions, so that they share the instruction cache.
template <class Storage>
HOPWELL_DEVICE void math(const typename Storage::KernelParams& p, Storage& s, int self) {
  const int row = tile::wgmma_row();
  uint32_t parity = 0, work_parity = 0;
  TilesOfCta<typename Storage::KernelParams> tiles;
  HOPWELL_NO_UNROLL
  for (uint32_t number = tiles.first(p, uint32_t(arch::block_index()), uint32_t(arch::grid_size()));
       number < p.work_tiles; number = tiles.next(p, number, uint32_t(arch::grid_size())), work_parity ^= 1) {
    MathTile work = math_tile<Storage>(p, tiles, number);
    SoftmaxState state{{-INFINITY, -INFINITY}, {-INFINITY, -INFINITY}, {0, 0}};
    float out[2][64], scale[2];
    // The low warpgroup waits for the first part of tile A and fences it before S, while the previous products execute.
    const auto await_tile = [&](uint32_t its_parity) {
      tile::ring_stage(s.key_ring, 0, its_parity).wait_full(0);
      arch::fence_proxy_async();
    };
    if (self == 0) {
      tile::ring_stage(s.key_ring, 0, parity).wait_full(1);  // Q arrived before this part
      await_tile(parity);
    }
    HOPWELL_NO_UNROLL
    for (int key = 0; key < work.keys; key += kKeysOfStep, parity ^= 1) {
      float scores[32], factor[2], remote_factor[2];
      Probabilities own;
      Mask<Storage> mask;
      const auto await_row_max = [&] {
        arch::mbarrier_wait(s.row_max_full, parity);
        receive_row_max(s, 0, row, state, remote_factor);
      };
      const auto prepare_softmax = [&] {
        mask.read(p, s.valid[self], row);
        if (key == 0) begin_query(s, self, work);
        if (self == 1) await_row_max();
      };
      const bool both = !Storage::kSkipsTileB || work.keys > key + kKeys;
      if (self == 0 || both) {
        multiply_scores(s, self, parity, scores, prepare_softmax);
        if (work.keys <= key + kKeysOfStep) tile::arrive_warp(s.q_empty);
        softmax(p, s, self, mask, scores, state, factor);
        if (Storage::kBoxes && key == 0) await_out<0>();
        store_p(s, self, parity, scores, own);
      } else {
        tile::arrive_warp(s.q_empty);
        await_row_max();
      }
      const bool last = work.keys <= key + kKeysOfStep;
      HOPWELL_NO_UNROLL
      for (int stage = 0; stage <= int(both); ++stage) {
        Probabilities probabilities = own;
        float row_scale[2] = {factor[0], factor[1]};
        if (stage != self) {
          load_p(s, stage, parity, probabilities);
          if (self == 1)
            row_scale[0] = remote_factor[0], row_scale[1] = remote_factor[1];
          else
            receive_row_max(s, 1, row, state, row_scale);
        }
        const bool ends = Storage::kBoxes && last && stage == int(both);
        if (ends) share_sums(s, self, state);
        const auto prepare_next = [&] {
          if (ends) finalize_softmax(p, s, self, work, work_parity, state, scale);
          if (stage == 1 && !last && self == 0) await_tile(parity ^ 1);
        };
        multiply_values(s, self, stage, probabilities, row_scale, out, key == 0 && stage == 0,
                        Storage::kBoxes || !last || stage == 0, prepare_next);
      }
      if (!both) pass_tile_b(s, self, parity);
    }
    if constexpr (!Storage::kBoxes) {
      share_sums(s, self, state);
      finalize_softmax(p, s, self, work, work_parity, state, scale);
    }
    clear_unscaled(scale, out);
    store_out(p, s, self, work, out, scale);
  }
  if constexpr (Storage::kBoxes) await_out<0>();
}

// ---- barriers -------------------------------------------------------------------------------------------------------

template <int kDqk, class KernelParams, bool kSkipsTileB>
HOPWELL_DEVICE void initialise(SharedStorage<kDqk, KernelParams, kSkipsTileB>& s) {
  constexpr uint32_t kWarps = 4, kGatherThreads = 128;
  arch::mbarrier_init(s.q_empty, 2 * kWarps);  // kept: on the emulator any warp releases the reads of wgmma
  s.key_ring.init(kGatherThreads, kWarps, kWarps);
  s.p_ring.init(kWarps, kWarps);
  arch::mbarrier_init(s.row_max_full, kWarps);
  arch::mbarrier_init(s.turn, kWarps);
  arch::mbarrier_init(s.sums_full, 2 * kWarps);
  arch::fence_mbarrier_init();
}

#endif

}  // namespace many_heads
}  // namespace hopwell::ops::sparse_mla_forward::HOPWELL_TARGET
