// nvfp4_linear and nvfp4_gemv at the speed of memory, for one column of x.
//
//     y[row] = factor · Σ_k code · scale · x[k] + bias[row]
//
// Tile      16 rows × all of K. A CTA has consecutive tiles, one after the other
// Roles     all warps are alike. Each has a slice of K, the same in every tile. It keeps the x of its slice in shared
//           memory as fp16, in the order of decoded codes, because a sum over k may have any order. If K is not
//           divisible, the first warps have one stage more, because consecutive warps are on different schedulers
// Timeline  copies  ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓   a ring a warp, kStages − 1 stages ahead, across tiles
//           warp    x │ stage 0 │ stage 1 │ … │ partial │ stage 0 …      after each round: CTA barrier, results
// Scales    Column 2 t of B holds x for the k of lanes (g, t) and zeros elsewhere. Odd columns are zero. So lane (g, t)
//           finds the sums over its own blocks of rows g and g + 8 in its own accumulators. It multiplies these sums by
//           the scales in fp32, so no weight is multiplied by a scale
// Range     fp16 x, and NVFP4 x as fp16, are exact. bf16 x is multiplied by a power of two, so that the largest element
//           of a slice lies just below 2^15. Elements 2^32 times smaller would lose digits. Another pass over the tile
//           multiplies them, with a power of its own
// Budget    memory delivers 32 words of 8 codes to a scheduler every ~31 cycles. Decoding them takes 12 instructions, 9
//           at half rate; mma, scales, copies and loop take ~6 more
//           shared: 16 warps × 4 stages × 2,304 B = 147,456, x 2 K, sums 64 B a warp and tile
//           Blackwell decodes in 8 instructions, at half rate: a stage takes ~200 issue slots, and memory 346 cycles
//           for it
// Bound     the decoder's instructions, plus ~3 µs for launch, x, first copies and last sums. Blackwell: memory, so
//           fewer CTAs with the same number of tiles finish sooner than a CTA for every multiprocessor
#pragma once

#include "arch/sm80/async_copy.hpp"
#include "arch/sm80/matrix.hpp"
#include "ops/nvfp4/kernels/one_column_x.hpp"
#include "ops/nvfp4/kernels/weight_ring.hpp"

