// sparse_mla_decode for Hopper, tiles of 8 or 16 heads: attention of some splits of a query's keys, for rows of every
// format.
//
//     Sᵀ = K Qᵀ        Oᵀ = Vᵀ Pᵀ        keys and output columns are the 64 rows of a product, heads its columns
//     O[h,:] = Σ_i exp2(score[h,i] − m) · K[i, :512]        scores in units of log 2, m: row_max
//
// Tile      one query, 8 or 16 heads, one or more splits of its entries; 64 keys at a time
// Roles     warpgroup 0  values    O += P V for all columns, the sums of the softmax, and the merge of splits
//           warpgroup 1  scores    S and the softmax
//           warpgroup 2  gather    finds the rows of valid entries, and copies rows of codes to the stages: gather.hpp
//           3 and 4      dequant   decode the rows to bf16 and store them to panels for wgmma: decoded_rows.hpp; or
//                                  copy rows of bf16: copied_rows.hpp
// Timeline  gather   rows 3 │··············│rows 4 │··············│rows 5 │
//           dequant  ·······│part 0 ▒▒▒│part 1 ▒▒▒▒│part 0 ▒▒▒│part 1 ▒▒▒▒│
//           scores   ···│S 1 ▓▓▓▓│exp ░░│····│S 2 ▓▓▓▓│exp ░░│····│S 3 ▓▓▓▓│
//           values   ···················│O += P 1 V ▓▓▓▓│···│O += P 2 V ▓▓▓▓│
// Softmax   A thread has two keys of a warp's 16 and two heads of each eight. Maxima and sums of a tile go through
//           shared memory. Sums are added in the order of many_heads.hpp, so a head has the same bits in both kernels.
// Splits    The CTA of a query's first split merges its splits in registers, in order. If it has all splits, the
//           result is final. Other CTAs store a partial result of each of their splits. With few queries the CTAs of a
//           query, one for each split, are a cluster that merges them: cluster_merge.hpp.
// Budget    shared: 8 heads, V3.2 rows: K 3 × 73,728 + Q 9,216 + ~1,300, rounded up to 1,024: 232,448 B, the limit; 16
//           heads: 2 × 74,752 + 18,432 + ~1,700, about 166 KB; V4 rows 3 × 70,656 + 16,384 + ~1,700, about 225 KB
//           registers: 16 heads: values O 64 + merged O 64 + ~40 (168); scores 72; gather 48; dequant 96
// Bound     the multiprocessor, not DRAM: a call of one CTA takes as long for its keys as a call of 128. A key takes 54
//           clocks (8 heads, V3.2 rows, H200). The dequant warps are busy for 50 of them, the gather warps for 32, the
//           value warps for 18, and the score warps, with their wait for part 1, for 48. DRAM would take 35 clocks,
//           random rows by bulk copies alone about 43
#pragma once

#include "arch/sm90/wgmma.hpp"
#include "ops/sparse_mla_decode/sm90/cluster_merge.hpp"
#include "ops/sparse_mla_decode/sm90/gather.hpp"
#include "ops/sparse_mla_decode/sm90/panels.hpp"
#include "ops/sparse_mla_decode/sm90/query.hpp"
#include "runtime/launch.hpp"
#include "runtime/with_constant.hpp"
#include "tile/gpu/dependency.hpp"
#include "tile/gpu/fragment.hpp"

namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET {
namespace few_heads {

constexpr int kValueThreads = 128, kScoreThreads = 128;

template <int kHeads>
struct TileResult;

template <class Row, int kHeads, int kStages, int kPanelsOfPart>
using TileOf = KeyTile<Row, kValueThreads, kStages, kPanelsOfPart, sizeof(TileResult<kHeads>), kScoreThreads>;
// Whether shared memory has room for three stages, Q and 2 KB for the rest.
template <class Row, int kHeads, int kPanelsOfPart>
constexpr bool kThreeStagesFit =
    3 * (TileOf<Row, kHeads, 3, kPanelsOfPart>::kStageBytes + (Row::kHasCodes ? 0 : 1024)) + kHeads * 2 * Row::kWidth +
        2048 <=
    arch::sm90::kMaxSharedBytes;
// With four panels in part 0 the raw rows of V3.2 end 1 KB past the RoPE panel, and three stages do not fit. With three
// they end where it ends.
template <class Row, int kHeads>
constexpr int kPanelsOfPart = kThreeStagesFit<Row, kHeads, 4> || !kThreeStagesFit<Row, kHeads, 3> ? 4 : 3;
template <class Row, int kHeads>
using BestTile =
    TileOf<Row, kHeads, kThreeStagesFit<Row, kHeads, kPanelsOfPart<Row, kHeads>> ? 3 : 2, kPanelsOfPart<Row, kHeads>>;

template <class TheRow, int kTheHeads>
struct Config : BestTile<TheRow, kTheHeads> {
  static constexpr int kHeads = kTheHeads, kHeadBlocks = kHeads / 8;
  static constexpr int kValueRegisters = kHeads == 8 ? 112 : 168, kScoreRegisters = 72,
                       kGatherRegisters = kHeads == 8 ? 56 : 48, kDequantRegisters = kHeads == 8 ? 120 : 96;
  static constexpr int kThreadHeads = kHeads / 4;     // in the products
  static constexpr int kBytesOfHeads = kHeads * 128;  // 64 columns of all heads
};

// The score warpgroup's result for a tile, which the value warpgroup reads. It lies in the tile's stage, behind the
// panels of V: over RoPE, over rows that have been decoded, or where neither has room, in bytes of its own.
template <int kHeads>
struct TileResult {
  alignas(1024) unsigned char p[kHeads * 128];  // [head][key]
  float sums[4][kHeads][4];                     // [warp][head][c]: sum over keys with key mod 8 = 2 c or 2 c + 1
  float row_scale[kHeads];                      // of O before the tile
  float row_max[kHeads];
};

template <class Config>
struct Storage {
  alignas(1024) KeyPanels<Config> panels;
  alignas(1024) unsigned char q[Config::kDqk / 64][Config::kBytesOfHeads];
  KeyTiles<Config> tiles;
  arch::mbarrier scored[Config::kStages];  // TileResult is full
  float maxima[2][4][Config::kHeads];      // of even and odd tiles, by warp
  float factor[Config::kHeads];            // of the final output
  MergeFactors merge[Config::kHeads];

  // Executed by one thread, before a barrier of the CTA.
  HOPWELL_DEVICE void initialise() {
    tile::init_barriers(kScoreThreads / 32, scored);
    tiles.initialise();
  }
  HOPWELL_DEVICE TileResult<Config::kHeads>& result(int stage) {
    return *reinterpret_cast<TileResult<Config::kHeads>*>(panels[stage] + Config::kExtraAt);
  }
};

// Named barriers, with other numbers than key_tiles.hpp has: Q is in shared memory; of the score warpgroup.
constexpr int kQueryBarrier = 3, kScoreBarrier = 4;

#if HOPWELL_HAS_SM90A

// Where a thread's values of a product are: heads h, and rows r, which are keys or columns of the output.
struct Place {
  static HOPWELL_DEVICE int thread() { return arch::thread_index() % 128; }
  static HOPWELL_DEVICE int head(int h) { return h / 2 * 8 + tile::fragment_column() + h % 2; }
  // Without warp_index(), which a whole warp must call.
  static HOPWELL_DEVICE int row(int r) { return thread() / 32 * 16 + tile::fragment_row() + 8 * r; }
  // The first of the two columns of each panel of the output; kEvenOdd: key_tiles.hpp.
  template <bool kEvenOdd>
  static HOPWELL_DEVICE int column() {
    return kEvenOdd ? thread() / 32 * 16 + 2 * tile::fragment_row() : row(0);
  }
  static HOPWELL_DEVICE int value(int h, int r) { return h / 2 * 4 + 2 * r + h % 2; }
};

// Sᵀ = K Qᵀ, in the order in which the parts of the tile become full.
template <class Config, class Slot>
HOPWELL_DEVICE void multiply_scores(const Storage<Config>& s, const Slot& slot, float (&scores)[Config::kHeads / 2]) {
  const uint64_t a = arch::at_address(tile::kRowsAlongK, arch::shared_address(s.panels[slot.stage()]));
  const uint64_t b = arch::at_address(tile::kRowsAlongK, arch::shared_address(s.q));
  HOPWELL_UNROLL
  for (int i = 0; i < Config::kPanels; ++i) {
    if (i == 0 || i == Config::kPanelsOfPart) {
      slot.wait_full(i == 0 ? 0 : 1);
      // Else the dequant warps have executed it. Also for the products of the value warpgroup, which waits for
      // `scored`.
      if constexpr (Config::kCopiesRows) arch::fence_proxy_async();
      arch::wgmma_fence();
    }
    const int panel = tile::score_panel<Config::kDqk>(i);
    HOPWELL_UNROLL
    for (int step = 0; step < 4; ++step)
      arch::wgmma_ss(scores, a + tile::columns_on(4 * panel + step),
                     b + (uint32_t(panel * Config::kBytesOfHeads + 32 * step) >> 4), i > 0 || step > 0);
  }
  arch::wgmma_commit();
  arch::wgmma_wait<0>(scores);
}

// row_max of a thread's heads, in units of log 2.
template <class Config>
struct Softmax {
  static constexpr int kHeads = Config::kThreadHeads;
  float row_max[kHeads];

  HOPWELL_DEVICE Softmax() {
    HOPWELL_UNROLL
    for (float& m : row_max) m = -INFINITY;
  }
  // Converts a tile's scores to probabilities. Stores them, their sums, row_scale and row_max. maxima: of the tile.
  HOPWELL_DEVICE void operator()(float (&maxima)[4][Config::kHeads], float scale_log2, int valid_keys,
                                 float (&scores)[Config::kHeads / 2], TileResult<Config::kHeads>& result) {
    const int warp = arch::warp_index() % 4, lane = arch::lane_index();
    float unit = scale_log2;
    if (valid_keys < Config::kKeys || !(scale_log2 > 0)) {
      unit = 1;
      HOPWELL_UNROLL
      for (int i = 0; i < Config::kHeads / 2; ++i)
        scores[i] = Place::row(i / 2 % 2) < valid_keys ? scores[i] * scale_log2 : -INFINITY;
    }
    HOPWELL_UNROLL
    for (int h = 0; h < kHeads; ++h) {
      const float max = fmaxf(scores[Place::value(h, 0)], scores[Place::value(h, 1)]);
      const float of_warp = tile::reduce<4, 16>(max, tile::Larger{}) * unit;
      if (lane < 4) maxima[warp][Place::head(h)] = of_warp;
    }
    arch::barrier_sync(kScoreBarrier, kScoreThreads);
    HOPWELL_UNROLL
    for (int h = 0; h < kHeads; ++h) {
      const int head = Place::head(h);
      const float max = fmaxf(fmaxf(maxima[0][head], maxima[1][head]), fmaxf(maxima[2][head], maxima[3][head]));
      const float scale = tile::update_row_max(row_max[h], tile::next_row_max(row_max[h], max));
      if (Place::thread() < 4) result.row_scale[head] = scale, result.row_max[head] = row_max[h];
      const float shift = tile::finite_row_max(row_max[h]);
      float of_keys = 0;
      HOPWELL_UNROLL
      for (int r = 0; r < 2; ++r) {
        float& x = scores[Place::value(h, r)];
        x = arch::exp2_approx(fmaf(x, unit, -shift));
        of_keys = r == 0 ? x : of_keys + x;
      }
      of_keys += arch::shuffle_xor(of_keys, 4);
      if (lane / 4 % 2 == 0) result.sums[warp][head][lane / 8] = of_keys;
    }
    store_probabilities(result, scores);
  }

 private:
  // Rows of P are heads: stmatrix stores transposed matrices of eight keys and eight heads.
  static HOPWELL_DEVICE void store_probabilities(TileResult<Config::kHeads>& result,
                                                 const float (&scores)[Config::kHeads / 2]) {
    const int lane = arch::lane_index(), matrix = lane / 8 % (2 * Config::kHeadBlocks);
    uint32_t words[2 * Config::kHeadBlocks];
    HOPWELL_UNROLL
    for (int i = 0; i < 2 * Config::kHeadBlocks; ++i) words[i] = arch::pack_bf16(scores[2 * i], scores[2 * i + 1]);
    arch::stmatrix<arch::Transpose::yes>(
        arch::shared_address(result.p) +
            tile::swizzled(matrix / 2 * 8 + lane % 8, arch::warp_index() % 4 * 2 + matrix % 2),
        words);
  }
};

// Thread 4 · head + c of the value warpgroup sums a head's probabilities over the keys with key mod 8 = 2 c or 2 c + 1,
// even and odd tiles separately; and it has the head's maximum.
template <class Config>
struct HeadSums {
  float present = 0, other = 0, row_max = -INFINITY;
  static HOPWELL_DEVICE bool has() { return arch::thread_index() < 4 * Config::kHeads; }
  static HOPWELL_DEVICE int head() { return arch::thread_index() / 4; }

  HOPWELL_DEVICE void add_tile(const TileResult<Config::kHeads>& result) {
    if (!has()) return;
    const int c = arch::thread_index() % 4;
    const float scale = result.row_scale[head()];
    const float sums[4] = {result.sums[0][head()][c], result.sums[1][head()][c], result.sums[2][head()][c],
                           result.sums[3][head()][c]};
    const float of_tile = tile::rescaled(present, scale) + tile::sum_of_tile(sums);
    present = tile::rescaled(other, scale), other = of_tile;
    row_max = result.row_max[head()];
  }
  // Of all keys.
  [[nodiscard]] HOPWELL_DEVICE float total() const { return tile::sum_of_quad(present) + tile::sum_of_quad(other); }
};

// Output of a thread: for each panel, two columns of two heads of each eight.
template <class Config>
using Output = float[8][Config::kHeads / 2];

// Oᵀ = Oᵀ · row_scale + Vᵀ Pᵀ: 64 keys, all columns. The panels are released.
template <class Config, class Slot>
HOPWELL_DEVICE void multiply_values(Storage<Config>& s, const Slot& slot, Output<Config>& out, bool first) {
  constexpr arch::WgmmaOptions kOptions{.a_major = arch::Major::mn};
  const uint64_t v = arch::at_address(tile::kRowsAcrossK, arch::shared_address(s.panels[slot.stage()]));
  const TileResult<Config::kHeads>& result = s.result(slot.stage());
  const uint64_t b = arch::at_address(tile::kRowsAlongK, arch::shared_address(result.p));
  float scale[Config::kThreadHeads];
  bool changed = false;
  HOPWELL_UNROLL
  for (int h = 0; h < Config::kThreadHeads; ++h) {
    scale[h] = result.row_scale[Place::head(h)];
    changed = changed || scale[h] != 1;
  }
  if (!first && arch::ballot(changed) != 0) {
    HOPWELL_UNROLL
    for (auto& of_panel : out) {
      HOPWELL_UNROLL
      for (int i = 0; i < Config::kHeads / 2; ++i) of_panel[i] *= scale[i / 4 * 2 + i % 2];
    }
  }
  arch::wgmma_fence();
  HOPWELL_UNROLL
  for (int panel = 0; panel < 8; ++panel) {
    HOPWELL_UNROLL
    for (int step = 0; step < 4; ++step)
      arch::wgmma_ss<kOptions>(out[panel], v + (uint32_t(panel) * tile::kPanelBytes + uint32_t(step) * 16 * 128 >> 4),
                               b + (uint32_t(step) * 32 >> 4), !first || step > 0);
  }
  arch::wgmma_commit();
  arch::wgmma_wait<0>();
  HOPWELL_UNROLL
  for (auto& of_panel : out) arch::pin_registers(of_panel);
  slot.release(0);
  slot.release(1);
}

// ---- results --------------------------------------------------------------------------------------------------------

// Ends the split of a CTA of a cluster: stores its result, and merges it with the others. The products have read the
// stages.
template <class Config>
HOPWELL_DEVICE void end_in_cluster(const SplitParams& p, Storage<Config>& s, const HeadSums<Config>& sums,
                                   const Output<Config>& of_split) {
  auto& result = *reinterpret_cast<SplitResult<Config::kHeads>*>(s.panels);
  static_assert(sizeof result <= sizeof s.panels);
  if (HeadSums<Config>::has()) {
    const int head = HeadSums<Config>::head();
    const Stats stats{sums.row_max, sums.total()};
    if (arch::thread_index() % 4 == 0) result.stats[head] = stats;
  }
  HOPWELL_UNROLL
  for (int h = 0; h < Config::kThreadHeads; ++h) {
    float* const to = &result.out[Place::head(h)][Place::column<Config::kEvenOdd>()];
    HOPWELL_UNROLL
    for (int i = 0; i < 16; ++i)
      to[64 * (i / 2) + (Config::kEvenOdd ? 1 : 8) * (i % 2)] = of_split[i / 2][Place::value(h, i % 2)];
  }
  merge_in_cluster<Config>(p, result);
}

// In a query's first CTA the merged result of its splits so far; in other CTAs the result of the present split.
template <class Config>
struct Result {
  Output<Config> out = {};
  Stats stats;  // of the head of HeadSums, in the threads that have one

  // Ends split `split` of the CTA: merges it, or stores its partial result. has_keys: whether the split has keys.
  HOPWELL_DEVICE void end_split(const SplitParams& p, Storage<Config>& s, int split, const HeadSums<Config>& sums,
                                bool has_keys, const Output<Config>& of_split) {
    const Work work(p, Config::kHeads);
    const bool has_all = p.ctas_of_query == 1, merges = p.splits > 1 && work.split == 0,
               is_last = split == work.splits - 1, is_final = has_all && is_last,
               is_partial = !has_all && (!merges || is_last);
    const int of_query = merges ? 0 : work.split + split;  // split that the partial result belongs to
    arch::barrier_sync(kReaderBarrier, Config::kReaders);
    if (p.merges_in_cluster) return end_in_cluster<Config>(p, s, sums, of_split);
    if (HeadSums<Config>::has()) {
      const int of_tile = HeadSums<Config>::head(), head = work.first_head + of_tile;
      const Stats later{sums.row_max, sums.total()};
      const MergeFactors factors = merges ? merge_stats(stats, later) : MergeFactors{};
      if (!merges) stats = later;
      if (arch::thread_index() % 4 == 0) s.merge[of_tile] = factors;
      if (head < p.h_q && arch::thread_index() % 4 == 0) {
        if (is_final) s.factor[of_tile] = finish_head(p, work.query, head, stats, true);
        if (is_partial) stats_at(p, work.query, of_query, head) = arch::bit_cast<arch::Words2>(stats);
        if (merges && split > 0 && !has_all)
          stats_at(p, work.query, split, head) = arch::bit_cast<arch::Words2>(Stats{});
      }
    }
    arch::barrier_sync(kReaderBarrier, Config::kReaders);
    if (merges) {
      HOPWELL_UNROLL
      for (int h = 0; h < Config::kThreadHeads; ++h) {
        const MergeFactors factors = s.merge[Place::head(h)];
        HOPWELL_UNROLL
        for (int i = 0; i < 16; ++i) {
          float& x = out[i / 2][Place::value(h, i % 2)];
          x = merge_values(x, of_split[i / 2][Place::value(h, i % 2)], factors);
        }
      }
    } else {
      HOPWELL_UNROLL
      for (int i = 0; i < 8; ++i) {
        HOPWELL_UNROLL
        for (int j = 0; j < Config::kHeads / 2; ++j) out[i][j] = of_split[i][j];
      }
    }
    if (is_final || (is_partial && (merges || has_keys))) store(p, s, work, of_query, is_final);
  }

 private:
  static HOPWELL_DEVICE arch::Words2& stats_at(const SplitParams& p, int query, int split, int head) {
    return p.partial_stats[partial_row(p, query, split) + head];
  }
  HOPWELL_DEVICE void store(const SplitParams& p, const Storage<Config>& s, const Work& work, int split,
                            bool is_final) const {
    HOPWELL_UNROLL
    for (int h = 0; h < Config::kThreadHeads; ++h) {
      const int head = work.first_head + Place::head(h);
      if (head >= p.h_q) continue;
      constexpr bool kAdjacent = Config::kEvenOdd;  // the two columns of a panel
      const int column = Place::column<Config::kEvenOdd>();
      const auto value = [&](int panel, int r) { return out[panel][Place::value(h, r)]; };
      if (!is_final) {
        float* const to = p.partial_out + (partial_row(p, work.query, split) + head) * kDv + column;
        HOPWELL_UNROLL
        for (int i = 0; i < 8; ++i) {
          if (kAdjacent)
            arch::store_vector(to + 64 * i, arch::Words2{arch::bit_cast<uint32_t>(value(i, 0)),
                                                         arch::bit_cast<uint32_t>(value(i, 1))});
          else
            to[64 * i] = value(i, 0), to[64 * i + 8] = value(i, 1);
        }
        continue;
      }
      const int64_t row = row_of_out(p, work.query, head) + column;
      const float factor = s.factor[Place::head(h)];
      if (p.out_is_fp32) {
        float* const to = static_cast<float*>(p.out) + row;
        HOPWELL_UNROLL
        for (int i = 0; i < 16; ++i)
          to[64 * (i / 2) + (kAdjacent ? 1 : 8) * (i % 2)] = final_value(value(i / 2, i % 2), factor);
      } else {
        bf16* const to = static_cast<bf16*>(p.out) + row;
        HOPWELL_UNROLL
        for (int i = 0; i < 8; ++i) {
          const float x[2] = {final_value(value(i, 0), factor), final_value(value(i, 1), factor)};
          if (kAdjacent)
            *reinterpret_cast<uint32_t*>(to + 64 * i) = arch::pack_bf16(x[0], x[1]);
          else
            to[64 * i] = arch::to_bf16(x[0]), to[64 * i + 8] = arch::to_bf16(x[1]);
        }
      }
    }
  }
};

// ---- roles ----------------------------------------------------------------------------------------------------------

template <class Config>
HOPWELL_DEVICE void make_scores(const SplitParams& p, Storage<Config>& s) {
  arch::barrier_sync(kQueryBarrier, kValueThreads + kScoreThreads);
  const float scale_log2 = p.scale_log2 * p.kv_scale_factor();
  int tile = 0;
  HOPWELL_NO_UNROLL
  for (int split = 0; split < Work(p).splits; ++split) {
    Softmax<Config> softmax;
    TileInfo info{};
    HOPWELL_NO_UNROLL
    for (; !info.is_last; ++tile) {
      const tile::RingSlot slot(s.tiles.ring, tile);
      float scores[Config::kHeads / 2];
      slot.wait_full(0);
      info = s.tiles.info[slot.stage()];
      multiply_scores(s, slot, scores);
      softmax(s.maxima[tile % 2], scale_log2, info.keys, scores, s.result(slot.stage()));
      arch::fence_proxy_async();
      tile::arrive_warp(s.scored[slot.stage()]);
    }
  }
}

template <class Config>
HOPWELL_DEVICE void make_output(const SplitParams& p, Storage<Config>& s) {
  load_query<Config>(p, arch::shared_address(s.q));
  arch::barrier_arrive(kQueryBarrier, kValueThreads + kScoreThreads);
  Result<Config> result;
  int tile = 0;
  HOPWELL_NO_UNROLL
  for (int split = 0; split < Work(p, Config::kHeads).splits; ++split) {
    HeadSums<Config> sums;
    Output<Config> out = {};
    TileInfo info{};
    int tiles = 0;
    HOPWELL_NO_UNROLL
    for (; !info.is_last; ++tile, ++tiles) {
      const tile::RingSlot slot(s.tiles.ring, tile);
      arch::mbarrier_wait(s.scored[slot.stage()], slot.parity());
      info = s.tiles.info[slot.stage()];
      sums.add_tile(s.result(slot.stage()));
      multiply_values(s, slot, out, tiles == 0);
    }
    if (split == Work(p, Config::kHeads).splits - 1) tile::launch_dependents();
    result.end_split(p, s, split, sums, info.keys > 0, out);
  }
}

#endif

}  // namespace few_heads

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    sparse_mla_decode_sm90_few_heads(const __grid_constant__ SplitParams p) {
#if HOPWELL_HAS_SM90A
  auto& s = arch::dynamic_smem<few_heads::Storage<Config>>();
  if (arch::thread_index() == 0) s.initialise();
  arch::syncthreads();
  if (const int group = arch::warpgroup_index(); group == 0) {
    arch::setmaxnreg_inc<Config::kValueRegisters>();
    few_heads::make_output(p, s);
  } else if (group == 1) {
    arch::setmaxnreg_dec<Config::kScoreRegisters>();
    few_heads::make_scores(p, s);
  } else if (group == 2) {
    arch::setmaxnreg_dec<Config::kGatherRegisters>();
    gather<Config>(p, s.tiles, s.panels);
  } else {
    if constexpr (Config::kHeads == 8)
      arch::setmaxnreg_inc<Config::kDequantRegisters>();
    else
      arch::setmaxnreg_dec<Config::kDequantRegisters>();
    make_panels<Config>(p, s.tiles, s.panels);
  }
#endif
}

// ---- on the host ----------------------------------------------------------------------------------------------------

namespace few_heads {

template <class Config>
int clusters_that_fit(const runtime::Device& device, std::int64_t size) {
  return runtime::clusters_that_fit<sparse_mla_decode_sm90_few_heads<Config>>(
      device, {.threads = Config::kThreads,
               .cluster = static_cast<std::uint32_t>(size),
               .shared_bytes = sizeof(Storage<Config>)});
}

}  // namespace few_heads

template <class RowsOfFormat>
SplitKernel few_heads_kernel(int heads) {
  return runtime::with_constant<8, 16>(heads, [&]<int kHeads>() -> SplitKernel {
    using Config = few_heads::Config<RowsOfFormat, kHeads>;
    static_assert(sizeof(few_heads::Storage<Config>) <= arch::sm90::kMaxSharedBytes);
    return {.kernel = sparse_mla_decode_sm90_few_heads<Config>,
            .threads = Config::kThreads,
            .shared_bytes = sizeof(few_heads::Storage<Config>),
            .clocks = Clocks{.of_cta = 12'000, .of_tile = kHeads == 8 ? 3700 : 4100},  // H200, V3.2 rows
            .merges = true,
            .clusters_that_fit = few_heads::clusters_that_fit<Config>};
  });
}

}  // namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET
