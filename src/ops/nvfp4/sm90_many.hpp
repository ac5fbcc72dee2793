// nvfp4_linear for 2 to 16 columns of x on Hopper, by wgmma: where x is much of what a CTA reads.
//
//     y[column, row] = factor · Σ_k code · scale · x[column, k] + bias[row]
//
// Tile      16 rows a warp, 8 or 16 columns; four warps, which need not have neighbouring rows, meet the same x at a time
// Roles     16 warps multiply, in four warpgroups. A CTA's tiles fill one to four of them; where they leave room, warpgroups
//           with the same tiles take stages of 256 k in turn (`parts`), and the CTAs of a cluster (`ranks`) a slice of K each.
//           4 warps bring x: each all of a stage at once, through registers, in the order that wgmma wants
// Timeline  copies     ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓   weights: a ring of each warp's own
//           producers  x0 x4 x8 …              four stages are on their way at a time; `full` and `empty` a slot
//           warp       │ x0 │ x1 │ x2 … │ sums │
// Products  A: weights, decoded and times their scales, in registers (sm80_weights.hpp); B: x in shared memory, which is read
//           once for four warps. x goes through a few slots instead of lying there whole, so a CTA starts with its first stage
// Sums      in registers to the end. Each warp then gives its own to the CTA of the cluster that stores the tile, into a place
//           that no other has, and they are added rank by rank and part by part: always in the same order
// Range     as in sm80_many.hpp
// Budget    n = 16: rings 73,728, x 67,584, sums 16,384; what they leave is L1 cache, which scales want
// Bound     decoding, and waiting for each other: the four warps of a warpgroup go as fast as the slowest ring
#pragma once

#include "arch/sm90/mbarrier.hpp"
#include "arch/sm90/wgmma.hpp"
#include "ops/nvfp4/sm80_ring.hpp"
#include "ops/nvfp4/sm80_weights.hpp"

