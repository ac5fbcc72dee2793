// nvfp4_linear for 2 to 16 columns of x at a time.
//
//     y[column, row] = factor · Σ_k code · scale · x[column, k] + bias[row]
//
// Tile      16 rows × 8 or 16 columns; a CTA takes neighbouring tiles. With two or four CTAs in a cluster, where that
//           shares the work out better, all take the same tiles, and each a part of K.
// Roles     x of the CTA's K lies in shared memory, in mma's order. Tiles × stages of 256 k are a line, and each warp has an
//           equal share of it: up to the end of one tile, whole tiles, the beginning of another. Its sums stay in registers
//           from tile to tile. K that does not fit: `phases`, one after the other, each with the same shares.
// Timeline  copies  ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓   a ring of each warp's own, across tiles and phases
//           warp    x │ barrier │ tile 3 … │ tile 4 … │ barrier, add up, results
// Scales    two weights at a time are multiplied by theirs, exactly: sm80_weights.hpp
// Sums      a warp's part of a tile goes to a slot of its own; parts are added warp by warp, and those of a cluster's CTAs, which
//           give each other shares through distributed shared memory, rank by rank: always in the same order
// Range     x is multiplied as it is, fp16 by fp16 weights, bf16 by bf16 weights: all its digits count. Sums have
//           fp32's range: bf16 x above 2^124 may overflow them, as 2^116 would without kUnit
// Budget    28672 × 4096, n = 8: rings 110,592, x 65,536, sums 15,472. A stage is ~365 instructions, 172 of them logic at half
//           rate; memory leaves a scheduler ~500 cycles for it
// Bound     memory, with ~3 µs until x is there and ~1 µs after the last product; from n = 9 on reads of x from shared memory too
#pragma once

#include "ops/nvfp4/sm80_ring.hpp"
#include "ops/nvfp4/sm80_weights.hpp"

namespace hopwell::ops::nvfp4 {
namespace {

struct ManyConfig {
  static constexpr int kMaxWarps = 16;
};
// Of a ring. Shared memory is taken from the L1 cache, which scales need: 16 bytes of a line at a time.
template <int kColumns>
inline constexpr int kManyStages = kColumns == 8 ? 3 : 2;

template <class T>
struct ManyParams {
  Matrix weight;
  const T* x;
  int64_t x_stride;
  Result<T> result;
  Factor factor;
  int rows, k, columns;
  int slice, ranks, phases;  // k of a CTA at a time, a multiple of 256; CTAs of a cluster: slice · ranks · phases >= k
  int tiles_of_cta, larger_ctas;  // the first larger_ctas have a tile more
  int warps, chunk;               // of a CTA; tiles between two rounds of results
  int pushed;                     // place in shared memory of what the CTAs of a cluster give each other
  bool whole_scales;
};

template <int kColumns>
inline constexpr int kSumsOfTile = LinearConfig::kRows * kColumns;

// Shared memory: rings, x, slots of sums [16 rows × columns], which warps have the first and the last part of each tile.
template <int kColumns>
inline constexpr int kXStageBytes = LinearConfig::kStageK * 2 * kColumns;
template <int kColumns>
inline constexpr int kRingBytes = kManyStages<kColumns> * LinearConfig::kStageBytes;

struct alignas(8) FloatPair {
  float low, high;
};
struct alignas(16) Floats4 {
  float f[4];
};

// Where a sum lies in those of a tile, [8 columns][16 rows][8]: neighbouring columns together, pairs of them so that lanes
// read and write different banks.
HOPWELL_DEVICE int sum_place(int row, int column) {
  return column / 8 * 8 * LinearConfig::kRows + row * 8 + (column % 8 ^ row / 4 * 2 % 8);
}

// What a CTA knows of its place.
struct ManyPlace {
  int rank, warp, first_column, columns;  // columns that exist, from the first of this CTA
  int begin, end;                         // tiles
};

// Where K has ended there are stages too, of zeros: so every rank and phase shares out its work alike.
template <class Params>
HOPWELL_DEVICE Slice slice_of_phase(const Params& p, const ManyPlace& at, int phase) {
  Slice slice = slice_of((phase * p.ranks + at.rank) * p.slice, p.slice, p.k);
  slice.stages = p.slice / LinearConfig::kStageK;
  return slice;
}

// Units of a warp, of so many that lie in a line.
HOPWELL_DEVICE int share_begin(int line, int warp, int warps) {
  if (line < warps) return line < warp ? line : warp;
  return warps == 16 ? line * warp / 16 : warps == 8 ? line * warp / 8 : line * warp / warps;
}

// Sums of warps: warp w leaves those of its part of tile t in slot w + t, which no other has. A tile's parts are those of
// warps first[t] to last[t].
struct Sums {
  float* slots;
  int *first, *last;
};

// ---- x in shared memory --------------------------------------------------------------------------------------------

// Brings a slice of x in, in the order in which lanes take it: [stage][half][word][eight columns][column g][t], 16 bytes
// each. A warp has two of each eight columns, whole pieces of 256 bytes of both at a time. Does `meanwhile` while the first of
// it is on its way.
template <int kColumns, class T, class Meanwhile>
HOPWELL_DEVICE void fetch_x(const ManyParams<T>& p, const ManyPlace& at, const Slice& slice, uint32_t shared,
                            Meanwhile meanwhile) {
  constexpr int kBlocks = kColumns / 8, kTogether = 8 / kBlocks, kHalfK = LinearConfig::kStageK / 2;
  const int lane = arch::lane_index(), word = lane / 8, g = at.warp % 4 * 2 + lane / 4 % 2, t = lane % 4;
  const int step = p.warps / 4, halves = 2 * slice.stages;
  int half = at.warp / 4, k = slice.begin + half * kHalfK + t * 32 + word * 8;
  const T* from = p.x + (at.first_column + g) * p.x_stride + k;
  uint32_t to = shared + uint32_t((half * 4 + word) * 64 * kColumns + (g * 4 + t) * 16);
  bool at_start = true;
  do {
    arch::Words4 v[kTogether][kBlocks];
    HOPWELL_UNROLL
    for (int i = 0; i < kTogether; ++i, from += step * kHalfK, k += step * kHalfK) {
      HOPWELL_UNROLL
      for (int block = 0; block < kBlocks; ++block) {
        v[i][block] = {{0, 0, 0, 0}};
        if (k < slice.end && g + 8 * block < at.columns)
          v[i][block] = *reinterpret_cast<const arch::Words4*>(from + 8 * block * p.x_stride);
      }
    }
    if (at_start) meanwhile();
    at_start = false;
    HOPWELL_UNROLL
    for (int i = 0; i < kTogether; ++i, half += step, to += uint32_t(step * 256 * kColumns)) {
      HOPWELL_UNROLL
      for (int block = 0; block < kBlocks; ++block)
        if (half < halves) arch::store_shared_v4(to + uint32_t(512 * block), as_pairs(v[i][block]));
    }
  } while (half < halves);
}

// ---- products ------------------------------------------------------------------------------------------------------

// Adds the products of 16 rows of a stage with x to sums in mma's order of accumulators: of 8 columns those of even and odd
// products apart, for shorter chains.
template <int kColumns, class T>
HOPWELL_DEVICE void multiply_stage_many(const unsigned char* stage, const unsigned char* x, float (&d)[2][4]) {
  const int lane = arch::lane_index(), g = lane / 4, t = lane % 4;
  const auto words = [](const unsigned char* at) { return *reinterpret_cast<const arch::Words4*>(at); };
  HOPWELL_UNROLL
  for (int half = 0; half < 2; ++half) {
    const unsigned char* piece = stage + g * 128 + (4 * (half ^ g % 2) + t) * 16;
    const arch::Words4 upper = words(piece), lower = words(piece + 1024);
    const auto* scales =
        reinterpret_cast<const uint16_t*>(stage + LinearConfig::kCodeBytes + g * 16 + half * 8 + t * 2);
    const Weights<T> of_upper(scales[0]), of_lower(scales[64]);
    HOPWELL_UNROLL
    for (int word = 0; word < 4; ++word) {
      arch::Words4 values[kColumns / 8];
      HOPWELL_UNROLL
      for (int block = 0; block < kColumns / 8; ++block)
        values[block] = words(x + (half * 4 + word) * 64 * kColumns + block * 512 + lane * 16);
      uint32_t a[4], b[4];
      if (word < 2)
        of_upper.template decode<false>(upper.w[word], a), of_lower.template decode<false>(lower.w[word], b);
      else
        of_upper.template decode<true>(upper.w[word], a), of_lower.template decode<true>(lower.w[word], b);
      HOPWELL_UNROLL
      for (int i = 0; i < 2; ++i) {
        const uint32_t weights[4] = {a[2 * i], b[2 * i], a[2 * i + 1], b[2 * i + 1]};
        HOPWELL_UNROLL
        for (int block = 0; block < kColumns / 8; ++block) {
          const uint32_t pair[2] = {values[block].w[2 * i], values[block].w[2 * i + 1]};
          Weights<T>::multiply(d[kColumns == 8 ? i : block], weights, pair);
        }
      }
    }
  }
}

// ---- sums ----------------------------------------------------------------------------------------------------------

// `more`: adds to what is there.
template <int kColumns>
HOPWELL_DEVICE void store_sums_many(float* to, const float (&d)[2][4], bool more) {
  const int g = arch::lane_index() / 4, t = arch::lane_index() % 4;
  HOPWELL_UNROLL
  for (int block = 0; block < kColumns / 8; ++block) {
    HOPWELL_UNROLL
    for (int i = 0; i < 2; ++i) {
      FloatPair sums = kColumns == 8 ? FloatPair{d[0][2 * i] + d[1][2 * i], d[0][2 * i + 1] + d[1][2 * i + 1]}
                                     : FloatPair{d[block][2 * i], d[block][2 * i + 1]};
      auto* place = reinterpret_cast<FloatPair*>(to + sum_place(g + 8 * i, 8 * block + 2 * t));
      if (more) sums.low += place->low, sums.high += place->high;
      *place = sums;
    }
  }
}

// The sum of four columns of a row that this CTA has, as they lie: warp by warp.
template <int kColumns>
HOPWELL_DEVICE Floats4 sum_of_warps(const Sums& sums, int tile, int place) {
  Floats4 sum{{0, 0, 0, 0}};
  const int first = sums.first[tile], last = sums.last[tile];
  const float* at = sums.slots + (first + tile) * kSumsOfTile<kColumns> + place;
  for (int warp = first; warp <= last; ++warp, at += kSumsOfTile<kColumns>) {
    const Floats4 more = *reinterpret_cast<const Floats4*>(at);
    HOPWELL_UNROLL
    for (int j = 0; j < 4; ++j) sum.f[j] += more.f[j];
  }
  return sum;
}

// Results of the tiles from `first` on, four columns a thread. In a cluster each CTA has a share of them to store: what it
// has of the others' goes to theirs, in `pushed`, and they add up rank by rank.
template <int kColumns, class T>
HOPWELL_DEVICE void store_results(const ManyParams<T>& p, const Factor& global, const Sums& sums, float* pushed,
                                  const ManyPlace& at, int first, int tiles) {
  constexpr int kRows = LinearConfig::kRows, kFours = kSumsOfTile<kColumns> / 4;
  const int threads = 32 * p.warps;
  const double factor = global.get() * Weights<T>::kUnit;
  const auto place_of = [](int i) {
    const int four = i % kFours / kRows;
    return four / 2 * 8 * kRows + i % kRows * 8 + four % 2 * 4;
  };
  const auto store = [&](int i, const Floats4& sum) {
    const int row = i % kRows, four = i % kFours / kRows, of_all = (first + i / kFours) * kRows + row;
    if (of_all >= p.rows) return;
    HOPWELL_UNROLL
    for (int j = 0; j < 4; ++j) {
      const int column = four / 2 * 8 + ((four % 2 * 4 + j) ^ row / 4 * 2 % 8);
      if (column < at.columns) p.result.store(of_all, at.first_column + column, 0, factor, sum.f[j]);
    }
  };
#if HOPWELL_HAS_SM90
  if (p.ranks > 1) {
    // The CTA of rank r stores r's pieces of threads fours each; place [piece][rank][four] of `pushed` is where they meet.
    for (int i = arch::thread_index(), piece = 0; i < tiles * kFours; i += threads, ++piece) {
      const Floats4 sum = sum_of_warps<kColumns>(sums, i / kFours, place_of(i));
      const int owner = piece % p.ranks;
      const float* meeting = pushed + (piece / p.ranks * p.ranks + at.rank) * 4 * threads + arch::thread_index();
      const uint32_t to = arch::map_to_rank(arch::shared_address(meeting), uint32_t(owner));
      HOPWELL_UNROLL
      for (uint32_t j = 0; j < 4; ++j)
        arch::store_cluster(to + uint32_t(4 * threads) * j, arch::bit_cast<uint32_t>(sum.f[j]));
    }
    arch::cluster_sync();
    for (int piece = at.rank; piece * threads < tiles * kFours; piece += p.ranks) {
      const int i = piece * threads + arch::thread_index();
      if (i >= tiles * kFours) break;
      Floats4 sum{{0, 0, 0, 0}};
      for (int rank = 0; rank < p.ranks; ++rank) {
        const float* meeting = pushed + (piece / p.ranks * p.ranks + rank) * 4 * threads + arch::thread_index();
        HOPWELL_UNROLL
        for (int j = 0; j < 4; ++j) sum.f[j] += meeting[threads * j];
      }
      store(i, sum);
    }
    return;
  }
#endif
  for (int i = arch::thread_index(); i < tiles * kFours; i += threads)
    store(i, sum_of_warps<kColumns>(sums, i / kFours, place_of(i)));
}

// ---- the kernel ----------------------------------------------------------------------------------------------------

// The CTAs of a cluster, or the warps of a CTA.
template <class Params>
HOPWELL_DEVICE void meet(const Params& p) {
#if HOPWELL_HAS_SM90
  if (p.ranks > 1) return arch::cluster_sync();
#endif
  arch::syncthreads();
}

template <int kColumns, class T>
struct ManyWarp {
  const ManyParams<T>& p;
  const ManyPlace& at;
  unsigned char* x;
  Sums sums;
  Ring<kManyStages<kColumns>> ring;
  int ring_first, ring_phase = 0;  // where the ring is: tiles from ring_first on
  Factor global = {};

  HOPWELL_DEVICE int tiles(int first) const { return at.end - first < p.chunk ? at.end - first : p.chunk; }

  // This warp's share of the line of stages of the tiles from `first` on.
  struct Share {
    int tile, stage, count;  // where it begins; how many
  };
  HOPWELL_DEVICE Share share(int first) const {
    const int stages = p.slice / LinearConfig::kStageK, line = tiles(first) * stages;
    const int begin = share_begin(line, at.warp, p.warps);
    return {begin / stages, begin % stages, share_begin(line, at.warp + 1, p.warps) - begin};
  }

  HOPWELL_DEVICE void aim() {
    const Share next = share(ring_first);
    ring.aim(p, slice_of_phase(p, at, ring_phase), ring_first + next.tile, next.stage, next.count);
  }
  HOPWELL_DEVICE void load() {
    ring.load(p, [&] {
      if (++ring_phase == p.phases) ring_phase = 0, ring_first += p.chunk;
      if (ring_first < at.end) aim();
    });
  }

  HOPWELL_DEVICE const unsigned char* next_stage() {
    arch::cp_async_wait<kManyStages<kColumns> - 2>();
    arch::syncwarp();
    load();
    return ring.oldest();
  }

  // x of a phase comes in; the ring starts when that is on its way for the first time.
  HOPWELL_DEVICE void bring_x(int phase, bool at_start) {
    if (!at_start) arch::syncthreads();  // x of the phase before is used up
    fetch_x<kColumns>(p, at, slice_of_phase(p, at, phase), arch::shared_address(x), [&] {
      if (!at_start) return;
      HOPWELL_NO_UNROLL
      for (int i = 0; i < kManyStages<kColumns> - 1; ++i) load();
    });
    arch::syncthreads();
  }

  // This warp's share of the tiles from `first` on, in a phase.
  HOPWELL_DEVICE void multiply(int first, bool is_later_phase) {
    const int stages = p.slice / LinearConfig::kStageK;
    Share left = share(first);
    for (; left.count > 0; ++left.tile, left.stage = 0) {
      const int rest = stages - left.stage, count = rest < left.count ? rest : left.count;
      if (arch::lane_index() == 0) {
        if (left.stage == 0) sums.first[left.tile] = at.warp;
        if (count == rest) sums.last[left.tile] = at.warp;
      }
      float d[2][4] = {};
      const unsigned char* from = x + left.stage * kXStageBytes<kColumns>;
      HOPWELL_NO_UNROLL
      for (int i = 0; i < count; ++i, from += kXStageBytes<kColumns>)
        multiply_stage_many<kColumns, T>(next_stage(), from, d);
      store_sums_many<kColumns>(sums.slots + (at.warp + left.tile) * kSumsOfTile<kColumns>, d, is_later_phase);
      left.count -= count;
    }
  }

  HOPWELL_DEVICE void run(float* pushed) {
    for (int first = at.begin; first < at.end; first += p.chunk) {
      HOPWELL_NO_UNROLL
      for (int phase = 0; phase < p.phases; ++phase) {
        const bool at_start = first == at.begin && phase == 0;
        if (at_start || p.phases > 1) bring_x(phase, at_start);
        multiply(first, phase > 0);
      }
      meet(p);
      store_results<kColumns>(p, global, sums, pushed, at, first, tiles(first));
      if (first + p.chunk < at.end) meet(p);
    }
  }
};

template <int kColumns, class T>
__global__ void __launch_bounds__(32 * ManyConfig::kMaxWarps, 1) many_kernel(const __grid_constant__ ManyParams<T> p) {
  unsigned char* const shared = &arch::dynamic_smem<unsigned char>();
  const arch::BlockIndex cta = arch::block_index_3d();
  const int warp = arch::warp_index(), number = cta.x / p.ranks, first_column = cta.z * kColumns;
  const int begin = number * p.tiles_of_cta + (number < p.larger_ctas ? number : p.larger_ctas);
  const ManyPlace at{.rank = cta.x % p.ranks,
                     .warp = warp,
                     .first_column = first_column,
                     .columns = p.columns - first_column,
                     .begin = begin,
                     .end = begin + p.tiles_of_cta + (number < p.larger_ctas ? 1 : 0)};
  unsigned char* const x = shared + p.warps * kRingBytes<kColumns>;
  float* const slots = reinterpret_cast<float*>(x + p.slice / LinearConfig::kStageK * kXStageBytes<kColumns>);
  int* const ranges = reinterpret_cast<int*>(slots + (p.warps + p.chunk) * kSumsOfTile<kColumns>);
  ManyWarp<kColumns, T> self{p,
                             at,
                             x,
                             {slots, ranges, ranges + p.chunk},
                             Ring<kManyStages<kColumns>>(shared + warp * kRingBytes<kColumns>, 0),
                             begin};
  self.aim();
  tile::launch_dependents();
  self.ring.prefetch(p, 1);  // more would hold up x
  tile::wait_for_prior_kernels();
  self.global = p.factor.loaded();
  self.run(reinterpret_cast<float*>(shared + p.pushed));
}

}  // namespace
}  // namespace hopwell::ops::nvfp4
