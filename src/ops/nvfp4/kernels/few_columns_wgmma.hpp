// nvfp4_linear for 2 to 16 columns of x on Hopper, by wgmma: where x is much of what a CTA reads.
//
//     y[column, row] = factor · Σ_k code · scale · x[column, k] + bias[row]
//
// Tile      16 rows a warp, 8 or 16 columns; four warps, which need not have neighbouring rows, meet the same x at a
//           time
// Roles     16 warps multiply, in four warpgroups. A CTA's tiles fill one to four of them; where they leave room,
//           warpgroups with the same tiles take stages of 256 k in turn (`splits`), and the CTAs of a cluster a slice
//           of K each. 4 producer warps bring x: each all of a stage at once, through registers, in the order that
//           wgmma wants
// Timeline  copies     ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓   weights: a ring of each warp's own
//           producers  x0 x4 x8 …              four stages are on their way at a time; `full` and `empty` for each stage of x
//           warp       │ x0 │ x1 │ x2 … │ sums │
// Products  A: weights, decoded and times their scales, in registers (scaled_weights.hpp); B: x in shared memory, which
//           is read once for four warps. x goes through a ring instead of lying there whole, so a CTA starts with its
//           first stage
// Sums      in registers to the end. Each warp then sends its own to the CTA of the cluster that stores the tile, where
//           no other warp writes, and they are added rank by rank and split by split: always in the same order
// Range     as in few_columns.hpp
// Budget    n = 16: rings 73,728, x 67,584, sums 16,384; what they leave is L1 cache, which scales want
// Bound     decoding, and waiting for each other: the four warps of a warpgroup go as fast as the slowest ring
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
  int row_groups, splits;                  // warpgroups side by side; that share a slice of K
  bool whole_scales;
};

// Of x, in shared memory.
using XBarriers = tile::RingBarriers<FewColumnsWgmmaConfig<16>::kXStages>;
using XSlot = tile::RingSlot<XBarriers::kStages>;
static_assert(sizeof(XBarriers) == FewColumnsWgmmaConfig<16>::kBarrierBytes);
// Each stage has one producer, which waits for every phase of it: otherwise it could not tell one phase from the next
// but one.
static_assert(XBarriers::kStages % FewColumnsWgmmaConfig<16>::kProducers == 0);

using XRing = TileRing<FewColumnsWgmmaConfig<16>::kStages>;

// What a CTA multiplies.
struct FewColumnsWgmmaWork {
  int rank;
  int first, tiles;  // of 16 rows
  Slice slice;
};

// ---- x -------------------------------------------------------------------------------------------------------------

// One of the producers: every kProducers-th stage of x. A lane's 16 bytes are eight neighbours in k, a word of codes;
// as pairs (k, k + 4) they are what a lane of four gives to two products, to each of their halves.
template <int kColumns, class T>
HOPWELL_DEVICE void produce_x(const FewColumnsWgmmaParams<T>& p, const FewColumnsWgmmaWork& work, XBarriers& barriers,
                              uint32_t stages, int producer) {
  using Config = FewColumnsWgmmaConfig<kColumns>;
  constexpr int kPairs = kColumns / 2;  // of columns: a warp's loads are 256 neighbouring bytes of two
  const int lane = arch::lane_index(), column = lane / 4 % 2, k = lane % 4 * 32 + lane / 8 * 8;
  const T* from = p.x + column * p.x_stride + work.slice.begin + k;
  // As stmatrix has it, lanes 8 i to 8 i + 7 name the rows of matrix i: word, column.
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

// Adds the products of 16 rows of a stage of each warp with x to d. While two words' products run, the next two are
// decoded.
template <int kColumns, class T>
HOPWELL_DEVICE void multiply_stage(const unsigned char* stage, uint64_t x, float (&d)[kColumns / 2]) {
  using Config = FewColumnsWgmmaConfig<kColumns>;
  constexpr arch::WgmmaOptions kOptions{.type =
                                            std::is_same_v<T, bf16> ? arch::WgmmaType::bf16 : arch::WgmmaType::fp16};
  uint32_t weights[2][2][2][4];  // of the words of two blocks, for two products each
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
        arch::wgmma_wait<1>();  // kept: weights go where the last block's were, which the emulator copied
    }
  }
  arch::wgmma_wait<0>(d);
}

// A warp's tile: from its first stage on every p.splits-th.
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

// A result, from its number among a tile's sums, [register][lane].
template <int kColumns, class T>
HOPWELL_DEVICE void store_result(const FewColumnsWgmmaParams<T>& p, double factor, const FewColumnsWgmmaWork& work,
                                 int tile, int number, float sum) {
  const int j = number / 32, lane = number % 32;
  const int row = (work.first + tile) * StageConfig::kRows + j / 2 % 2 * 8 + lane / 4;
  const int column = j / 4 * 8 + lane % 4 * 2 + j % 2;
  if (row < p.rows && column < p.columns) p.result.store(row, column, 0, factor, sum);
}

// Sums of the warps that share a tile meet in the CTA whose rank is the tile's number modulo the cluster.
template <int kColumns, class T>
HOPWELL_DEVICE void store_results(const FewColumnsWgmmaParams<T>& p, const Global& global,
                                  const FewColumnsWgmmaWork& work, float* sums, int tile, int split, bool has_tile,
                                  const float (&d)[kColumns / 2]) {
  using Config = FewColumnsWgmmaConfig<kColumns>;
  constexpr int kSums = Config::kTileSums;
  const int shares = p.cluster * p.splits;
  const double factor = global.get() * ScaledWeights<T>::kUnit;  // before all wait for each other
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
  const int tiles = (work.tiles - work.rank + p.cluster - 1) / p.cluster;  // of this rank
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
  if (arch::thread_index() == 0) barriers.init(1, uint32_t(4 * p.row_groups));
  tile::launch_dependents();
  XRing ring(p, work.slice, rings + warp * Config::kRingBytes, work.first + tile, has_tile, split, p.splits);
  if (multiplies) ring.prefetch_l2();  // more would hold up x
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
