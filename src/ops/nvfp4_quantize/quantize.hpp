// nvfp4_quantize on GPUs.
//
//     global = amax / 2688;  scale = e4m3(block's amax / (6 · global));  code = e2m1 nearest to x / (scale · global)
//
// Roles     a thread for each block of 16 numbers that share a scale
// Codes     encode.hpp: in floats where the global is given, by thresholds where it comes from 16-bit x, which makes
//           many ties
// Budget    32 or 64 bytes in, 9 out, ~14 instructions a number
// Bound     memory. Without a given global x is read twice, the second time from L2 as far as it holds it: amax_kernel
//           writes the largest |x| of each CTA's blocks to the workspace, and each CTA of quantize_kernel takes the
//           largest of those.
#pragma once

#include "ops/nvfp4_quantize/encode.hpp"
#include "ops/nvfp4_quantize/row_items.hpp"
#include "tile/gpu/dependency.hpp"
#include "tile/gpu/warp.hpp"

namespace hopwell::ops::nvfp4_quantize::HOPWELL_TARGET {

constexpr uint32_t kInfinityBits = 0x7f800000u;  // of a float

struct QuantizeConfig {
  static constexpr int kThreads = 256, kWarps = kThreads / 32;
  static constexpr int kMaxPartials = 1024;  // CTAs of amax_kernel
};

template <class T>
struct QuantizeParams {
  const T* x;
  uint8_t* codes;
  hopwell::nvfp4::Scales scales;
  float* global_scale;
  const float* given_pointer;  // the global, or null
  float given_value;           // the global if there is no pointer; 0: it comes from x
  uint32_t* amax;  // bits of the largest |x| that each CTA of amax_kernel found; null if the global is given
  int64_t x_stride, codes_stride;
  RowItems blocks, scale_blocks;  // the latter with those that pad scales
  int partials;                   // of amax
  bool x_aligned, codes_aligned;
};

struct QuantizeStorage {
  Thresholds16 thresholds[128];  // for each scale byte
  uint32_t max_of_warp[QuantizeConfig::kWarps];
};

// Over the CTA, in every thread.
HOPWELL_DEVICE uint32_t max_of_cta(QuantizeStorage& s, uint32_t bits) {
  bits = tile::max_of_warp(bits);
  if (arch::lane_index() == 0) s.max_of_warp[arch::thread_index() / 32] = bits;
  arch::syncthreads();
  bits = 0;
  HOPWELL_UNROLL
  for (int w = 0; w < QuantizeConfig::kWarps; ++w) bits = s.max_of_warp[w] > bits ? s.max_of_warp[w] : bits;
  return bits;
}

// The largest finite |x| of this CTA's blocks.
template <class T>
__global__ void __launch_bounds__(QuantizeConfig::kThreads) amax_kernel(const __grid_constant__ QuantizeParams<T> p) {
  auto& s = arch::dynamic_smem<QuantizeStorage>();
  tile::launch_dependents();
  tile::wait_for_prior_kernels();
  constexpr int kUnroll = 2;
  const int64_t threads = int64_t{arch::grid_size()} * QuantizeConfig::kThreads, count = p.blocks.count();
  uint32_t amax = 0;
  const auto accumulate = [&](uint32_t bits) { amax = bits < kInfinityBits && bits > amax ? bits : amax; };
  for (int64_t first = int64_t{arch::block_index()} * QuantizeConfig::kThreads + arch::thread_index(); first < count;
       first += kUnroll * threads) {
    Block<T> x[kUnroll];
    HOPWELL_UNROLL
    for (int j = 0; j < kUnroll; ++j) {
      const int64_t i = first + j * threads < count ? first + j * threads : first;
      const int64_t row = p.blocks.row(i), block = i - row * p.blocks.per_row;
      x[j].load(p.x + row * p.x_stride + block * kCodesPerBlock, p.x_aligned);
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
  amax = max_of_cta(s, amax);
  if (arch::thread_index() == 0) p.amax[arch::block_index()] = amax;
}

// The global scale that holds, in every thread.
template <class T>
HOPWELL_DEVICE float global_of(const QuantizeParams<T>& p, QuantizeStorage& s) {
  if (p.given_pointer) return *p.given_pointer;
  if (p.given_value != 0) return p.given_value;
  uint32_t amax = 0;
  for (int i = arch::thread_index(); i < p.partials; i += QuantizeConfig::kThreads)
    amax = p.amax[i] > amax ? p.amax[i] : amax;
  amax = max_of_cta(s, amax);
  if (amax == 0) return 1;
  const float global = arch::bit_cast<float>(amax) / (hopwell::nvfp4::kCodeMax * hopwell::nvfp4::kScaleMax);
  return global == 0 ? 0x1p-149f : global;
}

HOPWELL_DEVICE void store_codes(uint8_t* to, bool aligned, const uint32_t (&words)[2]) {
  if (aligned) {
    *reinterpret_cast<arch::Words2*>(to) = {{words[0], words[1]}};
    return;
  }
  HOPWELL_UNROLL
  for (int i = 0; i < 8; ++i) to[i] = uint8_t(words[i / 4] >> 8 * (i % 4));
}

// Blocks beyond the matrix, of which a blocked layout has some: scale 0.
template <class T, bool kByThresholds>
__global__ void __launch_bounds__(QuantizeConfig::kThreads)
    quantize_kernel(const __grid_constant__ QuantizeParams<T> p) {
  auto& s = arch::dynamic_smem<QuantizeStorage>();
  tile::launch_dependents();
  tile::wait_for_prior_kernels();
  const float global = global_of(p, s);
  if (arch::block_index() == 0 && arch::thread_index() == 0) *p.global_scale = global;
  if constexpr (kByThresholds) {
    if (const int scale = arch::thread_index(); scale < 128)
      s.thresholds[scale] = thresholds_for<T>(tile::e4m3_to_float(uint32_t(scale)), global);
    arch::syncthreads();
  }
  const int64_t threads = int64_t{arch::grid_size()} * QuantizeConfig::kThreads, count = p.scale_blocks.count();
  for (int64_t i = int64_t{arch::block_index()} * QuantizeConfig::kThreads + arch::thread_index(); i < count;
       i += threads) {
    const int64_t row = p.scale_blocks.row(i), block = i - row * p.scale_blocks.per_row;
    uint8_t* scale_at = p.scales.data + p.scales.offset(row, block);
    if (row >= p.blocks.rows || block >= p.blocks.per_row) {
      *scale_at = 0;
      continue;
    }
    Block<T> x;
    x.load(p.x + row * p.x_stride + block * kCodesPerBlock, p.x_aligned);
    const uint32_t bits = x.amax_bits();
    const bool finite = bits < kInfinityBits;
    const auto amax = arch::bit_cast<float>(bits);
    const uint8_t scale =
        finite ? hopwell::nvfp4::encode_e4m3(amax / (hopwell::nvfp4::kCodeMax * global)) : hopwell::nvfp4::kScaleNan;
    *scale_at = scale;
    uint32_t words[2] = {0, 0};
    if (finite && scale != 0) {
      if constexpr (kByThresholds)
        encode_by_thresholds(x, s.thresholds[scale], words);
      else
        encode_block(x, amax, tile::e4m3_to_float(scale), global, words);
    }
    store_codes(p.codes + row * p.codes_stride + block * (kCodesPerBlock / 2), p.codes_aligned, words);
  }
}

}  // namespace hopwell::ops::nvfp4_quantize::HOPWELL_TARGET