namespace hopwell::ops::nvfp4::HOPWELL_TARGET {

template <class X, class T>
struct OneColumnParams {
  Fp4Matrix weight;
  X x;
  Result<T> result;
  Global factor;
  int rows, k;
  int warps;                       // of a CTA
  int slice;                       // k of a warp, a multiple of 256, at most
  int larger_warps;                // the warps after the first larger_warps have a stage less
  int tiles_per_cta, larger_ctas;  // the first larger_ctas have a tile more
  int round_tiles;                 // tiles between two barriers
  bool whole_scales;               // one 8-byte copy loads the scales of 8 blocks
};

using OneColumnRing = WeightRing<OneColumnConfig::kStages>;

// ---- products ------------------------------------------------------------------------------------------------------

// Adds the products of rows g and g + 8 with x to sums, over this lane's blocks of a stage: 32 k from 32 t on, and 32 k
// from 128 + 32 t on.
template <class Decoder>
HOPWELL_DEVICE void multiply_stage(const unsigned char* stage, const unsigned char* x, float (&sums)[2]) {
  const int g = tile::fragment_row(), t = tile::quad_lane();
  arch::Words4 upper[2], lower[2];
  tile::FloatPair upper_scales[2], lower_scales[2];
  HOPWELL_UNROLL
  for (int half = 0; half < 2; ++half) {
    const StageFragment fragment = load_fragment(stage, half);
    upper[half] = fragment.upper, lower[half] = fragment.lower;
    upper_scales[half] = tile::e4m3x2_to_float(fragment.upper_scales);
    lower_scales[half] = tile::e4m3x2_to_float(fragment.lower_scales);
  }
  HOPWELL_UNROLL
  for (int half = 0; half < 2; ++half) {
    float d[2][2][4] = {};  // [block][chain]: even and odd products have separate sums, for shorter chains
    HOPWELL_UNROLL
    for (int i = 0; i < 2; ++i) {
      HOPWELL_UNROLL
      for (int block = 0; block < 2; ++block) {
        const int word = 2 * block + i;
        uint32_t a[4], b[4];
        Decoder::decode(upper[half].w[word], a);
        Decoder::decode(lower[half].w[word], b);
        arch::Words4 values{{0, 0, 0, 0}};
        if (g == 2 * t) values = load_words(x + ((half * 4 + word) * 4 + t) * 16);
        const uint32_t a0[4] = {a[0], b[0], a[1], b[1]}, a1[4] = {a[2], b[2], a[3], b[3]};
        const uint32_t x0[2] = {values.w[0], values.w[1]}, x1[2] = {values.w[2], values.w[3]};
        arch::mma_m16n8k16_fp16(d[block][0], a0, x0);
        arch::mma_m16n8k16_fp16(d[block][1], a1, x1);
      }
    }
    HOPWELL_UNROLL
    for (int chain = 0; chain < 2; ++chain) {
      sums[0] += upper_scales[half].low * d[0][chain][0];
      sums[0] += upper_scales[half].high * d[1][chain][0];
      sums[1] += lower_scales[half].low * d[0][chain][2];
      sums[1] += lower_scales[half].high * d[1][chain][2];
    }
  }
}

// Adds the products of rows g and g + 8 of a tile with x to sums, over this lane's blocks of the slice.
template <class Params>
HOPWELL_DEVICE void multiply_tile(const Params& p, OneColumnRing& ring, const Slice& slice, const unsigned char* x,
                                  float unit, float (&sums)[2]) {
  using Decoder = typename decltype(p.x)::Decoder;
  float scaled[2] = {};
  for (int stage = 0; stage < slice.stages; ++stage) {
    arch::cp_async_wait<OneColumnConfig::kStages - 2>();
    arch::syncwarp();
    ring.copy_next(p);
    multiply_stage<Decoder>(ring.oldest(), x + stage * kItemsPerStage * 16, scaled);
  }
  HOPWELL_UNROLL
  for (int i = 0; i < 2; ++i) sums[i] += scaled[i] * (unit * Decoder::kUnit);
}

// Starts a pass over the elements of x that were too small for the previous pass: loads x, and the tile again.
template <class Params>
HOPWELL_DEVICE Pass next_pass(const Params& p, OneColumnRing& ring, const Slice& slice, uint32_t x, int tile, int batch,
                              uint32_t& ceiling) {
  arch::syncwarp();  // all lanes have read x of the previous pass
  load_items(p.x, slice, x, batch, [] {});
  const Pass pass = p.x.scale(slice, x, ceiling);
  ring.start(p, slice, tile, 0, slice.stages);
  HOPWELL_NO_UNROLL
  for (int i = 0; i < OneColumnConfig::kStages - 1; ++i) ring.copy_next(p);
  return pass;
}

// ---- sums ----------------------------------------------------------------------------------------------------------

// Stores this warp's sums of a tile in sums[16 rows].
HOPWELL_DEVICE void store_sums(float* sums, const float (&of_lane)[2]) {
  HOPWELL_UNROLL
  for (int i = 0; i < 2; ++i) {
    const float sum = tile::sum_of_quad(of_lane[i]);
    if (tile::quad_lane() == 0) sums[tile::fragment_row() + 8 * i] = sum;
  }
}

// Stores the results of a round's tiles, four lanes a result: each lane adds a quarter of the warps' sums, then
// shuffles add the quarters. The order is always the same.
template <class Params>
HOPWELL_DEVICE void store_round(const Params& p, const Global& factor, const float* sums, int first_tile, int tiles,
                                int batch) {
  constexpr int kRows = StageConfig::kRows, kWarpsPerLane = OneColumnConfig::kMaxWarps / 4;
  for (int i = arch::thread_index(); i < 4 * tiles * kRows; i += 32 * p.warps) {
    const int row_of_round = i / 4, tile = row_of_round / kRows, quarter = i % 4;
    const float* from = sums + (tile * p.warps + quarter) * kRows + row_of_round % kRows;
    float of_warp[kWarpsPerLane], sum = 0;
    HOPWELL_UNROLL
    for (int j = 0; j < kWarpsPerLane; ++j) of_warp[j] = 4 * j < p.warps ? from[4 * j * kRows] : 0;
    HOPWELL_UNROLL
    for (float value : of_warp) sum += value;
    sum = tile::sum_of_quad(sum);
    const int row = first_tile * kRows + row_of_round;
    if (quarter == 0 && row < p.rows) p.result.store(row, 0, batch, factor.get(), sum);
  }
}

// ---- the kernel ----------------------------------------------------------------------------------------------------

// Shared memory: rings, x, sums [2 rounds][tile][warp][16 rows].
struct OneColumnStorage {
  unsigned char *ring, *x;  // of this warp
  float* sums;
};

template <class Params>
HOPWELL_DEVICE OneColumnStorage storage_of(const Params& p, int warp) {
  unsigned char* all = &arch::dynamic_smem<unsigned char>();
  unsigned char* x = all + p.warps * OneColumnConfig::kRingBytes;
  return {all + warp * OneColumnConfig::kRingBytes, x + warp * p.slice * 2,
          reinterpret_cast<float*>(x + p.warps * p.slice * 2)};
}

template <class X, class T>
__global__ void __launch_bounds__(32 * OneColumnConfig::kMaxWarps, 1)
    nvfp4_linear_gemv(const __grid_constant__ OneColumnParams<X, T> p) {
  const arch::BlockIndex cta = arch::block_index_3d();
  const int warp = arch::warp_index(), batch = cta.y;
  const int smaller = warp < p.larger_warps ? 0 : warp - p.larger_warps;  // smaller slices before this warp's
  const Slice slice = slice_of(warp * p.slice - smaller * StageConfig::kStageK,
                               warp < p.larger_warps ? p.slice : p.slice - StageConfig::kStageK, p.k);
  const OneColumnStorage s = storage_of(p, warp);
  const uint32_t x = arch::shared_address(s.x);
  const int begin = cta.x * p.tiles_per_cta + (cta.x < p.larger_ctas ? cta.x : p.larger_ctas);
  const int end = begin + p.tiles_per_cta + (cta.x < p.larger_ctas ? 1 : 0);
  OneColumnRing ring(s.ring, batch);
  ring.start(p, slice, begin, 0, (end - begin) * slice.stages);
  tile::launch_dependents();
  ring.prefetch_l2(p, slice.whole < OneColumnConfig::kStages ? slice.whole : OneColumnConfig::kStages - 1);
  p.x.prefetch_l2(slice, batch);
  tile::wait_for_prior_kernels();
  const Global factor = p.factor.loaded();

  load_items(p.x, slice, x, batch, [&] {
    HOPWELL_NO_UNROLL
    for (int i = 0; i < OneColumnConfig::kStages - 1; ++i) ring.copy_next(p);
  });
  uint32_t ceiling = kNoCeiling;
  const Pass first = p.x.scale(slice, x, ceiling);

  // Calls multiply(tile, sums) for each tile and stores the results of each round.
  const auto for_each_tile = [&](auto multiply) {
    int parity = 0;
    for (int at = begin; at < end; at += p.round_tiles, parity ^= 1) {
      const int tiles = end - at < p.round_tiles ? end - at : p.round_tiles;
      float* const round_sums = s.sums + parity * p.round_tiles * p.warps * StageConfig::kRows;
      for (int tile = at; tile < at + tiles; ++tile) {
        float sums[2] = {};
        multiply(tile, sums);
        store_sums(round_sums + ((tile - at) * p.warps + warp) * StageConfig::kRows, sums);
      }
      arch::syncthreads();
      store_round(p, factor, round_sums, at, tiles, batch);
    }
  };
  // Several passes need a loop of their own, because a common loop is slower.
  if (!first.partial)
    return for_each_tile([&](int, float (&sums)[2]) { multiply_tile(p, ring, slice, s.x, first.unit, sums); });
  ring.cancel();
  for_each_tile([&](int tile, float (&sums)[2]) {
    ceiling = kNoCeiling;
    for (bool partial = true; partial;) {
      const Pass pass = next_pass(p, ring, slice, x, tile, batch, ceiling);
      multiply_tile(p, ring, slice, s.x, pass.unit, sums);
      partial = pass.partial;
    }
  });
}

}  // namespace hopwell::ops::nvfp4::HOPWELL_TARGET
