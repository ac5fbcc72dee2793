// nvfp4_quantize on GPUs.
//
//     global = amax / 2688;  scale = e4m3(block's amax / (6 · global));  code = e2m1 nearest to x / (scale · global)
//
// Tile      a block of 16 numbers for a thread; two blocks if x has 16 bits and enough blocks
// Roles     all threads are alike
// Codes     encode.hpp: in fp32 if the global scale is given; by thresholds if it is computed from 16-bit x, because
//           then ties are frequent; bf16 by saturating sums
// Timeline  a global scale from x: nvfp4_quantize_amax reads x and writes the largest |x| of each CTA's blocks to the
//           workspace. Each CTA of nvfp4_quantize_blocks reads these maxima, then quantizes from the end of x on, which
//           L2 still holds. x that fits on the chip is read once: one_pass.hpp
// Budget    a block: 32 or 64 bytes in, 9 bytes out; ~14 instructions a number, by sums ~12, most of them at full rate
// Bound     memory
#pragma once

#include "ops/nvfp4_quantize/encode.hpp"
#include "ops/nvfp4_quantize/plan.hpp"
#include "tile/gpu/dependency.hpp"
#include "tile/gpu/warp.hpp"

namespace hopwell::ops::nvfp4_quantize::HOPWELL_TARGET {

constexpr uint32_t kInfinityBits = 0x7f800000u;  // of a float

template <class T>
struct QuantizeParams {
  const T* x;
  uint8_t* codes;
  hopwell::nvfp4::Scales scales;
  float* global_scale;
  const float* global_pointer;  // the global, or null
  float global_value;           // the global if there is no pointer; 0: it comes from x
  uint32_t* amax;  // bits of the largest |x| that each CTA of nvfp4_quantize_amax found; null if the global is given
  int64_t x_stride, codes_stride;
  RowItems blocks, items;  // blocks of x; items of one or two blocks, including padding of the scales
  int partials;            // elements of amax
  bool x_aligned, codes_aligned;
};

union QuantizeTable {  // an entry for each scale byte
  Thresholds16 thresholds[128];
  Steps steps[128];
};

struct QuantizeStorage {
  QuantizeTable table;
  uint32_t max_of_warp[QuantizeConfig::kWarps];
};

// Maximum over the CTA, in every thread.
template <int kWarps>
HOPWELL_DEVICE uint32_t max_of_cta(uint32_t (&of_warp)[kWarps], uint32_t bits) {
  bits = tile::max_of_warp(bits);
  if (arch::lane_index() == 0) of_warp[arch::thread_index() / 32] = bits;
  arch::syncthreads();
  bits = 0;
  HOPWELL_UNROLL
  for (int w = 0; w < kWarps; ++w) bits = of_warp[w] > bits ? of_warp[w] : bits;
  return bits;
}

// Writes the largest finite |x| of this CTA's blocks. Index, here and below, is uint32_t if RowItems::are_few(), else
// int64_t.
template <class T, class Index>
__global__ void __launch_bounds__(QuantizeConfig::kThreads)
    nvfp4_quantize_amax(const __grid_constant__ QuantizeParams<T> p) {
  auto& s = arch::dynamic_smem<QuantizeStorage>();
  tile::launch_dependents();
  tile::wait_for_prior_kernels();
  constexpr int kUnroll = 2;
  const auto threads = Index(arch::grid_size() * QuantizeConfig::kThreads), count = Index(p.blocks.count());
  uint32_t amax = 0;
  const auto accumulate = [&](uint32_t bits) { amax = bits < kInfinityBits && bits > amax ? bits : amax; };
  for (auto first = Index(arch::block_index()) * QuantizeConfig::kThreads + Index(arch::thread_index()); first < count;
       first += kUnroll * threads) {
    Block<T> x[kUnroll];
    HOPWELL_UNROLL
    for (int j = 0; j < kUnroll; ++j) {
      const Index i = first + j * threads < count ? first + j * threads : first;
      const Index row = p.blocks.row(i), block = i - row * Index(p.blocks.per_row);
      x[j].load(p.x + row * p.x_stride + int64_t{block} * kCodesPerBlock, p.x_aligned);
    }
    HOPWELL_UNROLL
    for (int j = 0; j < kUnroll; ++j) {
      const uint32_t bits = x[j].amax_bits();
      accumulate(bits);
      if (bits < kInfinityBits) continue;
      HOPWELL_UNROLL
      for (int i = 0; i < kCodesPerBlock; ++i) accumulate(magnitude_bits(x[j].get(i)));
    }
  }
  amax = max_of_cta(s.max_of_warp, amax);
  if (arch::thread_index() == 0) p.amax[arch::block_index()] = amax;
}

// Global scale of an x whose largest |x| has these bits.
HOPWELL_DEVICE float global_from(uint32_t amax_bits) {
  if (amax_bits == 0) return 1;
  const float global = arch::bit_cast<float>(amax_bits) / (hopwell::nvfp4::kCodeMax * hopwell::nvfp4::kScaleMax);
  return global == 0 ? 0x1p-149f : global;
}

// The global scale, given or computed from x, in every thread.
template <class T>
HOPWELL_DEVICE float global_of(const QuantizeParams<T>& p, QuantizeStorage& s) {
  if (p.global_pointer) return *p.global_pointer;
  if (p.global_value != 0) return p.global_value;
  uint32_t amax = 0;
  for (int i = arch::thread_index(); i < p.partials; i += QuantizeConfig::kThreads)
    amax = p.amax[i] > amax ? p.amax[i] : amax;
  return global_from(max_of_cta(s.max_of_warp, amax));
}

// amax / divisor for a usual global scale that comes from x: nothing overflows, and quotients that underflow are far
// below the smallest scale. Two fma corrections give the quotient of a division: after the first it is a float next to
// the exact quotient, after the second the nearest float. `reciprocal`: 1 / divisor. An infinite amax gives NaN.
HOPWELL_DEVICE float usual_quotient(float amax, float divisor, float reciprocal) {
  float quotient = amax * reciprocal;
  HOPWELL_UNROLL
  for (int i = 0; i < 2; ++i) quotient = std::fma(std::fma(-quotient, divisor, amax), reciprocal, quotient);
  return quotient;
}

// Scale of a block, amax / divisor. `reciprocal`: for usual_quotient(), or 0.
HOPWELL_DEVICE uint8_t scale_for(float amax, float divisor, float reciprocal) {
  if (reciprocal == 0) return hopwell::nvfp4::encode_e4m3(amax / divisor);
  const float quotient = usual_quotient(amax, divisor, reciprocal);
#if HOPWELL_HAS_SM90
  return uint8_t(arch::pack_e4m3(quotient, 0));
#else
  return hopwell::nvfp4::encode_e4m3(quotient);
#endif
}

// Fills the table for all scales.
template <class T>
HOPWELL_DEVICE void fill_table(QuantizeTable& table, float global) {
  if (const int scale = arch::thread_index(); scale < 128) {
    const Thresholds16 thresholds = thresholds_for<T>(tile::e4m3_to_float(uint32_t(scale)), global);
    if (std::is_same_v<T, bf16> && is_usual(global))
      table.steps[scale] = steps_of(thresholds);
    else
      table.thresholds[scale] = thresholds;
  }
  arch::syncthreads();
}

HOPWELL_DEVICE void store_codes(uint8_t* to, bool aligned, const uint32_t (&words)[2]) {
  if (aligned) {
    arch::store_vector(to, arch::Words2{{words[0], words[1]}});
    return;
  }
  HOPWELL_UNROLL
  for (int i = 0; i < 8; ++i) to[i] = uint8_t(words[i / 4] >> 8 * (i % 4));
}

// Stores the scales of kBlocks blocks, a byte each.
template <int kBlocks>
HOPWELL_DEVICE void store_scales(uint8_t* to, uint32_t scales) {
  if constexpr (kBlocks == 2)
    *reinterpret_cast<uint16_t*>(to) = uint16_t(scales);
  else
    *to = uint8_t(scales);
}

template <class T, bool kByThresholds>
HOPWELL_DEVICE void encode(const QuantizeTable& table, bool usual, const Block<T>& x, float amax, uint8_t scale,
                           float global, uint32_t (&words)[2]) {
  if constexpr (!kByThresholds)
    return encode_block(x, amax, tile::e4m3_to_float(scale), global, words);
  else if constexpr (std::is_same_v<T, bf16>)
    if (usual) return encode_by_steps(x, table.steps[scale], words);
  if constexpr (kByThresholds) encode_by_thresholds(x, table.thresholds[scale], words);
}

struct GlobalScale {
  float value, divisor, reciprocal;  // 6 · value; 1 / divisor if the global scale is usual and comes from x, or 0
};

template <bool kByThresholds>
HOPWELL_DEVICE GlobalScale global_scale_of(float global) {
  const float divisor = hopwell::nvfp4::kCodeMax * global;
  return {global, divisor, kByThresholds && is_usual(global) ? 1 / divisor : 0};
}

// Writes the scales and codes of consecutive blocks. `bits`: fp32 bits of the blocks' largest magnitudes.
template <class T, bool kByThresholds, int kBlocks>
HOPWELL_DEVICE void quantize_blocks(const QuantizeTable& table, const GlobalScale& global, const Block<T> (&x)[kBlocks],
                                    const uint32_t (&bits)[kBlocks], uint8_t* scales_at, uint8_t* codes_at,
                                    bool codes_aligned) {
  uint32_t scales = 0, words[kBlocks][2] = {};
  HOPWELL_UNROLL
  for (int j = 0; j < kBlocks; ++j) {
    const uint32_t scale = bits[j] < kInfinityBits
                               ? scale_for(arch::bit_cast<float>(bits[j]), global.divisor, global.reciprocal)
                               : hopwell::nvfp4::kScaleNan;
    scales |= scale << 8 * j;
  }
  store_scales<kBlocks>(scales_at, scales);
  HOPWELL_UNROLL
  for (int j = 0; j < kBlocks; ++j) {
    const auto scale = uint8_t(scales >> 8 * j);
    if (bits[j] < kInfinityBits && scale != 0)
      encode<T, kByThresholds>(table, global.reciprocal != 0, x[j], arch::bit_cast<float>(bits[j]), scale, global.value,
                               words[j]);
  }
  if constexpr (kBlocks == 2)
    arch::store_vector(codes_at, arch::Words4{{words[0][0], words[0][1], words[1][0], words[1][1]}});
  else
    store_codes(codes_at, codes_aligned, words[0]);
}

// Quantizes items of kBlocks consecutive blocks. Padding of a blocked layout gets scales of 0. The last items come
// first, because L2 still holds them after nvfp4_quantize_amax.
template <class T, bool kByThresholds, int kBlocks, class Index>
__global__ void __launch_bounds__(QuantizeConfig::kThreads)
    nvfp4_quantize_blocks(const __grid_constant__ QuantizeParams<T> p) {
  auto& s = arch::dynamic_smem<QuantizeStorage>();
  tile::launch_dependents();
  tile::wait_for_prior_kernels();
  const float global = global_of(p, s);
  if (arch::block_index() == 0 && arch::thread_index() == 0) *p.global_scale = global;
  const GlobalScale scale = global_scale_of<kByThresholds>(global);
  if constexpr (kByThresholds) fill_table<T>(s.table, global);
  const auto threads = Index(arch::grid_size() * QuantizeConfig::kThreads), count = Index(p.items.count());
  for (auto i = Index(arch::block_index()) * QuantizeConfig::kThreads + Index(arch::thread_index()); i < count;
       i += threads) {
    const Index item = count - 1 - i, row = p.items.row(item),
                block = (item - row * Index(p.items.per_row)) * Index(kBlocks);
    uint8_t* scales_at = p.scales.data + p.scales.offset(row, block);
    if (row >= p.blocks.rows || block >= p.blocks.per_row) {
      store_scales<kBlocks>(scales_at, 0);
      continue;
    }
    const T* from = p.x + row * p.x_stride + int64_t{block} * kCodesPerBlock;
    Block<T> x[kBlocks];
    HOPWELL_UNROLL
    for (int j = 0; j < kBlocks; ++j) x[j].load(from + j * kCodesPerBlock, kBlocks > 1 || p.x_aligned);
    uint32_t bits[kBlocks];
    HOPWELL_UNROLL
    for (int j = 0; j < kBlocks; ++j) bits[j] = x[j].amax_bits();
    quantize_blocks<T, kByThresholds>(s.table, scale, x, bits, scales_at,
                                      p.codes + row * p.codes_stride + int64_t{block} * (kCodesPerBlock / 2),
                                      p.codes_aligned);
  }
}

}  // namespace hopwell::ops::nvfp4_quantize::HOPWELL_TARGET