namespace hopwell::ops::nvfp4 {
namespace {

struct WideConfig {
  static constexpr int kWarps = 16, kProducers = 4, kThreads = 32 * (kWarps + kProducers);
  static constexpr int kStages = 2, kSlots = 8;  // of weights, a warp; of x
  static constexpr int kRingBytes = kStages * LinearConfig::kStageBytes;
};

// A stage of x in shared memory: [half][word of 8 k][product][eight columns][half of its k][column][8 k]. Words lie 32 bytes
// further apart than they need, so that a warp's stores go to different banks.
template <int kColumns>
struct WideX {
  static constexpr int kProductBytes = 32 * kColumns, kWordBytes = 2 * kProductBytes + 32, kHalfBytes = 4 * kWordBytes,
                       kStageBytes = 2 * kHalfBytes;
};

template <class T>
struct WideParams {
  Matrix weight;
  const T* x;
  int64_t x_stride;
  Result<T> result;
  Factor factor;
  int rows, k, columns;
  int ranks, slice;               // CTAs of a cluster; k of each, a multiple of 256
  int tiles_of_cta, larger_ctas;  // the first larger_ctas have a tile more
  int groups, parts;              // warpgroups side by side; that share a slice of K
  bool whole_scales;
};

struct alignas(128) WideBarriers {
  arch::mbarrier full[WideConfig::kSlots], empty[WideConfig::kSlots];
};

template <int kColumns>
inline constexpr int kWideSums = LinearConfig::kRows * kColumns;  // of a tile

// A warp finds a slot as it left it: otherwise it could not tell one round from the next but one.
static_assert(WideConfig::kSlots % WideConfig::kProducers == 0);

// What a CTA knows of its place.
struct WidePlace {
  int rank;
  int first, tiles;        // of 16 rows
  int begin, end, stages;  // of K
};

// ---- x -------------------------------------------------------------------------------------------------------------

// One warp of those that bring x in: every kProducers-th stage. A lane's 16 bytes are eight neighbours in k, a word of
// codes; as pairs (k, k + 4) they are what a lane of four gives to two products, to each of their halves.
template <int kColumns, class T>
HOPWELL_DEVICE void produce(const WideParams<T>& p, const WidePlace& at, WideBarriers& barriers, uint32_t slots,
                            int number) {
  using X = WideX<kColumns>;
  constexpr int kPairs = kColumns / 2;  // of columns: a warp's loads are whole pieces of 256 bytes of two
  const int lane = arch::lane_index(), column = lane / 4 % 2, k = lane % 4 * 32 + lane / 8 * 8;
  const T* from = p.x + column * p.x_stride + at.begin + k;
  // As stmatrix has it, lanes 8 i to 8 i + 7 name the rows of matrix i: word, column.
  const uint32_t to = slots + uint32_t(lane % 8 / 2 * X::kWordBytes + lane / 16 * X::kProductBytes +
                                       lane / 8 % 2 * 128 + lane % 2 * 16);
  HOPWELL_NO_UNROLL
  for (int stage = number; stage < at.stages; stage += WideConfig::kProducers) {
    arch::Words4 v[2][kPairs];
    HOPWELL_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int ahead = stage * LinearConfig::kStageK + half * (LinearConfig::kStageK / 2);
      HOPWELL_UNROLL
      for (int pair = 0; pair < kPairs; ++pair) {
        v[half][pair] = {{0, 0, 0, 0}};
        if (at.begin + k + ahead < at.end && column + 2 * pair < p.columns)
          v[half][pair] = *reinterpret_cast<const arch::Words4*>(from + 2 * pair * p.x_stride + ahead);
      }
    }
    const int slot = stage % WideConfig::kSlots, round = stage / WideConfig::kSlots;
    if (round > 0) arch::mbarrier_wait(barriers.empty[slot], uint32_t(round - 1) & 1);
    HOPWELL_UNROLL
    for (int half = 0; half < 2; ++half) {
      HOPWELL_UNROLL
      for (int pair = 0; pair < kPairs; ++pair)
        arch::stmatrix(to + uint32_t(slot * X::kStageBytes + half * X::kHalfBytes + pair / 4 * 256 + pair % 4 * 32),
                       as_pairs(v[half][pair]).w);
    }
    arch::fence_proxy_async();
    arch::syncwarp();
    if (lane == 0) arch::mbarrier_arrive(barriers.full[slot]);
  }
}

// ---- weights -------------------------------------------------------------------------------------------------------

// A warp's ring: a tile's stages, every `step`-th of a slice of K. A stage lies there as in Ring.
class WideRing {
 public:
  // `exists`: otherwise zeros come, and nothing is read.
  template <class Params>
  HOPWELL_DEVICE WideRing(const Params& p, const WidePlace& at, const unsigned char* slots, int tile, bool exists,
                          int stage, int step)
      : slots_(slots), step_(step) {
    const int lane = arch::lane_index(), last = p.rows - 1;
    const uint32_t to = arch::shared_address(slots);
    to_ = to + uint32_t(lane / 8 * 128 + ((lane ^ lane / 8 * 4) & 7) * 16);
    scales_to_ = to + uint32_t(LinearConfig::kCodeBytes + lane * 8);
    k_ = at.begin + stage * LinearConfig::kStageK, end_ = exists ? at.end : 0;
    left_ = stage < at.stages ? (at.stages - stage + step - 1) / step : 0;
    const auto row = [&](int i) {  // rows beyond: the last one again
      const int of_all = tile * LinearConfig::kRows + i;
      return of_all < last ? of_all : last;
    };
    const int64_t first = row(lane / 8) * p.weight.row_stride;
    HOPWELL_UNROLL
    for (int i = 0; i < 3; ++i) ahead_[i] = uint32_t(row(lane / 8 + 4 * (i + 1)) * p.weight.row_stride - first);
    codes_at_ = p.weight.codes + first + k_ / 2 + lane % 8 * 16;
    const int scale_row = row(lane / 2), group = k_ / 64 + lane % 2 * 2;
    const Scales& scales = p.weight.scales;
    scales_at_ =
        scales.data + group * (scales.blocked ? 512 : 4) +
        (scales.blocked ? hopwell::nvfp4::blocked_offset(scale_row, 0, scales.columns) : scale_row * scales.row_stride);
  }

