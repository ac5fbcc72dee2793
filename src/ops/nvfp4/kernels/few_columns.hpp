// nvfp4_linear for 2 to 16 columns of x at a time.
//
//     y[column, row] = factor · Σ_k code · scale · x[column, k] + bias[row]
//
// Tile      16 rows × 8 or 16 columns; a CTA takes neighbouring tiles. With two or four CTAs in a cluster, where that
//           shares the work out better, all take the same tiles, and each a part of K.
// Roles     x of the CTA's slice of K lies in shared memory, in mma's order. The stages of all tiles, in order, are
//           shared out equally among the warps: to the end of one tile, whole tiles, the beginning of another. A warp's
//           sums stay in registers to the end of a tile. K that does not fit: `phases`, one after the other, each with
//           the same shares.
// Timeline  copies  ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓   a ring of each warp's own, across tiles and phases
//           warp    x │ barrier │ tile 3 … │ tile 4 … │ barrier, add up, results
// Scales    two weights at a time are multiplied by theirs, exactly: scaled_weights.hpp
// Sums      a warp's sums of a tile go to a slot of their own; slots are added warp by warp, and those of a cluster's
//           CTAs, which exchange them through distributed shared memory, rank by rank: always in the same order
// Range     x is multiplied as it is, fp16 by fp16 weights, bf16 by bf16 weights: all its digits count. Sums have
//           fp32's range: bf16 x above 2^124 may overflow them, as 2^116 would without kUnit
// Budget    28672 × 4096, n = 8: rings 110,592, x 65,536, sums 15,472. A stage is ~330 instructions, 140 of them logic
//           at half rate; memory leaves a scheduler ~500 cycles for it
// Bound     memory, with ~3 µs until x is there and ~1 µs after the last product; from n = 9 on reads of x from shared
//           memory too
#pragma once

#include "ops/nvfp4/kernels/scaled_weights.hpp"
#include "ops/nvfp4/kernels/weight_ring.hpp"

namespace hopwell::ops::nvfp4::HOPWELL_TARGET {

template <class T>
struct FewColumnsParams {
  Fp4Matrix weight;
  const T* x;
  int64_t x_stride;
  Result<T> result;
  Global factor;
  int rows, k, columns;
  int slice, cluster,
      phases;  // k of a CTA at a time, a multiple of 256; CTAs of a cluster: slice · cluster · phases >= k
  int tiles_per_cluster, larger_clusters;  // the first larger_clusters have a tile more
  int warps, round_tiles;                  // of a CTA; tiles between two rounds of results
  int exchange_offset;                     // in shared memory, of sums for the other CTAs of the cluster
  bool whole_scales;
};

struct alignas(8) SumPair {
  float low, high;
};
struct alignas(16) SumVector {
  float f[4];
};

// Where a sum lies in those of a tile, [8 columns][16 rows][8]: neighbouring columns together, pairs of them so that
// lanes read and write different banks.
HOPWELL_DEVICE int sum_offset(int row, int column) {
  return column / 8 * 8 * StageConfig::kRows + row * 8 + (column % 8 ^ row / 4 * 2 % 8);
}

// What a CTA multiplies.
struct FewColumnsWork {
  int rank, warp, first_column, columns;  // columns that exist, from the first of this CTA
  int begin, end;                         // tiles
};

// Where K has ended there are stages too, of zeros: so every rank and phase shares out its work alike.
template <class Params>
HOPWELL_DEVICE Slice slice_of_phase(const Params& p, const FewColumnsWork& work, int phase) {
  Slice slice = slice_of((phase * p.cluster + work.rank) * p.slice, p.slice, p.k);
  slice.stages = p.slice / StageConfig::kStageK;
  return slice;
}

// The first of a warp's items, of so many that all warps share out.
HOPWELL_DEVICE int share_begin(int items, int warp, int warps) {
  if (items < warps) return items < warp ? items : warp;
  return warps == 16 ? items * warp / 16 : warps == 8 ? items * warp / 8 : items * warp / warps;
}

// Sums of warps: warp w leaves its sums of tile t in slot w + t, which no other has. Warps first[t] to last[t] have
// some.
struct PartialSums {
  float* slots;
  int *first, *last;
};

// ---- x in shared memory --------------------------------------------------------------------------------------------

// Loads a slice of x in the order in which lanes take it: [stage][half][word][eight columns][column g][t], 16 bytes
// each. A warp has two of each eight columns, and 256 neighbouring bytes of both at a time. Calls overlap() while the
// first of it is on its way.
template <int kColumns, class T, class Overlap>
HOPWELL_DEVICE void load_x(const FewColumnsParams<T>& p, const FewColumnsWork& work, const Slice& slice,
                           uint32_t shared, Overlap overlap) {
  constexpr int kBlocks = kColumns / 8, kUnroll = 8 / kBlocks, kHalfK = StageConfig::kStageK / 2;
  const int lane = arch::lane_index(), word = lane / 8, g = work.warp % 4 * 2 + lane / 4 % 2, t = lane % 4;
  const int step = p.warps / 4, halves = 2 * slice.stages;
  int half = work.warp / 4, k = slice.begin + half * kHalfK + t * 32 + word * 8;
  const T* from = p.x + (work.first_column + g) * p.x_stride + k;
  uint32_t to = shared + uint32_t((half * 4 + word) * 64 * kColumns + (g * 4 + t) * 16);
  bool at_start = true;
  do {
    arch::Words4 v[kUnroll][kBlocks];
    HOPWELL_UNROLL
    for (int i = 0; i < kUnroll; ++i, from += step * kHalfK, k += step * kHalfK) {
      HOPWELL_UNROLL
      for (int block = 0; block < kBlocks; ++block) {
        v[i][block] = {{0, 0, 0, 0}};
        if (k < slice.end && g + 8 * block < work.columns)
          v[i][block] = arch::load_vector<arch::Words4>(from + 8 * block * p.x_stride);
      }
    }
    if (at_start) overlap();
    at_start = false;
    HOPWELL_UNROLL
    for (int i = 0; i < kUnroll; ++i, half += step, to += uint32_t(step * 256 * kColumns)) {
      HOPWELL_UNROLL
      for (int block = 0; block < kBlocks; ++block)
        if (half < halves) arch::store_shared_v4(to + uint32_t(512 * block), as_pairs(v[i][block]));
    }
  } while (half < halves);
}

// ---- products ------------------------------------------------------------------------------------------------------

// Adds the products of 16 rows of a stage with x to sums in mma's order of accumulators: of 8 columns those of even and
// odd products apart, for shorter chains.
template <int kColumns, class T>
HOPWELL_DEVICE void multiply_stage(const unsigned char* stage, const unsigned char* x, float (&d)[2][4]) {
  const int lane = arch::lane_index(), g = lane / 4, t = lane % 4;
  HOPWELL_UNROLL
  for (int half = 0; half < 2; ++half) {
    const unsigned char* codes = stage + g * 128 + (4 * (half ^ g % 2) + t) * 16;  // as in load_fragment
    const arch::Words4 upper = load_words(codes), lower = load_words(codes + 1024);
    const auto* scales = reinterpret_cast<const uint16_t*>(stage + StageConfig::kCodeBytes + g * 16 + half * 8 + t * 2);
    const RowPair<T> rows{ScaledWeights<T>(scales[0]), ScaledWeights<T>(scales[64])};
    HOPWELL_UNROLL
    for (int word = 0; word < 4; ++word) {
      arch::Words4 values[kColumns / 8];
      HOPWELL_UNROLL
      for (int block = 0; block < kColumns / 8; ++block)
        values[block] = load_words(x + (half * 4 + word) * 64 * kColumns + block * 512 + lane * 16);
      uint32_t a[4], b[4];
      rows.decode(word, upper.w[word], lower.w[word], a, b);
      HOPWELL_UNROLL
      for (int i = 0; i < 2; ++i) {
        const uint32_t weights[4] = {a[2 * i], b[2 * i], a[2 * i + 1], b[2 * i + 1]};
        HOPWELL_UNROLL
        for (int block = 0; block < kColumns / 8; ++block) {
          const uint32_t pair[2] = {values[block].w[2 * i], values[block].w[2 * i + 1]};
          ScaledWeights<T>::multiply(d[kColumns == 8 ? i : block], weights, pair);
        }
      }
    }
  }
}

// ---- sums ----------------------------------------------------------------------------------------------------------

// A warp's sums of a tile go to their slot. `accumulate`: adds to what is there.
template <int kColumns>
HOPWELL_DEVICE void store_sums(float* slot, const float (&d)[2][4], bool accumulate) {
  const int g = arch::lane_index() / 4, t = arch::lane_index() % 4;
  HOPWELL_UNROLL
  for (int block = 0; block < kColumns / 8; ++block) {
    HOPWELL_UNROLL
    for (int i = 0; i < 2; ++i) {
      SumPair sums = kColumns == 8 ? SumPair{d[0][2 * i] + d[1][2 * i], d[0][2 * i + 1] + d[1][2 * i + 1]}
                                   : SumPair{d[block][2 * i], d[block][2 * i + 1]};
      auto* to = reinterpret_cast<SumPair*>(slot + sum_offset(g + 8 * i, 8 * block + 2 * t));
      if (accumulate) sums.low += to->low, sums.high += to->high;
      *to = sums;
    }
  }
}

// The sums of four columns of a row that this CTA has, at so many floats from the beginning of a tile's: warp by warp.
template <int kColumns>
HOPWELL_DEVICE SumVector sum_of_warps(const PartialSums& sums, int tile, int offset) {
  constexpr int kTileSums = FewColumnsConfig<kColumns>::kTileSums;
  SumVector sum{{0, 0, 0, 0}};
  const int first = sums.first[tile], last = sums.last[tile];
  const float* from = sums.slots + (first + tile) * kTileSums + offset;
  for (int warp = first; warp <= last; ++warp, from += kTileSums) {
    const SumVector more = *reinterpret_cast<const SumVector*>(from);
    HOPWELL_UNROLL
    for (int j = 0; j < 4; ++j) sum.f[j] += more.f[j];
  }
  return sum;
}

// Results of a round's tiles from `first` on, four columns a thread. The CTAs of a cluster share these vectors out, as
// many as a CTA has threads at a time: each sends the others theirs, to `exchange`, and adds up its own rank by rank.
template <int kColumns, class T>
HOPWELL_DEVICE void store_results(const FewColumnsParams<T>& p, const Global& global, const PartialSums& sums,
                                  float* exchange, const FewColumnsWork& work, int first, int tiles) {
  constexpr int kRows = StageConfig::kRows, kVectors = FewColumnsConfig<kColumns>::kTileSums / 4;
  const int threads = 32 * p.warps;
  const double factor = global.get() * ScaledWeights<T>::kUnit;
  const auto offset_of = [](int i) {
    const int vector = i % kVectors / kRows;
    return vector / 2 * 8 * kRows + i % kRows * 8 + vector % 2 * 4;
  };
  const auto store = [&](int i, const SumVector& sum) {
    const int row = i % kRows, vector = i % kVectors / kRows, row_of_all = (first + i / kVectors) * kRows + row;
    if (row_of_all >= p.rows) return;
    HOPWELL_UNROLL
    for (int j = 0; j < 4; ++j) {
      const int column = vector / 2 * 8 + ((vector % 2 * 4 + j) ^ row / 4 * 2 % 8);
      if (column < work.columns) p.result.store(row_of_all, work.first_column + column, 0, factor, sum.f[j]);
    }
  };
#if HOPWELL_HAS_SM90
  if (p.cluster > 1) {
    // Step s of the vectors is rank s % cluster's; it adds up [step / cluster][rank][4][thread] of `exchange`.
    for (int i = arch::thread_index(), step = 0; i < tiles * kVectors; i += threads, ++step) {
      const SumVector sum = sum_of_warps<kColumns>(sums, i / kVectors, offset_of(i));
      const int owner = step % p.cluster;
      const float* slot = exchange + (step / p.cluster * p.cluster + work.rank) * 4 * threads + arch::thread_index();
      const uint32_t to = arch::map_to_rank(arch::shared_address(slot), uint32_t(owner));
      HOPWELL_UNROLL
      for (uint32_t j = 0; j < 4; ++j)
        arch::store_cluster(to + uint32_t(4 * threads) * j, arch::bit_cast<uint32_t>(sum.f[j]));
    }
    arch::cluster_sync();
    for (int step = work.rank; step * threads < tiles * kVectors; step += p.cluster) {
      const int i = step * threads + arch::thread_index();
      if (i >= tiles * kVectors) break;
      SumVector sum{{0, 0, 0, 0}};
      for (int rank = 0; rank < p.cluster; ++rank) {
        const float* slot = exchange + (step / p.cluster * p.cluster + rank) * 4 * threads + arch::thread_index();
        HOPWELL_UNROLL
        for (int j = 0; j < 4; ++j) sum.f[j] += slot[threads * j];
      }
      store(i, sum);
    }
    return;
  }
#endif
  for (int i = arch::thread_index(); i < tiles * kVectors; i += threads)
    store(i, sum_of_warps<kColumns>(sums, i / kVectors, offset_of(i)));
}

// ---- the kernel ----------------------------------------------------------------------------------------------------

// All CTAs of the cluster, or all warps of the CTA.
template <class Params>
HOPWELL_DEVICE void sync_cluster(const Params& p) {
#if HOPWELL_HAS_SM90
  if (p.cluster > 1) return arch::cluster_sync();
#endif
  arch::syncthreads();
}

template <int kColumns, class T>
struct FewColumnsWarp {
  using Config = FewColumnsConfig<kColumns>;

  const FewColumnsParams<T>& p;
  const FewColumnsWork& work;
  unsigned char* x;
  PartialSums sums;
  WeightRing<Config::kStages> ring;
  int ring_first, ring_phase = 0;  // the round, by its first tile, and the phase that the ring copies
  Global global = {};

  HOPWELL_DEVICE int tiles(int first) const {
    return work.end - first < p.round_tiles ? work.end - first : p.round_tiles;
  }

  // This warp's share of the stages of a round's tiles from `first` on.
  struct Share {
    int tile, stage, count;  // where it begins; stages
  };
  HOPWELL_DEVICE Share share(int first) const {
    const int stages = p.slice / StageConfig::kStageK, items = tiles(first) * stages;
    const int begin = share_begin(items, work.warp, p.warps);
    return {begin / stages, begin % stages, share_begin(items, work.warp + 1, p.warps) - begin};
  }

  HOPWELL_DEVICE void start_ring() {
    const Share next = share(ring_first);
    ring.start(p, slice_of_phase(p, work, ring_phase), ring_first + next.tile, next.stage, next.count);
  }
  HOPWELL_DEVICE void copy_next() {
    ring.copy_next(p, [&] {
      if (++ring_phase == p.phases) ring_phase = 0, ring_first += p.round_tiles;
      if (ring_first < work.end) start_ring();
    });
  }

  HOPWELL_DEVICE const unsigned char* next_stage() {
    arch::cp_async_wait<Config::kStages - 2>();
    arch::syncwarp();
    copy_next();
    return ring.oldest();
  }

  // x of a phase comes in; the ring starts when that is on its way for the first time.
  HOPWELL_DEVICE void load_phase(int phase, bool at_start) {
    if (!at_start) arch::syncthreads();  // x of the phase before is used up
    load_x<kColumns>(p, work, slice_of_phase(p, work, phase), arch::shared_address(x), [&] {
      if (!at_start) return;
      HOPWELL_NO_UNROLL
      for (int i = 0; i < Config::kStages - 1; ++i) copy_next();
    });
    arch::syncthreads();
  }

  // This warp's share of the tiles from `first` on, in a phase.
  HOPWELL_DEVICE void multiply(int first, bool is_later_phase) {
    const int stages = p.slice / StageConfig::kStageK;
    Share rest = share(first);
    for (; rest.count > 0; ++rest.tile, rest.stage = 0) {
      const int of_tile = stages - rest.stage, count = of_tile < rest.count ? of_tile : rest.count;
      if (arch::lane_index() == 0) {
        if (rest.stage == 0) sums.first[rest.tile] = work.warp;
        if (count == of_tile) sums.last[rest.tile] = work.warp;
      }
      float d[2][4] = {};
      const unsigned char* from = x + rest.stage * Config::kXStageBytes;
      HOPWELL_NO_UNROLL
      for (int i = 0; i < count; ++i, from += Config::kXStageBytes) multiply_stage<kColumns, T>(next_stage(), from, d);
      store_sums<kColumns>(sums.slots + (work.warp + rest.tile) * Config::kTileSums, d, is_later_phase);
      rest.count -= count;
    }
  }

  HOPWELL_DEVICE void run(float* exchange) {
    for (int first = work.begin; first < work.end; first += p.round_tiles) {
      HOPWELL_NO_UNROLL
      for (int phase = 0; phase < p.phases; ++phase) {
        const bool at_start = first == work.begin && phase == 0;
        if (at_start || p.phases > 1) load_phase(phase, at_start);
        multiply(first, phase > 0);
      }
      sync_cluster(p);
      store_results<kColumns>(p, global, sums, exchange, work, first, tiles(first));
      if (first + p.round_tiles < work.end) sync_cluster(p);
    }
  }
};

// Shared memory: rings, x, slots of sums [16 rows × columns], which warps have the first and the last stages of each
// tile.
template <int kColumns, class T>
__global__ void __launch_bounds__(32 * FewColumnsConfig<kColumns>::kMaxWarps, 1)
    nvfp4_linear_few_columns(const __grid_constant__ FewColumnsParams<T> p) {
  using Config = FewColumnsConfig<kColumns>;
  unsigned char* const shared = &arch::dynamic_smem<unsigned char>();
  const arch::BlockIndex cta = arch::block_index_3d();
  const int warp = arch::warp_index(), cluster = cta.x / p.cluster, first_column = cta.z * kColumns;
  const int begin = cluster * p.tiles_per_cluster + (cluster < p.larger_clusters ? cluster : p.larger_clusters);
  const FewColumnsWork work{.rank = cta.x % p.cluster,
                            .warp = warp,
                            .first_column = first_column,
                            .columns = p.columns - first_column,
                            .begin = begin,
                            .end = begin + p.tiles_per_cluster + (cluster < p.larger_clusters ? 1 : 0)};
  unsigned char* const x = shared + p.warps * Config::kRingBytes;
  float* const slots = reinterpret_cast<float*>(x + p.slice / StageConfig::kStageK * Config::kXStageBytes);
  int* const owners = reinterpret_cast<int*>(slots + (p.warps + p.round_tiles) * Config::kTileSums);
  FewColumnsWarp<kColumns, T> self{p,
                                   work,
                                   x,
                                   {slots, owners, owners + p.round_tiles},
                                   WeightRing<Config::kStages>(shared + warp * Config::kRingBytes, 0),
                                   begin};
  self.start_ring();
  tile::launch_dependents();
  self.ring.prefetch_l2(p, 1);  // more would hold up x
  prefetch_x(p.x + first_column * p.x_stride, p.x_stride, work.columns < kColumns ? work.columns : kColumns, p.k,
             32 * p.warps);
  tile::wait_for_prior_kernels();
  self.global = p.factor.loaded();
  self.run(reinterpret_cast<float*>(shared + p.exchange_offset));
}

}  // namespace hopwell::ops::nvfp4::HOPWELL_TARGET
