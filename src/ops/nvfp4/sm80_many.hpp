// nvfp4_linear for 2 to 16 columns of x at a time.
//
//     y[column, row] = factor · Σ_k code · scale · x[column, k] + bias[row]
//
// Tile      16 rows × 8 or 16 columns × a slab of K, so long that x of it has room in shared memory; a CTA takes
//           neighbouring tiles, two at a time. With more than one slab, sums go to the workspace, and a second kernel adds
//           them up in order.
// Roles     16 warps: warp (group, part) has tile `group` of the two and an eighth of the slab. Both groups bring half of
//           the columns of their part.
// Timeline  copies  ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓   a ring of each warp's own, kStages − 1 ahead, across tiles
//           warp    x │ barrier │ stage 0 │ … │ sums │ barrier │ stage 0 …
// Scales    two weights at a time are multiplied by theirs, in fp16: code · 2^-14 · scale is a multiple of 2^-24, exact
// Range     as in sm80_linear.hpp, a power of two for each column and part; a pass too many anywhere is one for all
// Budget    shared: rings 110,592, x at most 65,536, sums 16,384 or 32,768
#pragma once

#include "arch/sm80/matrix.hpp"
#include "ops/nvfp4/sm80_ring.hpp"

namespace hopwell::ops::nvfp4 {
namespace {

struct ManyConfig {
  static constexpr int kStages = 3, kGroups = 2, kParts = 8, kWarps = kGroups * kParts, kXBytes = 65536;
};

template <class T>
struct ManyParams {
  Matrix weight;
  const T* x;
  int64_t x_stride;
  Result<T> result;
  float* sums;  // [slabs, columns, rows], or null if there is one slab
  Factor factor;
  int rows, k, columns;
  int slab, slice;                // k of a CTA, of a part
  int tiles_of_cta, larger_ctas;  // the first larger_ctas have a tile more
  bool whole_scales;
};

template <int kColumns>
struct ManyStorage {
  alignas(128) unsigned char ring[ManyConfig::kWarps][ManyConfig::kStages * LinearConfig::kStageBytes];
  alignas(128) unsigned char x[ManyConfig::kXBytes];
  float sums[2][ManyConfig::kGroups][ManyConfig::kParts][kColumns][LinearConfig::kRows];
  float units[ManyConfig::kParts][kColumns];
  int partial[ManyConfig::kWarps];
};
static_assert(sizeof(ManyStorage<16>) <= 227 * 1024);

// Both numbers of a pair twice.
struct TwoScales {
  uint32_t of_block[2];
};
HOPWELL_DEVICE TwoScales scales_twice(uint16_t bytes) {
  const uint32_t pair = scales_fp16(bytes);
  return {{(pair & 0xffff) | pair << 16, pair >> 16 | (pair & 0xffff0000u)}};
}

// d += 16 rows of a stage times x, in mma's order of accumulators.
template <int kColumns>
HOPWELL_DEVICE void multiply_stage_many(const unsigned char* stage, const unsigned char* x,
                                        float (&d)[kColumns / 8][4]) {
  const int lane = arch::lane_index(), g = lane / 4, t = lane % 4;
  const auto words = [](const unsigned char* at) { return *reinterpret_cast<const arch::Words4*>(at); };
  HOPWELL_UNROLL
  for (int half = 0; half < 2; ++half) {
    const unsigned char* piece = stage + g * 128 + (4 * (half ^ g % 2) + t) * 16;
    const arch::Words4 upper = words(piece), lower = words(piece + 1024);
    const auto* scales =
        reinterpret_cast<const uint16_t*>(stage + LinearConfig::kCodeBytes + g * 16 + half * 8 + t * 2);
    const TwoScales upper_scales = scales_twice(scales[0]), lower_scales = scales_twice(scales[64]);
    HOPWELL_UNROLL
    for (int word = 0; word < 4; ++word) {
      uint32_t a[4], b[4];
      decode_word(upper.w[word], a);
      decode_word(lower.w[word], b);
      HOPWELL_UNROLL
      for (int i = 0; i < 4; ++i) {
        a[i] = arch::multiply_fp16(a[i], upper_scales.of_block[word / 2]);
        b[i] = arch::multiply_fp16(b[i], lower_scales.of_block[word / 2]);
      }
      const uint32_t a0[4] = {a[0], b[0], a[1], b[1]}, a1[4] = {a[2], b[2], a[3], b[3]};
      HOPWELL_UNROLL
      for (int n = 0; n < kColumns / 8; ++n) {
        const arch::Words4 values = words(x + ((half * 4 + word) * kColumns + g + 8 * n) * 64 + t * 16);
        const uint32_t x0[2] = {values.w[0], values.w[1]}, x1[2] = {values.w[2], values.w[3]};
        arch::mma_m16n8k16_fp16(d[n], a0, x0);
        arch::mma_m16n8k16_fp16(d[n], a1, x1);
      }
    }
  }
}

// What a warp knows of its place.
struct ManyPlace {
  int warp, group, part, first_column, columns;  // columns that exist, from the first of this CTA
  Slice slice;
};

// Brings this warp's columns into shared memory, zeros for those that do not exist, and does `meanwhile` while the first
// are on their way.
template <int kColumns, class T, class Meanwhile>
HOPWELL_DEVICE void fetch_columns(const ManyParams<T>& p, const ManyPlace& at, uint32_t x, Meanwhile meanwhile) {
  constexpr int kTogether = 4;
  for (int stage = 0; stage < at.slice.stages; ++stage) {
    HOPWELL_NO_UNROLL
    for (int first = at.group; first < kColumns; first += ManyConfig::kGroups * kTogether) {
      const int number = stage * kItemsOfStage + arch::lane_index();
      arch::Words4 v[kTogether] = {};
      HOPWELL_UNROLL
      for (int i = 0; i < kTogether; ++i) {
        const int column = first + ManyConfig::kGroups * i;
        if (column < at.columns)
          v[i] = FloatColumn<T, kColumns>{p.x + (at.first_column + column) * p.x_stride}.item(at.slice, number);
      }
      if (stage == 0 && first == at.group) meanwhile();
      HOPWELL_UNROLL
      for (int i = 0; i < kTogether; ++i)
        arch::store_shared_v4(x + item_place<kColumns>(number) + uint32_t(64 * (first + ManyConfig::kGroups * i)),
                              as_pairs(v[i]));
    }
  }
  if (at.slice.stages == 0) meanwhile();
}

// Brings them into shape, all passes' ceilings in `ceilings`. Whether some numbers were left, in the whole CTA, is known
// after the barrier.
template <int kColumns, class T>
HOPWELL_DEVICE bool settle_columns(ManyStorage<kColumns>& s, const ManyPlace& at, uint32_t x,
                                   uint32_t (&ceilings)[kColumns / ManyConfig::kGroups]) {
  bool partial = false;
  HOPWELL_UNROLL
  for (int i = 0; i < kColumns / ManyConfig::kGroups; ++i) {
    const int column = at.group + ManyConfig::kGroups * i;
    const Pass pass = FloatColumn<T, kColumns>{}.settle(at.slice, x + uint32_t(64 * column), 0, ceilings[i]);
    if (arch::lane_index() == 0) s.units[at.part][column] = pass.unit;
    partial = partial || pass.partial;
  }
  if (arch::lane_index() == 0) s.partial[at.warp] = partial;
  arch::syncthreads();
  partial = false;
  HOPWELL_UNROLL
  for (int flag : s.partial) partial = partial || flag;
  return partial;
}

// Results of two tiles, or their sums over this slab.
template <int kColumns, class T>
HOPWELL_DEVICE void store_tiles(const ManyParams<T>& p, const ManyStorage<kColumns>& s, const ManyPlace& at, int parity,
                                int tile, int end, int slab) {
  constexpr int kRows = LinearConfig::kRows, kOfTile = kRows * kColumns;
  for (int i = arch::thread_index(); i < ManyConfig::kGroups * kOfTile; i += 32 * ManyConfig::kWarps) {
    const int group = i / kOfTile, column = i % kOfTile / kRows, row = (tile + group) * kRows + i % kRows;
    if (tile + group >= end || row >= p.rows || column >= at.columns) continue;
    float sum = 0;
    HOPWELL_UNROLL
    for (int part = 0; part < ManyConfig::kParts; ++part) sum += s.sums[parity][group][part][column][i % kRows];
    const int64_t of_all = at.first_column + column;
    if (p.sums)
      p.sums[(int64_t{slab} * p.columns + of_all) * p.rows + row] = sum;
    else
      p.result.store(row, of_all, 0, p.factor.get(), sum);
  }
}

template <int kColumns, class T>
__global__ void __launch_bounds__(32 * ManyConfig::kWarps, 1) many_kernel(const __grid_constant__ ManyParams<T> p) {
  auto& s = arch::dynamic_smem<ManyStorage<kColumns>>();
  const arch::BlockIndex cta = arch::block_index_3d();
  const int warp = arch::warp_index(), part = warp % ManyConfig::kParts;
  const int slab_begin = cta.y * p.slab, slab_end = slab_begin + p.slab < p.k ? slab_begin + p.slab : p.k;
  const ManyPlace at{warp,
                     warp / ManyConfig::kParts,
                     part,
                     cta.z * kColumns,
                     p.columns - cta.z * kColumns,
                     slice_of(slab_begin + part * p.slice, p.slice, slab_end)};
  const int slice_bytes = (p.slice + LinearConfig::kStageK - 1) / LinearConfig::kStageK * kItemsOfStage * 16 * kColumns;
  const unsigned char* const x = s.x + part * slice_bytes;
  const uint32_t x_address = arch::shared_address(x);
  const int begin = cta.x * p.tiles_of_cta + (cta.x < p.larger_ctas ? cta.x : p.larger_ctas);
  const int end = begin + p.tiles_of_cta + (cta.x < p.larger_ctas ? 1 : 0);
  Ring<ManyConfig::kStages> ring(p, at.slice, s.ring[warp], 0, ManyConfig::kGroups);
  ring.aim(p, begin + at.group, end);
  let_next_start();
  ring.prefetch();
  wait_for_previous();

  constexpr int kAhead = ManyConfig::kStages - 1, kMine = kColumns / ManyConfig::kGroups;
  uint32_t ceilings[kMine];
  const auto everything = [&] {
    HOPWELL_UNROLL
    for (uint32_t& ceiling : ceilings) ceiling = kEverything;
  };
  everything();
  fetch_columns<kColumns>(p, at, x_address, [&] {
    HOPWELL_NO_UNROLL
    for (int i = 0; i < kAhead; ++i) ring.load(p);
  });
  const bool in_passes = settle_columns<kColumns, T>(s, at, x_address, ceilings);
  if (in_passes) ring.stop();

  const int lane = arch::lane_index();
  int parity = 0;
  for (int tile = begin; tile < end; tile += ManyConfig::kGroups, parity ^= 1) {
    float sums[kColumns / 8][4] = {};
    everything();
    bool left = false;
    do {
      if (in_passes) {  // brings x and the tile in anew
        arch::syncthreads();
        fetch_columns<kColumns>(p, at, x_address, [] {});
        left = settle_columns<kColumns, T>(s, at, x_address, ceilings);
        ring.aim(p, tile + at.group, tile + at.group < end ? tile + at.group + 1 : tile);
        HOPWELL_NO_UNROLL
        for (int i = 0; i < kAhead; ++i) ring.load(p);
      }
      float d[kColumns / 8][4] = {};
      for (int stage = 0; tile + at.group < end && stage < at.slice.stages; ++stage) {
        arch::cp_async_wait<ManyConfig::kStages - 2>();
        arch::syncwarp();
        ring.load(p);
        multiply_stage_many<kColumns>(ring.take(), x + stage * kItemsOfStage * 16 * kColumns, d);
      }
      HOPWELL_UNROLL
      for (int n = 0; n < kColumns / 8; ++n) {
        HOPWELL_UNROLL
        for (int i = 0; i < 4; ++i)
          sums[n][i] += d[n][i] * (s.units[part][8 * n + lane % 4 * 2 + i % 2] * LinearConfig::kCodeUnit);
      }
    } while (left);
    HOPWELL_UNROLL
    for (int n = 0; n < kColumns / 8; ++n) {
      HOPWELL_UNROLL
      for (int i = 0; i < 4; ++i)
        s.sums[parity][at.group][part][8 * n + lane % 4 * 2 + i % 2][lane / 4 + i / 2 * 8] = sums[n][i];
    }
    arch::syncthreads();
    store_tiles(p, s, at, parity, tile, end, cta.y);
  }
}

// Adds up the slabs' sums.
template <class T>
__global__ void __launch_bounds__(256) combine_kernel(const __grid_constant__ ManyParams<T> p, int slabs) {
  let_next_start();
  wait_for_previous();
  const int64_t at = int64_t{arch::block_index()} * 256 + arch::thread_index(), count = int64_t{p.rows} * p.columns;
  if (at >= count) return;
  float sum = 0;
  for (int slab = 0; slab < slabs; ++slab) sum += p.sums[slab * count + at];
  p.result.store(at % p.rows, at / p.rows, 0, p.factor.get(), sum);
}

}  // namespace
}  // namespace hopwell::ops::nvfp4
