// nvfp4_linear for 2 to 16 columns of x at a time.
//
//     y[column, row] = factor · Σ_k code · scale · x[column, k] + bias[row]
//
// Tile      16 rows × 8 or 16 columns; a CTA takes neighbouring tiles. With two CTAs in a cluster, where that shares the
//           work out better, both take the same tiles, and each half of K.
// Roles     a warp has 256 k at a time of every tile, or of every second, third …, and keeps their x in registers,
//           in mma's order. Longer K: `phases`, one after the other, each with the same tiles.
// Timeline  copies  ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓   a ring of each warp's own, kStages − 1 ahead, across tiles and phases
//           warp    x │ tile 0 │ tile 1 │ … barrier, add up │ tile 4 │ … next phase: x │ tile 0 │ …
// Scales    two weights at a time are multiplied by theirs, exactly: in fp16 code · 2^-14 · scale is a multiple of 2^-24,
//           and in bf16 code · 2^-126 · scale · 2^118 has six digits
// Sums      of the warps meet in shared memory, those of phases are kept there, and those of the pair go through
//           distributed shared memory; always in the same order
// Range     x is multiplied as it is, fp16 by fp16 weights, bf16 by bf16 weights: all its digits count. Sums have
//           fp32's range: bf16 x above 2^124 may overflow them, as 2^116 would without kUnit
// Budget    shared: rings 147,456, sums 65,536, kept sums 8,192 or 16,384; registers: x 32 or 64 of 128
#pragma once

#include "arch/sm80/matrix.hpp"
#include "ops/nvfp4/sm80_ring.hpp"

namespace hopwell::ops::nvfp4 {
namespace {

struct ManyConfig {
  static constexpr int kStages = 4, kMaxWarps = 16;
  static constexpr int kTiles = 16;       // whose sums are kept
  static constexpr int kSumFloats = 512;  // of a warp, between two barriers
};

template <class T>
struct ManyParams {
  Matrix weight;
  const T* x;
  int64_t x_stride;
  Result<T> result;
  Factor factor;
  int rows, k, columns;
  int parts, groups;              // warps that share a tile, and how many tiles at a time
  int phases, ranks;              // 256 · parts · ranks · phases ≥ k; CTAs of a cluster
  int tiles_of_cta, larger_ctas;  // the first larger_ctas have a tile more
  int batch;                      // tiles between two barriers, a multiple of groups
  bool whole_scales;
};

template <int kColumns>
struct ManyStorage {
  alignas(128) unsigned char ring[ManyConfig::kMaxWarps][ManyConfig::kStages * LinearConfig::kStageBytes];
  // Sums; before those, x on its way into registers, four columns in each half.
  alignas(128) float sums[2][ManyConfig::kMaxWarps][ManyConfig::kSumFloats];
  alignas(16) float kept[ManyConfig::kTiles][LinearConfig::kRows * kColumns];
};
static_assert(sizeof(ManyStorage<16>) <= 227 * 1024);
static_assert(ManyConfig::kSumFloats * 4 == 4 * LinearConfig::kStageK * 2);

template <int kColumns>
inline constexpr int kSumsOfTile = LinearConfig::kRows * kColumns;

// Where a sum lies in those of a tile, [8 columns][16 rows][8]: neighbouring columns together, pairs of them so that lanes
// read and write different banks.
HOPWELL_DEVICE int sum_place(int row, int column) {
  return column / 8 * 8 * LinearConfig::kRows + row * 8 + (column % 8 ^ row / 4 * 2 % 8);
}

// ---- x in registers ------------------------------------------------------------------------------------------------

// This lane's x: column g of each eight, the k of its codes: words (half, word) of a stage, k = 128 half + 32 t + 8 word.
template <int kColumns>
struct HeldX {
  uint32_t words[kColumns / 8][8][4];
};

// Eight columns of x on their way into registers, each 256 numbers in 32 pieces: pieces are exchanged within 128 bytes so
// that a quad's, which are four apart, and the next column's are in different banks.
HOPWELL_DEVICE uint32_t held_place(uint32_t x, int column, int piece) {
  constexpr uint32_t kHalf = sizeof(ManyStorage<8>::sums) / 2, kColumn = LinearConfig::kStageK * 2;
  const int exchanged = piece ^ (piece / 8 % 2) ^ column % 2 * 2;
  return x + uint32_t(column / 4) * kHalf + uint32_t(column % 4) * kColumn + uint32_t(16 * exchanged);
}

// What a warp knows of its place.
struct ManyPlace {
  int rank, warp, group, part, first_column, columns;  // columns that exist, from the first of this CTA
  int begin, end;                                      // tiles
};

template <class Params>
HOPWELL_DEVICE Slice slice_of_phase(const Params& p, const ManyPlace& at, int phase) {
  constexpr int kWidth = LinearConfig::kStageK;
  return slice_of(((phase * p.ranks + at.rank) * p.parts + at.part) * kWidth, kWidth, p.k);
}

// Asks for the first slice to come to the L2 cache.
template <int kColumns, class T>
HOPWELL_DEVICE void prefetch_x(const ManyParams<T>& p, const ManyPlace& at) {
  const Slice slice = slice_of_phase(p, at, 0);
  const int k = slice.begin + arch::lane_index() % 4 * 64;
  for (int column = arch::lane_index() / 4; column < at.columns && column < kColumns; column += 8)
    if (k < slice.end) arch::prefetch_l2(p.x + (at.first_column + column) * p.x_stride + k);
}

// Brings a slice of x in by whole lines, and through this warp's shared memory at `shared` into mma's order; does
// `meanwhile` while it is on its way.
template <int kColumns, class T, class Meanwhile>
HOPWELL_DEVICE void hold_x(const ManyParams<T>& p, const ManyPlace& at, const Slice& slice, uint32_t shared,
                           HeldX<kColumns>& x, Meanwhile meanwhile) {
  const int lane = arch::lane_index(), g = lane / 4, t = lane % 4, k = slice.begin + 8 * lane;
  const int columns = k < slice.end ? at.columns : 0;
  const T* from = p.x + at.first_column * p.x_stride + k;
  arch::Words4 lines[kColumns];
  HOPWELL_UNROLL
  for (int column = 0; column < kColumns; ++column, from += p.x_stride) {
    lines[column] = {{0, 0, 0, 0}};
    if (column < columns) lines[column] = *reinterpret_cast<const arch::Words4*>(from);
  }
  meanwhile();
  HOPWELL_UNROLL
  for (int block = 0; block < kColumns / 8; ++block) {
    HOPWELL_UNROLL
    for (int column = 0; column < 8; ++column)
      arch::store_shared_v4(held_place(shared, column, lane), lines[8 * block + column]);
    arch::syncwarp();
    HOPWELL_UNROLL
    for (int number = 0; number < 8; ++number) {
      const auto v = as_pairs(arch::load_shared_v4(held_place(shared, g, number / 4 * 16 + 4 * t + number % 4)));
      HOPWELL_UNROLL
      for (int i = 0; i < 4; ++i) x.words[block][number][i] = v.w[i];
    }
    arch::syncwarp();
  }
}

// ---- products ------------------------------------------------------------------------------------------------------

// Weights as x is: decoded, and times their scales, 1 / kUnit.
template <class T>
struct Weights;

template <>
struct Weights<fp16> {
  static constexpr double kUnit = LinearConfig::kCodeUnit;
  uint32_t scales[2];  // of two blocks, each twice

