// nvfp4_linear for 2 to 16 columns of x at a time.
//
//     y[column, row] = factor · Σ_k code · scale · x[column, k] + bias[row]
//
// Tile      16 rows × 8 or 16 columns. A CTA has consecutive tiles. If clusters of two or four CTAs balance the work
//           better, the CTAs of a cluster have the same tiles, and each a slice of K
// Roles     all warps are alike. The x of the CTA's slice is in shared memory, in the order of mma's B. The stages of a
//           round's tiles, in order, are divided equally among the warps: a warp has the end of a tile, whole tiles, and
//           the beginning of another tile. If x of the slice does not fit, the CTA has `phases` shorter slices, one
//           after the other
// Timeline  copies  ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓   a ring a warp, across tiles and phases
//           warp    x │ barrier │ tile 3 … │ tile 4 … │ barrier, add sums, results
// Scales    a packed multiplication applies the scale to two weights, exactly: scaled_weights.hpp
// Sums      in registers to the end of a tile, then in a slot of shared memory for each warp and tile. Slots are added
//           in the order of warps. The CTAs of a cluster exchange sums through DSMEM and add them in the order of
//           ranks. The order is always the same
// Range     x is not converted: fp16 x meets fp16 weights, bf16 x meets bf16 weights. Sums are fp32: bf16 x above 2^124
//           may overflow them (without kUnit, bf16 x above 2^116)
// Budget    28672 × 4096, n = 8: shared: rings 110,592, x 65,536, sums 15,472. A stage takes ~330 instructions, 140 of
//           them logic at half rate; memory delivers a stage to a scheduler every ~500 cycles
// Bound     memory, plus ~3 µs until x is loaded and ~1 µs after the last product; from n = 9 on also reads of x from
//           shared memory
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
      phases;  // k of a CTA and phase, a multiple of 256; CTAs of a cluster; slice · cluster · phases >= k
  int tiles_per_cluster, larger_clusters;  // the first larger_clusters have a tile more
  int warps, round_tiles;                  // warps of a CTA; tiles of a round
  int exchange_offset;                     // of the sums from other CTAs of the cluster, in shared memory
  bool whole_scales;
};

struct alignas(8) SumPair {
  float low, high;
};
struct alignas(16) SumVector {
  float f[4];
};

// Offset of a sum in the sums of a tile, [columns / 8][16 rows][8 columns]. The pairs of columns of a row are swizzled
// by the row, so that lanes access different banks.
HOPWELL_DEVICE int sum_offset(int row, int column) {
  return column / 8 * 8 * StageConfig::kRows + row * 8 + (column % 8 ^ row / 4 * 2 % 8);
}

// Columns and tiles of a CTA, and the warp that holds this struct.
struct FewColumnsWork {
  int rank, warp, first_column, columns;  // columns: from first_column to the end of x
  int begin, end;                         // tiles
};

// Slice of a phase. It has all its stages even beyond the end of K, with zeros, so that every rank and phase divides
// its stages among the warps in the same way.
template <class Params>
HOPWELL_DEVICE Slice slice_of_phase(const Params& p, const FewColumnsWork& work, int phase) {
  Slice slice = slice_of((phase * p.cluster + work.rank) * p.slice, p.slice, p.k);
  slice.stages = p.slice / StageConfig::kStageK;
  return slice;
}

// First item of a warp, if `items` items are divided equally among the warps.
HOPWELL_DEVICE int share_begin(int items, int warp, int warps) {
  if (items < warps) return items < warp ? items : warp;
  return warps == 16 ? items * warp / 16 : warps == 8 ? items * warp / 8 : items * warp / warps;
}

// Partial sums of the warps. Warp w stores its sums of tile t in slot w + t, which no other warp and tile use. Warps
// first[t] to last[t] have sums of tile t.
struct PartialSums {
  float* slots;
  int *first, *last;
};

// ---- x in shared memory --------------------------------------------------------------------------------------------

// Loads a slice of x into shared memory, in the order in which lanes read it: [stage][half][word][columns / 8][column
// g][t], 16 bytes each. A warp loads two of every 8 columns, 256 contiguous bytes of each at a time. Calls overlap()
// while the first loads are in flight.
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

// Adds the products of a stage's 16 rows with x to d, in the order of mma's accumulators. With 8 columns, even and odd
// products have separate accumulators, for shorter chains.
template <int kColumns, class T>
HOPWELL_DEVICE void multiply_stage(const unsigned char* stage, const unsigned char* x, float (&d)[2][4]) {
  const int lane = arch::lane_index(), g = tile::fragment_row(), t = tile::quad_lane();
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

// Stores a warp's sums of a tile in their slot; with `accumulate`, adds them to the slot.
template <int kColumns>
HOPWELL_DEVICE void store_sums(float* slot, const float (&d)[2][4], bool accumulate) {
  HOPWELL_UNROLL
  for (int block = 0; block < kColumns / 8; ++block) {
    HOPWELL_UNROLL
    for (int i = 0; i < 2; ++i) {
      SumPair sums = kColumns == 8 ? SumPair{d[0][2 * i] + d[1][2 * i], d[0][2 * i + 1] + d[1][2 * i + 1]}
                                   : SumPair{d[block][2 * i], d[block][2 * i + 1]};
      auto* to = reinterpret_cast<SumPair*>(
          slot + sum_offset(tile::fragment_row() + 8 * i, 8 * block + tile::fragment_column()));
      if (accumulate) sums.low += to->low, sums.high += to->high;
      *to = sums;
    }
  }
}

// This CTA's sums of four columns of a row, `offset` floats from the beginning of a tile's sums. Adds warp by warp.
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

// Stores the results of a round's tiles, from tile `first` on, a vector of four columns a thread. In a cluster, vectors
// belong to the CTAs alternately, as many at a time as a CTA has threads. Each CTA sends its sums to the owner's
// `exchange`, and the owner adds them rank by rank.
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
    // Rank s % cluster owns step s of the vectors, and adds exchange[step / cluster][rank][4][thread] over the ranks.
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

// Barrier of the cluster, or of the CTA if the cluster has one CTA.
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
  int ring_first, ring_phase = 0;  // first tile of the round, and phase, that the ring copies
  Global global = {};

  HOPWELL_DEVICE int tiles(int first) const {
    return work.end - first < p.round_tiles ? work.end - first : p.round_tiles;
  }

  // This warp's part of the stages of a round whose first tile is `first`.
  struct Share {
    int tile, stage, count;  // first tile of the round's, and its stage; number of stages
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

  // Loads x of a phase. The first call also starts the ring, while the loads of x are in flight.
  HOPWELL_DEVICE void load_phase(int phase, bool at_start) {
    if (!at_start) arch::syncthreads();  // all warps have read x of the previous phase
    load_x<kColumns>(p, work, slice_of_phase(p, work, phase), arch::shared_address(x), [&] {
      if (!at_start) return;
      HOPWELL_NO_UNROLL
      for (int i = 0; i < Config::kStages - 1; ++i) copy_next();
    });
    arch::syncthreads();
  }

  // Multiplies this warp's part of the round whose first tile is `first`, in a phase.
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

// Shared memory: rings, x, slots of sums [16 rows × columns], and for each tile the warps of its first and last stage.
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
  self.ring.prefetch_l2(p, 1);  // more prefetches would delay x
  prefetch_x(p.x + first_column * p.x_stride, p.x_stride, work.columns < kColumns ? work.columns : kColumns, p.k,
             32 * p.warps);
  tile::wait_for_prior_kernels();
  self.global = p.factor.loaded();
  self.run(reinterpret_cast<float*>(shared + p.exchange_offset));
}

}  // namespace hopwell::ops::nvfp4::HOPWELL_TARGET
