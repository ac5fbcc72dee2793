// nvfp4_quantize and nvfp4_dequantize on GPUs: a thread for each block of 16 numbers that share a scale.
//
//     global = amax / 2688;  scale = e4m3(block's amax / (6 · global));  code = e2m1 nearest to x / (scale · global)
//
// Budget    dequantize: 8.5 bytes in, 32 or 64 out, ~45 instructions; quantize: 32 or 64 in, 9 out, ~190 instructions
// Bound     memory. Without a given global x is read twice, the second time from L2 as far as it holds it: the largest
//           |x| of each CTA's share goes to the workspace, and each CTA of the second kernel takes the largest of those.
#pragma once

#include "ops/nvfp4/sm80_codes.hpp"

namespace hopwell::ops::nvfp4 {
namespace {

struct QuantizeConfig {
  static constexpr int kThreads = 256, kWarps = kThreads / 32, kMaxShares = 1024;
};

// 16 numbers that lie together; aligned to 16 bytes, or anyhow.
template <class T>
HOPWELL_DEVICE void load_block(const T* from, bool aligned, float (&x)[kCodesOfBlock]) {
  constexpr int kElements = 16 / int(sizeof(T));
  if (aligned) {
    struct alignas(16) Piece {
      T elements[kElements];
    };
    Piece pieces[kCodesOfBlock / kElements];
    HOPWELL_UNROLL
    for (int i = 0; i < kCodesOfBlock / kElements; ++i)
      pieces[i] = arch::bit_cast<Piece>(arch::load_streaming(from + i * kElements));
    HOPWELL_UNROLL
    for (int i = 0; i < kCodesOfBlock; ++i) x[i] = to_fp32(pieces[i / kElements].elements[i % kElements]);
  } else {
    HOPWELL_UNROLL
    for (int i = 0; i < kCodesOfBlock; ++i) x[i] = to_fp32(from[i]);
  }
}

template <class T>
HOPWELL_DEVICE void store_block(T* to, bool aligned, const float (&x)[kCodesOfBlock]) {
  constexpr int kElements = 16 / int(sizeof(T));
  struct alignas(16) Piece {
    T elements[kElements];
  };
  HOPWELL_UNROLL
  for (int i = 0; i < kCodesOfBlock / kElements; ++i) {
    Piece piece;
    HOPWELL_UNROLL
    for (int j = 0; j < kElements; ++j) from_fp32(x[i * kElements + j], &piece.elements[j]);
    if (aligned) {
      *reinterpret_cast<Piece*>(to + i * kElements) = piece;
    } else {
      HOPWELL_UNROLL
      for (int j = 0; j < kElements; ++j) to[i * kElements + j] = piece.elements[j];
    }
  }
}

// ---- quantize ------------------------------------------------------------------------------------------------------

template <class T>
struct QuantizeParams {
  const T* x;
  uint8_t* codes;
  Scales scales;
  float* global_scale;
  const float* given_pointer;  // the global, or null
  float given_value;           // the global if there is no pointer; 0: it comes from x
  uint32_t* amax;              // bits of the largest |x| of each CTA's share; without a given global only
  int64_t x_stride, codes_stride, rows, blocks;  // blocks of a row
  int shares;
  bool x_aligned, codes_aligned;
};

HOPWELL_DEVICE uint32_t magnitude_bits(float x) { return arch::bit_cast<uint32_t>(x) & 0x7fffffffu; }

// The larger number as an integer, over a warp.
HOPWELL_DEVICE uint32_t warp_max(uint32_t bits) {
  for (int distance = 16; distance > 0; distance /= 2) {
    const uint32_t other = arch::shuffle_xor(bits, distance);
    bits = other > bits ? other : bits;
  }
  return bits;
}

struct QuantizeStorage {
  uint32_t max_of_warp[QuantizeConfig::kWarps];
};

// Over the CTA, in every thread.
HOPWELL_DEVICE uint32_t cta_max(QuantizeStorage& s, uint32_t bits) {
  bits = warp_max(bits);
  if (arch::lane_index() == 0) s.max_of_warp[arch::thread_index() / 32] = bits;
  arch::syncthreads();
  bits = 0;
  HOPWELL_UNROLL
  for (int w = 0; w < QuantizeConfig::kWarps; ++w) bits = s.max_of_warp[w] > bits ? s.max_of_warp[w] : bits;
  return bits;
}

// Largest finite |x| of this CTA's share.
template <class T>
__global__ void __launch_bounds__(QuantizeConfig::kThreads) amax_kernel(const __grid_constant__ QuantizeParams<T> p) {
  auto& s = arch::dynamic_smem<QuantizeStorage>();
  let_next_start();
  wait_for_previous();
  uint32_t most = 0;
  const int64_t threads = int64_t{arch::grid_size()} * QuantizeConfig::kThreads, count = p.rows * p.blocks;
  for (int64_t i = int64_t{arch::block_index()} * QuantizeConfig::kThreads + arch::thread_index(); i < count;
       i += threads) {
    float x[kCodesOfBlock];
    load_block(p.x + i / p.blocks * p.x_stride + i % p.blocks * kCodesOfBlock, p.x_aligned, x);
    HOPWELL_UNROLL
    for (int j = 0; j < kCodesOfBlock; ++j) {
      const uint32_t bits = magnitude_bits(x[j]);
      if (bits < 0x7f800000u && bits > most) most = bits;
    }
  }
  most = cta_max(s, most);
  if (arch::thread_index() == 0) p.amax[arch::block_index()] = most;
}

// The global scale that holds, in every thread.
template <class T>
HOPWELL_DEVICE float global_of(const QuantizeParams<T>& p, QuantizeStorage& s) {
  if (p.given_pointer) return *p.given_pointer;
  if (p.given_value != 0) return p.given_value;
  uint32_t most = 0;
  for (int i = arch::thread_index(); i < p.shares; i += QuantizeConfig::kThreads)
    most = p.amax[i] > most ? p.amax[i] : most;
  most = cta_max(s, most);
  if (most == 0) return 1;
  const float global = arch::bit_cast<float>(most) / (hopwell::nvfp4::kCodeMax * hopwell::nvfp4::kScaleMax);
  return global == 0 ? 0x1p-149f : global;
}

// A code's index grows by one above each of these: the largest float that is not above the middle of two neighbours,
// or, where the tie goes to the upper, even one, that is below it. `unit` times a middle is exact.
HOPWELL_DEVICE void thresholds(double unit, float (&t)[7]) {
  constexpr float kMiddles[7] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5};
  HOPWELL_UNROLL
  for (int i = 0; i < 7; ++i) {
    const double middle = unit * double(kMiddles[i]);
    t[i] = float(middle);
    const bool above = i % 2 == 0 ? double(t[i]) > middle : double(t[i]) >= middle;
    if (above) t[i] = arch::bit_cast<float>(arch::bit_cast<uint32_t>(t[i]) - 1);
  }
}

HOPWELL_DEVICE void encode_block(const float (&x)[kCodesOfBlock], double unit, uint32_t (&words)[2]) {
  float t[7];
  thresholds(unit, t);
  words[0] = words[1] = 0;
  HOPWELL_UNROLL
  for (int i = 0; i < kCodesOfBlock; ++i) {
    const float magnitude = arch::bit_cast<float>(magnitude_bits(x[i]));
    uint32_t code = arch::bit_cast<uint32_t>(x[i]) >> 28 & 8;
    HOPWELL_UNROLL
    for (int j = 0; j < 7; ++j) code += magnitude > t[j];
    words[i / 8] |= code << 4 * (i % 8);
  }
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
template <class T>
__global__ void __launch_bounds__(QuantizeConfig::kThreads)
    quantize_kernel(const __grid_constant__ QuantizeParams<T> p) {
  auto& s = arch::dynamic_smem<QuantizeStorage>();
  let_next_start();
  wait_for_previous();
  const float global = global_of(p, s);
  if (arch::block_index() == 0 && arch::thread_index() == 0) *p.global_scale = global;
  const int64_t rows = p.scales.blocked ? (p.rows + 127) / 128 * 128 : p.rows;
  const int64_t blocks = p.scales.blocked ? hopwell::nvfp4::blocked_tiles(p.blocks) * 4 : p.blocks;
  const int64_t threads = int64_t{arch::grid_size()} * QuantizeConfig::kThreads;
  for (int64_t i = int64_t{arch::block_index()} * QuantizeConfig::kThreads + arch::thread_index(); i < rows * blocks;
       i += threads) {
    const int64_t row = i / blocks, block = i % blocks;
    uint8_t* scale_at = p.scales.data + p.scales.offset(row, block);
    if (row >= p.rows || block >= p.blocks) {
      *scale_at = 0;
      continue;
    }
    float x[kCodesOfBlock];
    load_block(p.x + row * p.x_stride + block * kCodesOfBlock, p.x_aligned, x);
    uint32_t most = 0;
    HOPWELL_UNROLL
    for (int j = 0; j < kCodesOfBlock; ++j) most = magnitude_bits(x[j]) > most ? magnitude_bits(x[j]) : most;
    const bool finite = most < 0x7f800000u;
    const uint8_t scale =
        finite ? hopwell::nvfp4::encode_e4m3(arch::bit_cast<float>(most) / (hopwell::nvfp4::kCodeMax * global))
               : hopwell::nvfp4::kScaleNan;
    *scale_at = scale;
    uint32_t words[2] = {0, 0};
    if (finite && scale != 0) encode_block(x, double(scale_value(scale)) * double(global), words);
    store_codes(p.codes + row * p.codes_stride + block * (kCodesOfBlock / 2), p.codes_aligned, words);
  }
}

// ---- dequantize ----------------------------------------------------------------------------------------------------

template <class T>
struct DequantizeParams {
  Matrix matrix;
  T* x;
  Factor global;
  int64_t x_stride, rows, blocks;
  bool x_aligned;
};

template <class T>
__global__ void __launch_bounds__(QuantizeConfig::kThreads)
    dequantize_kernel(const __grid_constant__ DequantizeParams<T> p) {
  let_next_start();
  wait_for_previous();
  const auto global = float(p.global.get());
  const int64_t threads = int64_t{arch::grid_size()} * QuantizeConfig::kThreads, count = p.rows * p.blocks;
  for (int64_t i = int64_t{arch::block_index()} * QuantizeConfig::kThreads + arch::thread_index(); i < count;
       i += threads) {
    const int64_t row = i / p.blocks, block = i % p.blocks;
    uint32_t words[2];
    load_codes(p.matrix.at(row, 0) + block * (kCodesOfBlock / 2), words);
    const float scale = p.matrix.scale(row, block, 0);
    float x[kCodesOfBlock];
    HOPWELL_UNROLL
    for (int j = 0; j < kCodesOfBlock; ++j) x[j] = code_value(words[j / 8] >> 4 * (j % 8)) * scale * global;
    store_block(p.x + row * p.x_stride + block * kCodesOfBlock, p.x_aligned, x);
  }
}

}  // namespace
}  // namespace hopwell::ops::nvfp4