  HOPWELL_DEVICE explicit Weights(uint16_t bytes) {
    const uint32_t pair = scales_fp16(bytes);
    scales[0] = arch::permute_bytes<0x1010>(pair, pair), scales[1] = arch::permute_bytes<0x3232>(pair, pair);
  }
  HOPWELL_DEVICE void decode(uint32_t word, int block, uint32_t (&pairs)[4]) const {
    decode_word(word, pairs);
    HOPWELL_UNROLL
    for (uint32_t& pair : pairs) pair = arch::multiply_fp16(pair, scales[block]);
  }
  HOPWELL_DEVICE static void multiply(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    arch::mma_m16n8k16_fp16(d, a, b);
  }
};

template <>
struct Weights<bf16> {
  static constexpr double kUnit = 0x1p8;
  uint32_t scales[2];

  HOPWELL_DEVICE explicit Weights(uint16_t bytes) {
    const ScalePair pair = scale_pair(bytes);
    scales[0] = arch::pack_bf16(pair.low * 0x1p118f, pair.low * 0x1p118f);
    scales[1] = arch::pack_bf16(pair.high * 0x1p118f, pair.high * 0x1p118f);
  }
  // Pairs (k, k + 4) as in decode_word, s to bit 15, e e m to bits 8 to 6.
  HOPWELL_DEVICE void decode(uint32_t word, int block, uint32_t (&pairs)[4]) const {
    constexpr uint32_t kSigns = 0x80008000u, kCodes = 0x81c081c0u;
    pairs[0] = arch::select_bits(word << 12, word << 6, kSigns) & kCodes;
    pairs[1] = arch::select_bits(word << 8, word << 2, kSigns) & kCodes;
    pairs[2] = arch::select_bits(word << 4, word >> 2, kSigns) & kCodes;
    pairs[3] = arch::select_bits(word, word >> 6, kSigns) & kCodes;
    HOPWELL_UNROLL
    for (uint32_t& pair : pairs) pair = arch::multiply_bf16(pair, scales[block]);
  }
  HOPWELL_DEVICE static void multiply(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    arch::mma_m16n8k16_bf16(d, a, b);
  }
};

// Sums of 16 rows of a stage times x, in mma's order of accumulators.
template <int kColumns, class T>
HOPWELL_DEVICE void multiply_stage_many(const unsigned char* stage, const HeldX<kColumns>& x,
                                        float (&sums)[kColumns / 8][4]) {
  const int lane = arch::lane_index(), g = lane / 4, t = lane % 4;
  const auto words = [](const unsigned char* at) { return *reinterpret_cast<const arch::Words4*>(at); };
  float d[2][4] = {};  // of even and odd products apart, for shorter chains, or of each eight columns
  HOPWELL_UNROLL
  for (int half = 0; half < 2; ++half) {
    const unsigned char* piece = stage + g * 128 + (4 * (half ^ g % 2) + t) * 16;
    const arch::Words4 upper = words(piece), lower = words(piece + 1024);
    const auto* scales =
        reinterpret_cast<const uint16_t*>(stage + LinearConfig::kCodeBytes + g * 16 + half * 8 + t * 2);
    const Weights<T> of_upper(scales[0]), of_lower(scales[64]);
    HOPWELL_UNROLL
    for (int word = 0; word < 4; ++word) {
      uint32_t a[4], b[4];
      of_upper.decode(upper.w[word], word / 2, a);
      of_lower.decode(lower.w[word], word / 2, b);
      HOPWELL_UNROLL
      for (int i = 0; i < 2; ++i) {
        const uint32_t weights[4] = {a[2 * i], b[2 * i], a[2 * i + 1], b[2 * i + 1]};
        HOPWELL_UNROLL
        for (int block = 0; block < kColumns / 8; ++block) {
          const auto& values = x.words[block][4 * half + word];
          const uint32_t pair[2] = {values[2 * i], values[2 * i + 1]};
          Weights<T>::multiply(d[kColumns == 8 ? i : block], weights, pair);
        }
      }
    }
  }
  HOPWELL_UNROLL
  for (int block = 0; block < kColumns / 8; ++block) {
    HOPWELL_UNROLL
    for (int i = 0; i < 4; ++i) sums[block][i] = kColumns == 8 ? d[0][i] + d[1][i] : d[block][i];
  }
}

// ---- sums ----------------------------------------------------------------------------------------------------------

struct alignas(8) FloatPair {
  float low, high;
};
struct alignas(16) Floats4 {
  float f[4];
};

template <int kColumns>
HOPWELL_DEVICE void store_sums_many(float* sums, const float (&of_lane)[kColumns / 8][4]) {
  const int g = arch::lane_index() / 4, t = arch::lane_index() % 4;
  HOPWELL_UNROLL
  for (int block = 0; block < kColumns / 8; ++block) {
    HOPWELL_UNROLL
    for (int i = 0; i < 2; ++i)
      *reinterpret_cast<FloatPair*>(sums + sum_place(g + 8 * i, 8 * block + 2 * t)) = {of_lane[block][2 * i],
                                                                                       of_lane[block][2 * i + 1]};
  }
}

// Adds up the warps' sums of a batch of tiles, four neighbours a thread, to those kept of earlier phases. Few threads have
// work here: others each time, so that no warp falls behind.
template <int kColumns, class T>
HOPWELL_DEVICE void take_batch(const ManyParams<T>& p, ManyStorage<kColumns>& s, int turn, int tile, int tiles,
                               bool is_first) {
  constexpr int kFours = kSumsOfTile<kColumns> / 4;
  const int threads = 32 * p.parts * p.groups;
  for (int i = (arch::thread_index() + turn * 128) % threads; i < tiles * kFours; i += threads) {
    const int group = i / kFours % p.groups, round = i / kFours / p.groups;
    const auto* from =
        reinterpret_cast<const Floats4*>(&s.sums[turn % 2][group * p.parts][0]) + round * kFours + i % kFours;
    auto* kept = reinterpret_cast<Floats4*>(&s.kept[tile][0]) + i;
    Floats4 sum = is_first ? Floats4{{0, 0, 0, 0}} : *kept;
    for (int part = 0; part < p.parts; ++part, from += ManyConfig::kSumFloats / 4) {
      const Floats4 more = *from;
      HOPWELL_UNROLL
      for (int j = 0; j < 4; ++j) sum.f[j] += more.f[j];
    }
    *kept = sum;
  }
}

// Results of the tiles from `first` on; a pair adds up its sums, and each CTA has half of them to store.
template <int kColumns, class T>
HOPWELL_DEVICE void store_results(const ManyParams<T>& p, ManyStorage<kColumns>& s, const ManyPlace& at, int first,
                                  int tiles) {
  constexpr int kOfTile = kSumsOfTile<kColumns>, kRows = LinearConfig::kRows;
  const double factor = p.factor.get() * Weights<T>::kUnit;
  uint32_t other = 0;
#if HOPWELL_HAS_SM90
  if (p.ranks > 1) {
    arch::cluster_sync();
    other = arch::map_to_rank(arch::shared_address(s.kept), uint32_t(at.rank ^ 1));
  }
#endif
  if (p.ranks == 1) arch::syncthreads();
  const int threads = 32 * p.parts * p.groups;
  for (int i = at.rank * threads + arch::thread_index(); i < tiles * kOfTile; i += p.ranks * threads) {
    const int row = i % kRows, column = i / kRows % kColumns, of_all = (first + i / kOfTile) * kRows + row;
    if (of_all >= p.rows || column >= at.columns) continue;
    const int place = i / kOfTile * kOfTile + sum_place(row, column);
    float sum = s.kept[0][place];
#if HOPWELL_HAS_SM90
    if (p.ranks > 1) sum += arch::bit_cast<float>(arch::load_cluster(other + uint32_t(4 * place)));
#endif
    p.result.store(of_all, at.first_column + column, 0, factor, sum);
  }
#if HOPWELL_HAS_SM90
  if (p.ranks > 1) arch::cluster_sync();
#endif
}

// ---- the kernel ----------------------------------------------------------------------------------------------------

template <int kColumns, class T>
struct ManyWarp {
  const ManyParams<T>& p;
  ManyStorage<kColumns>& s;
  const ManyPlace& at;
  Ring<ManyConfig::kStages> ring;
  int ring_first, ring_phase = 0;  // where the ring is: tiles from ring_first on

  HOPWELL_DEVICE void aim() {
    const int most = ring_first + ManyConfig::kTiles;
    ring.aim(p, slice_of_phase(p, at, ring_phase), ring_first + at.group, most < at.end ? most : at.end);
  }
  HOPWELL_DEVICE void load() {
    ring.load(p, [&] {
      if (++ring_phase == p.phases || slice_of_phase(p, at, ring_phase).stages == 0)
        ring_phase = 0, ring_first += ManyConfig::kTiles;
      aim();
    });
  }

  HOPWELL_DEVICE const unsigned char* next_stage() {
    arch::cp_async_wait<ManyConfig::kStages - 2>();
    arch::syncwarp();
    load();
    return ring.take();
  }

  // All of this warp's tiles of a phase.
  HOPWELL_DEVICE void run_phase(int first, int end, int phase, const HeldX<kColumns>& x, bool has_k, int& turn) {
    for (int batch = first; batch < end; batch += p.batch, ++turn) {
      const int tiles = end - batch < p.batch ? end - batch : p.batch;
      float* to = s.sums[turn % 2][at.warp];
      for (int tile = at.group; tile < tiles; tile += p.groups, to += kSumsOfTile<kColumns>) {
        float sums[kColumns / 8][4] = {};
        if (has_k) multiply_stage_many<kColumns, T>(next_stage(), x, sums);
        store_sums_many<kColumns>(to, sums);
      }
      arch::syncthreads();
      take_batch<kColumns>(p, s, turn, batch - first, tiles, phase == 0);
    }
  }

  HOPWELL_DEVICE void run() {
    int turn = 0;
    for (int first = at.begin; first < at.end; first += ManyConfig::kTiles) {
      const int end = first + ManyConfig::kTiles < at.end ? first + ManyConfig::kTiles : at.end;
      HOPWELL_NO_UNROLL
      for (int phase = 0; phase < p.phases; ++phase) {
        const Slice slice = slice_of_phase(p, at, phase);
        HeldX<kColumns> x;
        hold_x<kColumns>(p, at, slice, arch::shared_address(s.sums[0][at.warp]), x, [&] {
          if (phase > 0 || first > at.begin) return arch::syncthreads();  // sums of the phase before have been taken
          HOPWELL_NO_UNROLL
          for (int i = 0; i < ManyConfig::kStages - 1; ++i) load();
        });
        run_phase(first, end, phase, x, slice.stages > 0, turn);
      }
      store_results<kColumns>(p, s, at, first, end - first);
    }
  }
};

template <int kColumns, class T>
__global__ void __launch_bounds__(32 * ManyConfig::kMaxWarps, 1) many_kernel(const __grid_constant__ ManyParams<T> p) {
  auto& s = arch::dynamic_smem<ManyStorage<kColumns>>();
  const arch::BlockIndex cta = arch::block_index_3d();
  const int warp = arch::warp_index(), number = cta.x / p.ranks, first_column = cta.z * kColumns;
  const int begin = number * p.tiles_of_cta + (number < p.larger_ctas ? number : p.larger_ctas);
  const ManyPlace at{.rank = cta.x % p.ranks,
                     .warp = warp,
                     .group = warp / p.parts,
                     .part = warp % p.parts,
                     .first_column = first_column,
                     .columns = p.columns - first_column,
                     .begin = begin,
                     .end = begin + p.tiles_of_cta + (number < p.larger_ctas ? 1 : 0)};
  ManyWarp<kColumns, T> self{p, s, at, Ring<ManyConfig::kStages>(s.ring[warp], 0, p.groups), begin};
  self.aim();
  let_next_start();
  self.ring.prefetch();
  prefetch_x<kColumns>(p, at);
  wait_for_previous();
  self.run();
}

}  // namespace
}  // namespace hopwell::ops::nvfp4
