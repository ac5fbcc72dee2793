// sparse_mla_backward on Hopper: shared by the kernels for 64 and for 128 heads. Panels in shared memory, the gather of
// keys, the products, P and dS, and the output of dQ. Roles, timeline and budget: single.hpp and pair.hpp.
#pragma once

#include "arch/sm80/async_copy.hpp"
#include "arch/sm90/cluster.hpp"
#include "arch/sm90/tma.hpp"
#include "arch/sm90/wgmma.hpp"
#include "ops/sparse_mla_backward/add_dkv.hpp"
#include "ops/sparse_mla_backward/passes/main_pass.hpp"
#include "ops/sparse_mla_backward/prologue.hpp"
#include "ops/sparse_mla_backward/throttle.hpp"
#include "tile/gpu/fragment.hpp"
#include "tile/gpu/panel.hpp"
#include "tile/gpu/tensor_map.hpp"
#include "tile/gpu/warp.hpp"

namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET {

using arch::Major;

struct Config {
  static constexpr int kHeads = 64, kKeys = 64, kThreads = 384, kWarps = kThreads / 32;
  static constexpr int kPanelsV = kDv / 64;
  static constexpr int kScoreRegisters = 208, kScatterRegisters = 88;
  static constexpr float kLargestExponent = 64;
};
static_assert(2 * Config::kScoreRegisters + Config::kScatterRegisters <= 65536 / 128);

// Role of a warpgroup: S or dP, and a half of the columns of dQ and of the next keys; or most of dKV.
enum class Role { scores_low_columns, scores_high_columns, dkv };

struct Panel {
  alignas(1024) bf16 x[64][64];
};

// Tensor maps of tensors of heads, in boxes of 64 columns of 64 heads of a query. TMA takes less time than copies and
// stores of threads, which wait for the additions of other CTAs. `has_inputs`, `has_dq`: false if TMA does not support
// the strides; then threads copy the rows.
struct HeadMaps {
  arch::TensorMap q, d_out, dq;
  bool has_inputs, has_dq;
};

inline HeadMaps head_maps_of(const Problem& problem, const MainPass& pass) {
  HeadMaps maps{};
  if (pass.clusters() == 0) return maps;
  maps.has_inputs = tile::can_map(problem.q, {0, 1}) && tile::can_map(problem.d_out, {0, 1});
  maps.has_dq = problem.dq && tile::can_map(problem.dq, {0, 1});
  const auto map = [](const View& v) {
    return tile::map_of(v, {{2, tile::kPanelColumns}, {1, Config::kHeads}, {0, 1}}, arch::Swizzle::bytes128);
  };
  if (maps.has_inputs) maps.q = map(problem.q), maps.d_out = map(problem.d_out);
  if (maps.has_dq) maps.dq = map(problem.dq);
  return maps;
}

#if HOPWELL_HAS_SM90A

// d_qk 576 has nine panels, a half of dQ four and a half: both halves share the middle panel.
template <int kDqk>
constexpr bool kHasMiddle = kDqk / 64 % 2 == 1;

// ---- Q, dO and keys

// Starts the copies of kColumns columns of 64 heads, executed by all threads; padding heads are filled with zeros.
// target(row, chunk): destination of 16 bytes.
template <int kColumns, class Target>
HOPWELL_DEVICE void load_heads(Target target, const bf16* source, int64_t stride, int heads) {
  for (int e = arch::thread_index(); e < Config::kHeads * (kColumns / 8); e += Config::kThreads) {
    const int row = e / (kColumns / 8), chunk = e % (kColumns / 8);
    arch::cp_async(target(row, chunk), source + (row < heads ? row : 0) * stride + 8 * chunk, row < heads ? 16 : 0);
  }
}
// The same for whole panels by TMA, executed by one thread. `full` counts the bytes.
HOPWELL_DEVICE void load_panels(const Panel* target, int panels, const arch::TensorMap& map, int column, int head,
                                int query, arch::mbarrier& full) {
  for (int i = 0; i < panels; ++i)
    arch::tma_load<3>(arch::shared_address(&target[i]), map, {column + 64 * i, head, query}, full);
}
// Stores panels of dQ by TMA, executed by a warpgroup's thread 0 after a fence and a barrier of the warpgroup.
HOPWELL_DEVICE void store_panels(const Panel* source, int panels, const arch::TensorMap& map, int column, int head,
                                 int query) {
  for (int i = 0; i < panels; ++i)
    arch::tma_store<3>(map, {column + 64 * i, head, query}, arch::shared_address(&source[i]));
  arch::bulk_commit();
}

// A target in panels.
HOPWELL_DEVICE auto in_panels(const Panel* panels) {
  return [panels](int row, int chunk) {
    return arch::shared_address(&panels[chunk / 8]) + tile::swizzled(row, chunk % 8);
  };
}

// The keys of four rows: thread t of a warpgroup copies 16-byte chunk t % 8 of rows t / 8 + 16 m.
template <class List>
HOPWELL_DEVICE void load_keys(int (&keys)[4], const List& entries, int step, int t) {
  HOPWELL_UNROLL
  for (int m = 0; m < 4; ++m) keys[m] = entries.key(step * Config::kKeys + t / 8 + 16 * m);
}

// Publishes the keys for the additions.
HOPWELL_DEVICE void publish_keys(int (&key)[2][Config::kKeys], const int (&keys)[4], int step, int t) {
  const int chunk = t & 7;
  HOPWELL_UNROLL
  for (int m = 0; m < 4; ++m)
    if (chunk == m) key[step % 2][t / 8 + 16 * m] = keys[m];
}

// Called by a warpgroup near the end of a tile: prefetches rows of q, d_out and out to L2 for the tile that will follow
// on this SM or on another one. Rows with window keys are short, so that the loads of a tile's beginning, which all SMs
// issue at about the same time, are a large part of its time. kCtas: of a tile. head: of the CTA's first one in its
// tile.
template <int kDqk, int kCtas>
HOPWELL_DEVICE void prefetch_next_tile(const Params& /*p*/, int /*head*/, int /*t*/) {}
template <int kDqk, int kCtas>
HOPWELL_DEVICE void prefetch_next_tile(const WindowParams& p, int head, int t) {
  const int cluster = (int(arch::block_index()) + p.sms) / kCtas;
  if (cluster >= int(arch::grid_size()) / kCtas) return;
  const WorkTile work = tile_of(p, cluster, kCtas * Config::kHeads);
  const int first = work.first_head + head, left = p.h_q - first, heads = left < Config::kHeads ? left : Config::kHeads;
  // Eight threads have the 128-byte lines of a row.
  const auto prefetch = [&](const bf16* rows, int64_t stride_s, int64_t stride_h) {
    const bf16* row = rows + work.query * stride_s + (first + t / 8) * stride_h + 64 * (t & 7);
    HOPWELL_NO_UNROLL
    for (int i = t / 8; i < heads; i += 16, row += 16 * stride_h) arch::prefetch_l2(row);
  };
  prefetch(p.q, p.q_stride_s, p.q_stride_h);
  if (kDqk > kDv) prefetch(p.q + kDqk - kDv, p.q_stride_s, p.q_stride_h);
  prefetch(p.out, p.out_stride_s, p.out_stride_h);
  prefetch(p.d_out, p.d_out_stride_s, p.d_out_stride_h);
  arch::syncwarp();  // kept: lanes have diverged
}

// ---- products

constexpr arch::WgmmaOptions kBTransposed{.b_major = Major::mn},
    kBothTransposed{.a_major = Major::mn, .b_major = Major::mn};

// acc [64 heads][64 keys] = A · keysᵀ over kPanels panels.
template <int kPanels>
HOPWELL_DEVICE void multiply_scores(float (&acc)[32], const Panel* a, const Panel* keys) {
  const uint64_t left = arch::at_address(tile::kRowsAlongK, arch::shared_address(a)),
                 right = arch::at_address(tile::kRowsAlongK, arch::shared_address(keys));
  HOPWELL_UNROLL
  for (int step = 0; step < 4 * kPanels; ++step)
    arch::wgmma_ss(acc, left + tile::columns_on(step), right + tile::columns_on(step), step > 0);
}

// dS of 64 heads and 64 keys as A fragments, four per 16 keys. `load_ds` loads dS that another warpgroup stored.
using DsFragments = uint32_t[4][4];

// 32 columns of 64 keys next to whole panels, as descriptors: start, and distance between groups of 16 keys.
struct ColumnsBeside {
  uint64_t first, of_16_keys;
};

// dq [64 heads][2 kSize columns] += dS · panels of keys; and narrow [64 heads][32 columns] += dS · the columns next to
// them.
template <bool kNarrow, int kSize>
HOPWELL_DEVICE void multiply_dq(float (&dq)[kSize], float (&narrow)[16], const DsFragments& ds, const Panel& keys,
                                const ColumnsBeside& beside) {
  const uint64_t right = arch::at_address(tile::kRowsAcrossK, arch::shared_address(&keys));
  HOPWELL_UNROLL
  for (int step = 0; step < 4; ++step) {
    arch::wgmma_rs<kBTransposed>(dq, ds[step], right + uint64_t(128 * step), true);
    if constexpr (kNarrow)
      arch::wgmma_rs<kBTransposed>(narrow, ds[step], beside.first + beside.of_16_keys * uint64_t(step), true);
  }
}

// acc [64 keys][2 kSize columns] (+)= aᵀ · b, a [64 heads][64 keys], b [64 heads][a panel, or a narrow one]: by
// address, so that the panel may be a run-time number. kHeadSteps: number of 16-head blocks; the others are zeros.
template <int kHeadSteps, bool kNarrow = false, int kSize>
HOPWELL_DEVICE void multiply_transposed(float (&acc)[kSize], uint32_t a, uint32_t b, bool accumulate) {
  const uint64_t left = arch::at_address(tile::kRowsAcrossK, a),
                 right = arch::at_address(kNarrow ? tile::kNarrowRowsAcrossK : tile::kRowsAcrossK, b);
  HOPWELL_UNROLL
  for (int step = 0; step < kHeadSteps; ++step)
    arch::wgmma_ss<kBothTransposed>(acc, left + uint64_t(128 * step), right + uint64_t((kNarrow ? 64 : 128) * step),
                                    accumulate || step > 0);
}

// P or dS transposed, as A fragments for 64 keys: ldmatrix.trans, with row addresses from lanes 0-7 for heads 0-7 of
// the first 8 keys, from lanes 8-15 for the next 8 keys, from lanes 16-31 the same for heads 8-15.
template <int kHeadSteps>
HOPWELL_DEVICE void load_transposed(uint32_t (&fragments)[kHeadSteps][4], const Panel& from, int t) {
  const int lane = t % 32;
  const uint32_t source =
      arch::shared_address(&from) + tile::swizzled((lane & 7) + 8 * (lane >> 4), t / 32 * 2 + (lane >> 3 & 1));
  HOPWELL_UNROLL
  for (int k = 0; k < kHeadSteps; ++k) arch::ldmatrix<arch::Transpose::yes>(fragments[k], source + uint32_t(2048 * k));
}

// A panel of 64 heads as an MN-major operand, multiplied over heads.
HOPWELL_DEVICE uint64_t across_heads(const Panel& panel) {
  return arch::at_address(tile::kRowsAcrossK, arch::shared_address(&panel));
}

// acc [64 keys][2 kSize columns] (+)= such fragments · a panel of dO or Q, or half of it. Saves shared memory
// bandwidth.
template <int kHeadSteps, int kSize>
HOPWELL_DEVICE void multiply_fragments(float (&acc)[kSize], const uint32_t (&fragments)[kHeadSteps][4], uint64_t right,
                                       bool accumulate) {
  HOPWELL_UNROLL
  for (int k = 0; k < kHeadSteps; ++k)
    arch::wgmma_rs<kBTransposed>(acc, fragments[k], right + uint64_t(128 * k), accumulate || k > 0);
}
// The same if only the first heads' fragments fit in registers; `left` has all of them.
template <int kHeadSteps, int kLoaded, int kSize>
HOPWELL_DEVICE void multiply_fragments(float (&acc)[kSize], const uint32_t (&fragments)[kLoaded][4], uint64_t left,
                                       uint64_t right, bool accumulate) {
  multiply_fragments(acc, fragments, right, accumulate);
  HOPWELL_UNROLL
  for (int step = kLoaded; step < kHeadSteps; ++step)
    arch::wgmma_ss<kBothTransposed>(acc, left + uint64_t(128 * step), right + uint64_t(128 * step), true);
}

// ---- P and dS

// Row and chunk that a lane addresses for stmatrix and ldmatrix, among its warp's 16 rows and two chunks of 8 columns.
struct MatrixLane {
  int row, chunk;
};
HOPWELL_DEVICE MatrixLane matrix_lane(int t) { return {t / 32 * 16 + (t & 15), t >> 4 & 1}; }
// Byte offset in a panel of that row and chunk, from chunk j on.
HOPWELL_DEVICE uint32_t matrix_offset(const MatrixLane& lane, int j) {
  return tile::swizzled(lane.row, j + lane.chunk);
}

// For query groups: member bits of a thread's two rows of P. One bit per column: whether the row's query has the key.
using HeldKeys = uint32_t[2];
HOPWELL_DEVICE void load_held_keys(HeldKeys& held, const uint16_t (&member_masks)[Config::kKeys / 2],
                                   int heads_of_member, int t) {
  const int row = tile::wgmma_row_of(t), member[2] = {row / heads_of_member, (row + 8) / heads_of_member};
  held[0] = held[1] = 0;
  HOPWELL_UNROLL
  for (int j = 0; j < 8; ++j) {
    const uint32_t of_two_keys = member_masks[4 * j + (t & 3)];
    HOPWELL_UNROLL
    for (int i = 0; i < 4; ++i) held[i / 2] |= (of_two_keys >> (member[i / 2] + 8 * (i % 2)) & 1) << (2 * j + i % 2);
  }
}

// Converts scores to exp(score − lse'), or to exp(score − lse) with attn. kMerged: only where the query has the key.
template <bool kMerged = false>
HOPWELL_DEVICE void make_p(const Params& p, float (&acc)[32], const HeadValues<Config::kHeads>& heads, int t,
                           const HeldKeys& held = {}) {
  const int row = tile::wgmma_row_of(t);
  const float lse0 = heads.lse_log2[row], lse1 = heads.lse_log2[row + 8];
  HOPWELL_UNROLL
  for (int e = 0; e < 32; ++e) {
    const float x = acc[e] * p.scale_log2 - (e & 2 ? lse1 : lse0);
    acc[e] = arch::exp2_approx(x > Config::kLargestExponent ? Config::kLargestExponent : x);  // NaN stays NaN
    if (kMerged && !(held[e >> 1 & 1] >> (e / 4 * 2 + (e & 1)) & 1)) acc[e] = 0;
  }
}

// Stores P to shared memory; with attn, multiplied by sink_scale.
template <bool kAttn>
HOPWELL_DEVICE void store_p(const float (&acc)[32], const HeadValues<Config::kHeads>& heads, const Panel& target,
                            int t) {
  const int row = tile::wgmma_row_of(t);
  const float sink_scale0 = kAttn ? heads.sink_scale[row] : 1, sink_scale1 = kAttn ? heads.sink_scale[row + 8] : 1;
  HOPWELL_UNROLL
  for (int j = 0; j < 8; j += 2) {
    uint32_t packed[4];
    HOPWELL_UNROLL
    for (int m = 0; m < 4; ++m) {
      const float factor = m & 1 ? sink_scale1 : sink_scale0;
      packed[m] = arch::pack_bf16(kAttn ? acc[4 * j + 2 * m] * factor : acc[4 * j + 2 * m],
                                  kAttn ? acc[4 * j + 2 * m + 1] * factor : acc[4 * j + 2 * m + 1]);
    }
    arch::stmatrix(arch::shared_address(&target) + matrix_offset(matrix_lane(t), j), packed);
  }
}

// Converts dP and P to dS.
HOPWELL_DEVICE void make_ds(const Params& p, const float (&acc)[32], const HeadValues<Config::kHeads>& heads,
                            const Panel& source, DsFragments& ds, int t) {
  const auto& delta = heads.delta;
  const int row = tile::wgmma_row_of(t);
  const float delta0 = delta[row], delta1 = delta[row + 8];
  HOPWELL_UNROLL
  for (int k = 0; k < 4; ++k) {
    uint32_t probability[4];
    arch::ldmatrix(probability, arch::shared_address(&source) + matrix_offset(matrix_lane(t), 2 * k));
    HOPWELL_UNROLL
    for (int m = 0; m < 4; ++m) {
      const float subtract = m & 1 ? delta1 : delta0;
      const float low = arch::bit_cast<float>(probability[m] << 16),
                  high = arch::bit_cast<float>(probability[m] & 0xffff0000);
      ds[k][m] = arch::pack_bf16(low * (acc[8 * k + 2 * m] * p.sm_scale - subtract),
                                 high * (acc[8 * k + 2 * m + 1] * p.sm_scale - subtract));
    }
  }
}
HOPWELL_DEVICE void store_ds(const DsFragments& ds, const Panel& target, int t) {
  HOPWELL_UNROLL
  for (int k = 0; k < 4; ++k)
    arch::stmatrix(arch::shared_address(&target) + matrix_offset(matrix_lane(t), 2 * k), ds[k]);
}
HOPWELL_DEVICE void load_ds(DsFragments& ds, const Panel& source, int t) {
  HOPWELL_UNROLL
  for (int k = 0; k < 4; ++k)
    arch::ldmatrix(ds[k], arch::shared_address(&source) + matrix_offset(matrix_lane(t), 2 * k));
}

// Sums exp(score − lse) over a warp's 16 heads: within a lane, then over the 8 lanes of a column. add_attn follows
// later, when the tensor cores are busy.
HOPWELL_DEVICE void sum_heads(const float (&acc)[32], float (&head_sums)[4][Config::kKeys], int t) {
  const int lane = t % 32;
  float sum[16];
  HOPWELL_UNROLL
  for (int i = 0; i < 16; ++i) sum[i] = acc[i / 2 * 4 + i % 2] + acc[i / 2 * 4 + i % 2 + 2];
  tile::share_sums(sum, 8, 16, lane & 16);
  tile::share_sums(sum, 4, 8, lane & 8);
  tile::share_sums(sum, 2, 4, lane & 4);
  const int column = 32 * (lane >> 4 & 1) + 16 * (lane >> 3 & 1) + 8 * (lane >> 2 & 1) + 2 * (lane & 3);
  head_sums[t / 32][column] = sum[0];
  head_sums[t / 32][column + 1] = sum[1];
}

// Adds the sums over the 4 warps to attn, which holds 0 or the sum of other heads. In the order of the selection,
// sorted or not: sparse_mla_bwd_restore_attn_order moves sums to their entries.
template <class P>
HOPWELL_DEVICE void add_attn(const P& p, const float (&head_sums)[4][Config::kKeys], const int (&keys)[Config::kKeys],
                             const WorkTile& work, const typename P::Entries& entries, int step, int t) {
  if (t < Config::kKeys && keys[t] >= 0 && has_slot(entries, step * Config::kKeys + t))
    arch::red_add(p.attn + work.query * p.attn_stride + first_slot(p, work, entries) + step * Config::kKeys + t,
                  head_sums[0][t] + head_sums[1][t] + head_sums[2][t] + head_sums[3][t]);
  arch::syncwarp();  // kept: lanes have diverged
}

// ---- dQ

// Converts 16 columns of a warp's rows from accumulators to bf16 in shared memory. target: this lane's address for
// stmatrix.
HOPWELL_DEVICE void stage_fragment(uint32_t target, const float* x) {
  const uint32_t packed[4] = {arch::pack_bf16(x[0], x[1]), arch::pack_bf16(x[2], x[3]), arch::pack_bf16(x[4], x[5]),
                              arch::pack_bf16(x[6], x[7])};
  arch::stmatrix(target, packed);
}

// Stages 2 kSize columns of 64 rows in panels.
template <int kSize>
HOPWELL_DEVICE void stage_panels(const Panel* panels, const float (&x)[kSize], const MatrixLane& lane) {
  HOPWELL_UNROLL
  for (int j = 0; j < kSize / 4; j += 2)
    stage_fragment(arch::shared_address(&panels[j / 8]) + matrix_offset(lane, j % 8), &x[4 * j]);
}

// Stores dQ of a split in fp32: columns from `column` on of the rows of `target`, in the order of the accumulators.
template <int kDqk, int kSize>
HOPWELL_DEVICE void store_dq_split(float* target, const float (&dq)[kSize], int column, int t) {
  const int row = tile::wgmma_row_of(t);
  HOPWELL_UNROLL
  for (int e = 0; e < kSize; ++e)
    target[(row + (e & 2) * 4) * kDqk + column + e / 4 * 8 + 2 * (t & 3) + (e & 1)] = dq[e];
}

#endif

}  // namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET
