// nvfp4_linear for 2 to 16 columns of x on Hopper, by wgmma, for shapes whose x is a large part of a CTA's reads.
//
//     y[column, row] = factor · Σ_k code · scale · x[column, k] + bias[row]
//
// Tile      16 rows × 8 or 16 columns for a warp. The four warps of a warpgroup multiply the same stage of x
// Roles     warps 0-15    mma        in four warpgroups; the tiles of a CTA fill one to four. If tiles fill one or two
//                                    warpgroups, the others have the same tiles, and stages of 256 k alternate between
//                                    them (`splits`). The CTAs of a cluster have a slice of K each
//           warps 16-19   producer   each loads a whole stage of x through registers and stores it in the order of
//                                    wgmma's B
// Timeline  copies     ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓   weights: a ring for each mma warp
//           producers  x0 x4 x8 …              four stages are in flight; each stage of x has barriers `full` and
//                                              `empty`
//           mma        │ x0 │ x1 │ x2 … │ sums │
// Products  A: decoded weights times their scales, in registers (scaled_weights.hpp). B: x in shared memory, read once
//           for four warps. x goes through a ring, so a CTA starts with its first stage
// Sums      in registers to the end of the slice. Each warp then sends its sums to the CTA of the cluster that stores
//           the tile, into a slot of its own. That CTA adds them in the order of ranks and splits, which is always the
//           same
// Range     as in few_columns.hpp
// Budget    n = 16: shared: rings 73,728, x 67,584, sums 16,384. The rest stays L1 cache, which the scales need
// Bound     decoding, and waiting: the four warps of a warpgroup are as fast as the slowest ring
#pragma once

#include "arch/sm90/wgmma.hpp"
#include "ops/nvfp4/kernels/scaled_weights.hpp"
#include "ops/nvfp4/kernels/weight_ring.hpp"
#include "tile/gpu/ring.hpp"

namespace hopwell::ops::nvfp4::HOPWELL_TARGET {

template <class T>
struct FewColumnsWgmmaParams {
  Fp4Matrix weight;
  const T* x;
  int64_t x_stride;
  Result<T> result;
  Global factor;
  int rows, k, columns;
  int cluster, slice;                      // CTAs of a cluster; k of each, a multiple of 256
  int tiles_per_cluster, larger_clusters;  // the first larger_clusters have a tile more
  int row_groups, splits;                  // warpgroups with different tiles; warpgroups with the same tiles
  bool whole_scales;
};

// Barriers of the ring of x.
using XBarriers = tile::RingBarriers<FewColumnsWgmmaConfig<16>::kXStages>;
using XSlot = tile::RingSlot<XBarriers::kStages>;
static_assert(sizeof(XBarriers) == FewColumnsWgmmaConfig<16>::kBarrierBytes);
// Each stage has one producer warp, which waits for every phase of the stage's barrier. Parity does not distinguish a
// phase from the phase after the next.
static_assert(XBarriers::kStages % FewColumnsWgmmaConfig<16>::kProducers == 0);

using XRing = TileRing<FewColumnsWgmmaConfig<16>::kStages>;

// Tiles and slice of a CTA.
struct FewColumnsWgmmaWork {
  int rank;
  int first, tiles;  // first tile; number of tiles
  Slice slice;
};

// ---- x -------------------------------------------------------------------------------------------------------------

// A producer warp: every kProducers-th stage of x. A lane loads 16 bytes, 8 consecutive k, which one word of codes
// multiplies. Reordered to pairs (k, k + 4), they belong to both halves of k of two products.
template <int kColumns, class T>
HOPWELL_DEVICE void produce_x(const FewColumnsWgmmaParams<T>& p, const FewColumnsWgmmaWork& work, XBarriers& barriers,
                              uint32_t stages, int producer) {
  using Config = FewColumnsWgmmaConfig<kColumns>;
  constexpr int kPairs = kColumns / 2;  // pairs of columns: a warp loads 256 contiguous bytes of each column
  const int lane = arch::lane_index(), column = lane / 4 % 2, k = lane % 4 * 32 + lane / 8 * 8;
  const T* from = p.x + column * p.x_stride + work.slice.begin + k;
  // stmatrix: lanes 8 i to 8 i + 7 hold the addresses of the rows of matrix i: [word][column].
  const uint32_t to = stages + uint32_t(lane % 8 / 2 * Config::kWordBytes + lane / 16 * Config::kProductBytes +
                                        lane / 8 % 2 * 128 + lane % 2 * 16);
  HOPWELL_NO_UNROLL
  for (int stage = producer; stage < work.slice.stages; stage += Config::kProducers) {
    arch::Words4 v[2][kPairs];
    HOPWELL_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int ahead = stage * StageConfig::kStageK + half * (StageConfig::kStageK / 2);
      HOPWELL_UNROLL
      for (int pair = 0; pair < kPairs; ++pair) {
        v[half][pair] = {{0, 0, 0, 0}};
        if (work.slice.begin + k + ahead < work.slice.end && column + 2 * pair < p.columns)
          v[half][pair] = arch::load_vector<arch::Words4>(from + 2 * pair * p.x_stride + ahead);
      }
    }
    const XSlot slot{barriers, stage};
    slot.wait_empty();
    HOPWELL_UNROLL
    for (int half = 0; half < 2; ++half) {
      HOPWELL_UNROLL
      for (int pair = 0; pair < kPairs; ++pair)
        arch::stmatrix(to + uint32_t(slot.stage() * Config::kXStageBytes + half * Config::kHalfBytes + pair / 4 * 256 +
                                     pair % 4 * 32),
                       as_pairs(v[half][pair]).w);
    }
    arch::fence_proxy_async();
    arch::syncwarp();
    if (lane == 0) arch::mbarrier_arrive(slot.full());
  }
}

// ---- products ------------------------------------------------------------------------------------------------------

// Adds the products of each warp's 16 rows with a stage of x to d. Two words are decoded while the products of the
// previous two words run.
template <int kColumns, class T>
HOPWELL_DEVICE void multiply_stage(const unsigned char* stage, uint64_t x, float (&d)[kColumns / 2]) {
  using Config = FewColumnsWgmmaConfig<kColumns>;
  constexpr arch::WgmmaOptions kOptions{.type =
                                            std::is_same_v<T, bf16> ? arch::WgmmaType::bf16 : arch::WgmmaType::fp16};
  uint32_t weights[2][2][2][4];  // [block][word][product][register]
  HOPWELL_UNROLL
  for (int half = 0; half < 2; ++half) {
    const StageFragment codes = load_fragment(stage, half);
    const RowPair<T> rows{ScaledWeights<T>(codes.upper_scales), ScaledWeights<T>(codes.lower_scales)};
    HOPWELL_UNROLL
    for (int block = 0; block < 2; ++block) {
      auto& products = weights[block];
      HOPWELL_UNROLL
      for (int i = 0; i < 2; ++i) {
        const int word = 2 * block + i;
        uint32_t a[4], b[4];
        rows.decode(word, codes.upper.w[word], codes.lower.w[word], a, b);
        HOPWELL_UNROLL
        for (int j = 0; j < 2; ++j) {
          products[i][j][0] = a[2 * j], products[i][j][1] = b[2 * j];
          products[i][j][2] = a[2 * j + 1], products[i][j][3] = b[2 * j + 1];
        }
      }
      arch::wgmma_fence();
      HOPWELL_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int word = 2 * block + i / 2, product = i % 2;
        const int offset = half * Config::kHalfBytes + word * Config::kWordBytes + product * Config::kProductBytes;
        arch::wgmma_rs<kOptions>(d, products[i / 2][product], x + uint64_t(offset >> 4), true);
      }
      arch::wgmma_commit();
      if (half + block < 2)
        arch::wgmma_wait<1>();  // kept: the next weights overwrite A's registers, which the emulator has copied
    }
  }
  arch::wgmma_wait<0>(d);
}

// Multiplies a warp's tile: every p.splits-th stage, from stage `split` on.
template <int kColumns, class T>
HOPWELL_DEVICE void multiply(const FewColumnsWgmmaParams<T>& p, const FewColumnsWgmmaWork& work, XBarriers& barriers,
                             XRing& ring, uint32_t x, int split, float (&d)[kColumns / 2]) {
  using Config = FewColumnsWgmmaConfig<kColumns>;
  const uint64_t operand = arch::at_address(arch::wgmma_descriptor({arch::Swizzle::none, 128, 256}), x);
  HOPWELL_UNROLL
  for (int i = 0; i < Config::kStages - 1; ++i) ring.copy_next(p);
  HOPWELL_NO_UNROLL
  for (int stage = split; stage < work.slice.stages; stage += p.splits) {
    const XSlot slot{barriers, stage};
    arch::cp_async_wait<Config::kStages - 2>();
    arch::syncwarp();
    ring.copy_next(p);
    slot.wait_full();
    multiply_stage<kColumns, T>(ring.oldest(), operand + uint64_t(slot.stage() * Config::kXStageBytes >> 4), d);
    if (arch::lane_index() == 0) arch::mbarrier_arrive(slot.empty());
  }
}

// ---- sums and results ----------------------------------------------------------------------------------------------

// Stores the result of sum `number` of a tile's sums, [register][lane].
template <int kColumns, class T>
HOPWELL_DEVICE void store_result(const FewColumnsWgmmaParams<T>& p, double factor, const FewColumnsWgmmaWork& work,
                                 int tile, int number, float sum) {
  const int j = number / 32, lane = number % 32;
  const int row = (work.first + tile) * StageConfig::kRows + j / 2 % 2 * 8 + tile::fragment_row(lane);
  const int column = j / 4 * 8 + tile::fragment_column(lane) + j % 2;
  if (row < p.rows && column < p.columns) p.result.store(row, column, 0, factor, sum);
}

// Combines the sums of the warps that share a tile and stores the results, in the CTA whose rank is tile % cluster.
template <int kColumns, class T>
HOPWELL_DEVICE void store_results(const FewColumnsWgmmaParams<T>& p, const Global& global,
                                  const FewColumnsWgmmaWork& work, float* sums, int tile, int split, bool has_tile,
                                  const float (&d)[kColumns / 2]) {
  using Config = FewColumnsWgmmaConfig<kColumns>;
  constexpr int kSums = Config::kTileSums;
  const int shares = p.cluster * p.splits;
  const double factor = global.get() * ScaledWeights<T>::kUnit;  // loaded before the barriers
  float* const own = sums + (tile / p.cluster * shares + work.rank * p.splits + split) * kSums + arch::lane_index();
  if (p.cluster > 1) {
    arch::cluster_wait();  // all CTAs of the cluster have started
    if (has_tile) {
      const uint32_t to = arch::map_to_rank(arch::shared_address(own), uint32_t(tile % p.cluster));
      HOPWELL_UNROLL
      for (int j = 0; j < kColumns / 2; ++j)
        arch::store_cluster(to + uint32_t(128 * j), arch::bit_cast<uint32_t>(d[j]));
    }
    arch::cluster_sync();
  } else {
    if (has_tile) {
      HOPWELL_UNROLL
      for (int j = 0; j < kColumns / 2; ++j) own[32 * j] = d[j];
    }
    arch::syncthreads();
  }
  const int tiles = (work.tiles - work.rank + p.cluster - 1) / p.cluster;  // that this rank stores
  for (int i = arch::thread_index(); i < tiles * kSums; i += Config::kThreads) {
    const float* from = sums + i / kSums * shares * kSums + i % kSums;
    float sum = 0;
    for (int j = 0; j < shares; ++j, from += kSums) sum += *from;
    store_result<kColumns>(p, factor, work, i / kSums * p.cluster + work.rank, i % kSums, sum);
  }
}

// ---- the kernel ----------------------------------------------------------------------------------------------------

// Shared memory: barriers, x, rings, sums.
template <int kColumns, class T>
__global__ void __launch_bounds__(FewColumnsWgmmaConfig<kColumns>::kThreads, 1)
    nvfp4_linear_few_columns_wgmma(const __grid_constant__ FewColumnsWgmmaParams<T> p) {
  using Config = FewColumnsWgmmaConfig<kColumns>;
  unsigned char* const shared = &arch::dynamic_smem<unsigned char>();
  const arch::BlockIndex cta = arch::block_index_3d();
  const int warp = arch::warp_index(), cluster = cta.x / p.cluster, rank = cta.x % p.cluster, begin = rank * p.slice;
  const FewColumnsWgmmaWork work{
      .rank = rank,
      .first = cluster * p.tiles_per_cluster + (cluster < p.larger_clusters ? cluster : p.larger_clusters),
      .tiles = p.tiles_per_cluster + (cluster < p.larger_clusters ? 1 : 0),
      .slice = {.begin = begin,
                .end = begin + p.slice < p.k ? begin + p.slice : p.k,
                .stages = p.slice / StageConfig::kStageK,
                .whole = 0}};
  auto& barriers = *reinterpret_cast<XBarriers*>(shared);
  unsigned char* const x = shared + Config::kBarrierBytes;
  unsigned char* const rings = x + Config::kXStages * Config::kXStageBytes;
  float* const sums = reinterpret_cast<float*>(rings + Config::kWarps * Config::kRingBytes);
  const int split = warp / 4 / p.row_groups, tile = warp / 4 % p.row_groups * 4 + warp % 4;
  const bool multiplies = split < p.splits && warp < Config::kWarps, has_tile = multiplies && tile < work.tiles;

  if (p.cluster > 1) arch::cluster_arrive_relaxed();
  if (arch::thread_index() == 0)
    barriers.init(1, uint32_t(4 * p.row_groups));  // kept: on the emulator any warp releases the reads of wgmma
  tile::launch_dependents();
  XRing ring(p, work.slice, rings + warp * Config::kRingBytes, work.first + tile, has_tile, split, p.splits);
  if (multiplies) ring.prefetch_l2();  // more prefetches would delay x
  prefetch_x(p.x, p.x_stride, p.columns, p.k, Config::kThreads);
  arch::syncthreads();
  tile::wait_for_prior_kernels();
  const Global global = p.factor.loaded();
  float d[kColumns / 2] = {};
  if (warp >= Config::kWarps)
    produce_x<kColumns>(p, work, barriers, arch::shared_address(x), warp - Config::kWarps);
  else if (multiplies)
    multiply<kColumns>(p, work, barriers, ring, arch::shared_address(x), split, d);
  store_results<kColumns>(p, global, work, sums, tile, split, has_tile, d);
}

}  // namespace hopwell::ops::nvfp4::HOPWELL_TARGET