  // Asks for codes of the first stage to come to the L2 cache: harmless even while another kernel writes them.
  HOPWELL_DEVICE void prefetch() const {
    if (arch::lane_index() % 8 != 0 || left_ == 0 || k_ + LinearConfig::kStageK > end_) return;
    arch::prefetch_l2(codes_at_);
    HOPWELL_UNROLL
    for (uint32_t ahead : ahead_) arch::prefetch_l2(codes_at_ + ahead);
  }

  // Starts the copies of the next stage, if there is one, and closes a group.
  template <class Params>
  HOPWELL_DEVICE void load(const Params& p) {
    if (left_ > 0) {
      --left_;
      const int step = step_ * LinearConfig::kStageK, scale_step = p.weight.scales.blocked ? 512 : 4;  // of four scales
      if (p.whole_scales && k_ + LinearConfig::kStageK <= end_) [[likely]] {
        arch::cp_async(to_ + fill_, codes_at_);
        HOPWELL_UNROLL
        for (int i = 0; i < 3; ++i) arch::cp_async(to_ + fill_ + uint32_t(512 * (i + 1)), codes_at_ + ahead_[i]);
        arch::cp_async<8>(scales_to_ + fill_, scales_at_);
      } else {
        load_slowly(scale_step);
      }
      codes_at_ += step / 2, scales_at_ += step_ * 4 * scale_step, k_ += step;
    }
    fill_ += LinearConfig::kStageBytes;
    if (fill_ == uint32_t(WideConfig::kRingBytes)) fill_ = 0;
    arch::cp_async_commit();
  }

  // The oldest stage, which has arrived, right after a load(): that has filled the slot before it.
  HOPWELL_DEVICE const unsigned char* oldest() const { return slots_ + fill_; }

 private:
  // Any stage: zeros where K has ended, scales by fours.
  HOPWELL_DEVICE void load_slowly(int scale_step) {
    const int left = end_ - k_, lane = arch::lane_index(), bytes = within(left / 2 - lane % 8 * 16, 16);
    arch::cp_async(to_ + fill_, codes_at_, bytes);
    HOPWELL_UNROLL
    for (int i = 0; i < 3; ++i) arch::cp_async(to_ + fill_ + uint32_t(512 * (i + 1)), codes_at_ + ahead_[i], bytes);
    HOPWELL_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int scales = within(left / kCodesOfBlock - lane % 2 * 8 - 4 * i, 4);
      arch::cp_async<4>(scales_to_ + fill_ + uint32_t(4 * i), scales_at_ + i * scale_step, scales);
    }
  }

  const uint8_t *codes_at_, *scales_at_;
  const unsigned char* slots_;
  uint32_t to_, scales_to_;  // where this lane's first 16 bytes of codes go in slot 0, and its scales
  uint32_t fill_ = 0;        // the next slot to fill
  uint32_t ahead_[3];        // from this lane's row of codes to those 4, 8 and 12 below
  int step_, k_, end_, left_;
};

// ---- products ------------------------------------------------------------------------------------------------------

// Adds the products of 16 rows of a stage of each warp with x to d. While one word's products run, the next is decoded.
template <int kColumns, class T>
HOPWELL_DEVICE void multiply_stage_wide(const unsigned char* stage, uint64_t x, float (&d)[kColumns / 2]) {
  using X = WideX<kColumns>;
  constexpr arch::WgmmaOptions kOptions{.type = std::is_same_v<T, bf16> ? arch::Half::bf16 : arch::Half::fp16};
  const int lane = arch::lane_index(), g = lane / 4, t = lane % 4;
  const auto words = [](const unsigned char* at) { return *reinterpret_cast<const arch::Words4*>(at); };
  arch::Words4 upper[2], lower[2];
  uint16_t scales[2][2];
  HOPWELL_UNROLL
  for (int half = 0; half < 2; ++half) {
    const unsigned char* piece = stage + g * 128 + (4 * (half ^ g % 2) + t) * 16;
    upper[half] = words(piece), lower[half] = words(piece + 1024);
    const auto* from = reinterpret_cast<const uint16_t*>(stage + LinearConfig::kCodeBytes + g * 16 + half * 8 + t * 2);
    scales[half][0] = from[0], scales[half][1] = from[64];
  }
  uint32_t weights[2][2][4];
  HOPWELL_UNROLL
  for (int i = 0; i < 8; ++i) {
    const int half = i / 4, word = i % 4;
    const Weights<T> of_upper(scales[half][0]), of_lower(scales[half][1]);
    uint32_t a[4], b[4];
    if (word < 2) {
      of_upper.template decode<false>(upper[half].w[word], a);
      of_lower.template decode<false>(lower[half].w[word], b);
    } else {
      of_upper.template decode<true>(upper[half].w[word], a);
      of_lower.template decode<true>(lower[half].w[word], b);
    }
    auto& products = weights[i % 2];
    HOPWELL_UNROLL
    for (int j = 0; j < 2; ++j) {
      products[j][0] = a[2 * j], products[j][1] = b[2 * j];
      products[j][2] = a[2 * j + 1], products[j][3] = b[2 * j + 1];
    }
    arch::wgmma_fence();
    HOPWELL_UNROLL
    for (int j = 0; j < 2; ++j)
      arch::wgmma_rs<kOptions>(d, products[j],
                               x + uint64_t((half * X::kHalfBytes + word * X::kWordBytes + j * X::kProductBytes) >> 4),
                               true);
    arch::wgmma_commit();
    if (i < 7)
      arch::wgmma_wait<1>();  // kept: the next word's weights go where the last one's were, which the emulator copied
  }
  arch::wgmma_wait<0>(d);
}

// A warp's tile: from its part-th stage on every p.parts-th.
template <int kColumns, class T>
HOPWELL_DEVICE void multiply(const WideParams<T>& p, const WidePlace& at, WideBarriers& barriers, WideRing& ring,
                             uint32_t x, int part, float (&d)[kColumns / 2]) {
  const uint64_t operand = arch::at_address(arch::wgmma_descriptor({arch::Swizzle::none, 128, 256}), x);
  HOPWELL_UNROLL
  for (int i = 0; i < WideConfig::kStages - 1; ++i) ring.load(p);
  HOPWELL_NO_UNROLL
  for (int stage = part; stage < at.stages; stage += p.parts) {
    const int slot = stage % WideConfig::kSlots;
    arch::cp_async_wait<WideConfig::kStages - 2>();
    arch::syncwarp();
    ring.load(p);
    arch::mbarrier_wait(barriers.full[slot], uint32_t(stage / WideConfig::kSlots) & 1);
    multiply_stage_wide<kColumns, T>(ring.oldest(), operand + uint64_t(slot * WideX<kColumns>::kStageBytes >> 4), d);
    if (arch::lane_index() == 0) arch::mbarrier_arrive(barriers.empty[slot]);
  }
}

// ---- sums and results ----------------------------------------------------------------------------------------------

// A result from its place among a tile's sums, [register][lane].
template <int kColumns, class T>
HOPWELL_DEVICE void store_result(const WideParams<T>& p, double factor, const WidePlace& at, int tile, int place,
                                 float sum) {
  const int j = place / 32, lane = place % 32;
  const int row = (at.first + tile) * LinearConfig::kRows + j / 2 % 2 * 8 + lane / 4;
  const int column = j / 4 * 8 + lane % 4 * 2 + j % 2;
  if (row < p.rows && column < p.columns) p.result.store(row, column, 0, factor, sum);
}

// Sums of the warps that share a tile meet in the CTA whose rank is the tile's number modulo the ranks.
template <int kColumns, class T>
HOPWELL_DEVICE void store_results(const WideParams<T>& p, const Factor& global, const WidePlace& at, float* sums,
                                  int tile, int part, bool has_tile, const float (&d)[kColumns / 2]) {
  constexpr int kSums = kWideSums<kColumns>;
  const int shares = p.ranks * p.parts;
  const double factor = global.get() * Weights<T>::kUnit;  // before all wait for each other
  float* const place = sums + (tile / p.ranks * shares + at.rank * p.parts + part) * kSums + arch::lane_index();
  if (p.ranks > 1) {
    arch::cluster_wait();  // all CTAs of the cluster have started
    if (has_tile) {
      const uint32_t to = arch::map_to_rank(arch::shared_address(place), uint32_t(tile % p.ranks));
      HOPWELL_UNROLL
      for (int j = 0; j < kColumns / 2; ++j)
        arch::store_cluster(to + uint32_t(128 * j), arch::bit_cast<uint32_t>(d[j]));
    }
    arch::cluster_sync();
  } else {
    if (has_tile) {
      HOPWELL_UNROLL
      for (int j = 0; j < kColumns / 2; ++j) place[32 * j] = d[j];
    }
    arch::syncthreads();
  }
  const int mine = (at.tiles - at.rank + p.ranks - 1) / p.ranks;
  for (int i = arch::thread_index(); i < mine * kSums; i += WideConfig::kThreads) {
    const float* share = sums + i / kSums * shares * kSums + i % kSums;
    float sum = 0;
    for (int j = 0; j < shares; ++j, share += kSums) sum += *share;
    store_result<kColumns>(p, factor, at, i / kSums * p.ranks + at.rank, i % kSums, sum);
  }
}

// ---- the kernel ----------------------------------------------------------------------------------------------------

// Shared memory: barriers, x, rings, sums of so many tiles.
template <int kColumns>
constexpr int wide_shared_bytes(int tiles, int ranks, int parts) {
  return int(sizeof(WideBarriers)) + WideConfig::kSlots * WideX<kColumns>::kStageBytes +
         WideConfig::kWarps * WideConfig::kRingBytes +
         (tiles + ranks - 1) / ranks * ranks * parts * kWideSums<kColumns> * int(sizeof(float));
}

template <int kColumns, class T>
__global__ void __launch_bounds__(WideConfig::kThreads, 1) wide_kernel(const __grid_constant__ WideParams<T> p) {
  unsigned char* const shared = &arch::dynamic_smem<unsigned char>();
  const arch::BlockIndex cta = arch::block_index_3d();
  const int warp = arch::warp_index(), number = cta.x / p.ranks, rank = cta.x % p.ranks, begin = rank * p.slice;
  const WidePlace at{.rank = rank,
                     .first = number * p.tiles_of_cta + (number < p.larger_ctas ? number : p.larger_ctas),
                     .tiles = p.tiles_of_cta + (number < p.larger_ctas ? 1 : 0),
                     .begin = begin,
                     .end = begin + p.slice < p.k ? begin + p.slice : p.k,
                     .stages = p.slice / LinearConfig::kStageK};
  WideBarriers& barriers = *reinterpret_cast<WideBarriers*>(shared);
  unsigned char* const x = shared + sizeof(WideBarriers);
  unsigned char* const rings = x + WideConfig::kSlots * WideX<kColumns>::kStageBytes;
  float* const sums = reinterpret_cast<float*>(rings + WideConfig::kWarps * WideConfig::kRingBytes);
  const int part = warp / 4 / p.groups, tile = warp / 4 % p.groups * 4 + warp % 4;
  const bool multiplies = part < p.parts && warp < WideConfig::kWarps, has_tile = multiplies && tile < at.tiles;

  if (p.ranks > 1) arch::cluster_arrive_relaxed();
  if (arch::thread_index() == 0) {
    for (int i = 0; i < WideConfig::kSlots; ++i) {
      arch::mbarrier_init(barriers.full[i], 1);
      arch::mbarrier_init(barriers.empty[i], uint32_t(4 * p.groups));
    }
  }
  tile::launch_dependents();
  WideRing ring(p, at, rings + warp * WideConfig::kRingBytes, at.first + tile, has_tile, part, p.parts);
  if (multiplies) ring.prefetch();  // more would hold up x
  arch::syncthreads();
  tile::wait_for_prior_kernels();
  const Factor global = p.factor.loaded();
  float d[kColumns / 2] = {};
  if (warp >= WideConfig::kWarps)
    produce<kColumns>(p, at, barriers, arch::shared_address(x), warp - WideConfig::kWarps);
  else if (multiplies)
    multiply<kColumns>(p, at, barriers, ring, arch::shared_address(x), part, d);
  store_results<kColumns>(p, global, at, sums, tile, part, has_tile, d);
}

}  // namespace
}  // namespace hopwell::ops::nvfp4
