// nvfp4_quantize and nvfp4_dequantize on GPUs.
//
//     global = amax / 2688;  scale = e4m3(block's amax / (6 · global));  code = e2m1 nearest to x / (scale · global)
//
// Roles     quantize: a thread for each block of 16 numbers that share a scale. dequantize: a thread for 16 bytes of x,
//           so that neighbours write whole lines, four at a time
// Codes     sm80_encode.hpp: in floats where the global is given, by thresholds where it comes from 16-bit x, which makes
//           many ties
// Budget    dequantize: 8.5 bytes in, 32 or 64 out, ~6 instructions a number; quantize: 32 or 64 in, 9 out, ~14
// Bound     memory. Without a given global x is read twice, the second time from L2 as far as it holds it: the largest
//           |x| of each CTA's share goes to the workspace, and each CTA of the second kernel takes the largest of those.
#pragma once

#include "ops/nvfp4/sm80_encode.hpp"
#include "ops/nvfp4/sm80_ring.hpp"

namespace hopwell::ops::nvfp4 {
namespace {

struct QuantizeConfig {
  static constexpr int kThreads = 256, kWarps = kThreads / 32, kMaxShares = 1024;
  static constexpr int kTogether = 4;  // pieces of a thread of dequantize
};

// Rows of so many pieces: of which row and where in it a piece is, for pieces in order.
struct Pieces {
  int64_t rows, of_row;
  uint32_t multiplier, shift;  // piece / of_row = (piece + high half of multiplier · piece) >> shift, below 2^31

  HOPWELL_DEVICE int64_t count() const { return rows * of_row; }
  HOPWELL_DEVICE int64_t row(int64_t piece) const {
    if (count() > 0x7fffffff) return piece / of_row;
    const auto number = uint32_t(piece);
    return (number + uint32_t(uint64_t{number} * multiplier >> 32)) >> shift;
  }
};

Pieces pieces_of(int64_t rows, int64_t of_row) {
  uint32_t shift = 0;
  while (shift < 31 && int64_t{1} << shift < of_row) ++shift;
  const auto power = uint64_t{1} << shift, divisor = uint64_t(of_row > 0 ? of_row : 1);
  return {rows, of_row, of_row > 0 ? uint32_t(((power - divisor) << 32) / divisor + 1) : 0, shift};
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
  int64_t x_stride, codes_stride;
  Pieces blocks, scale_blocks;  // with those that pad scales
  int shares;
  bool x_aligned, codes_aligned;
};

// The larger number as an integer, over a warp.
HOPWELL_DEVICE uint32_t warp_max(uint32_t bits) {
  for (int distance = 16; distance > 0; distance /= 2) {
    const uint32_t other = arch::shuffle_xor(bits, distance);
    bits = other > bits ? other : bits;
  }
  return bits;
}

struct QuantizeStorage {
  Thresholds16 thresholds[128];  // for each scale byte
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
  tile::launch_dependents();
  tile::wait_for_prior_kernels();
  constexpr int kTogether = 2;
  const int64_t threads = int64_t{arch::grid_size()} * QuantizeConfig::kThreads, count = p.blocks.count();
  uint32_t most = 0;
  const auto consider = [&](uint32_t bits) { most = bits < 0x7f800000u && bits > most ? bits : most; };
  for (int64_t first = int64_t{arch::block_index()} * QuantizeConfig::kThreads + arch::thread_index(); first < count;
       first += kTogether * threads) {
    Raw<T> x[kTogether];
    HOPWELL_UNROLL
    for (int j = 0; j < kTogether; ++j) {
      const int64_t i = first + j * threads < count ? first + j * threads : first;
      const int64_t row = p.blocks.row(i), block = i - row * p.blocks.of_row;
      x[j].load(p.x + row * p.x_stride + block * kCodesOfBlock, p.x_aligned);
    }
    HOPWELL_UNROLL
    for (int j = 0; j < kTogether; ++j) {
      const uint32_t bits = x[j].largest();
      consider(bits);
      if (bits < 0x7f800000u) continue;
      HOPWELL_UNROLL
      for (int i = 0; i < kCodesOfBlock; ++i) consider(magnitude_bits(x[j].get(i)));
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
      s.thresholds[scale] = thresholds_for<T>(scale_value(uint32_t(scale)), global);
    arch::syncthreads();
  }
  const int64_t threads = int64_t{arch::grid_size()} * QuantizeConfig::kThreads, count = p.scale_blocks.count();
  for (int64_t i = int64_t{arch::block_index()} * QuantizeConfig::kThreads + arch::thread_index(); i < count;
       i += threads) {
    const int64_t row = p.scale_blocks.row(i), block = i - row * p.scale_blocks.of_row;
    uint8_t* scale_at = p.scales.data + p.scales.offset(row, block);
    if (row >= p.blocks.rows || block >= p.blocks.of_row) {
      *scale_at = 0;
      continue;
    }
    Raw<T> x;
    x.load(p.x + row * p.x_stride + block * kCodesOfBlock, p.x_aligned);
    const uint32_t bits = x.largest();
    const bool finite = bits < 0x7f800000u;
    const auto most = arch::bit_cast<float>(bits);
    const uint8_t scale =
        finite ? hopwell::nvfp4::encode_e4m3(most / (hopwell::nvfp4::kCodeMax * global)) : hopwell::nvfp4::kScaleNan;
    *scale_at = scale;
    uint32_t words[2] = {0, 0};
    if (finite && scale != 0) {
      if constexpr (kByThresholds)
        encode_by_thresholds(x, s.thresholds[scale], words);
      else
        encode_block(x, most, scale_value(scale), global, words);
    }
    store_codes(p.codes + row * p.codes_stride + block * (kCodesOfBlock / 2), p.codes_aligned, words);
  }
}

// ---- dequantize ----------------------------------------------------------------------------------------------------

template <class T>
struct DequantizeParams {
  Matrix matrix;
  T* x;
  Factor global;
  int64_t x_stride;
  Pieces pieces;  // of 16 bytes of x
  bool x_aligned, codes_aligned;
};

// 16 bytes of x and their codes.
template <class T>
struct Piece {
  static constexpr int kNumbers = 16 / int(sizeof(T));
  struct alignas(16) Numbers {
    T x[kNumbers];
  };
  uint32_t codes;
  uint8_t scale;

  HOPWELL_DEVICE void load(const DequantizeParams<T>& p, int64_t row, int64_t k) {
    const uint8_t* from = p.matrix.at(row, 0) + k / 2;
    scale = p.matrix.scales.data[p.matrix.scales.offset(row, k / kCodesOfBlock)];
    if (p.codes_aligned) {
      codes = kNumbers == 8 ? *reinterpret_cast<const uint32_t*>(from) : *reinterpret_cast<const uint16_t*>(from);
      return;
    }
    codes = 0;
    HOPWELL_UNROLL
    for (int i = 0; i < kNumbers / 2; ++i) codes |= uint32_t{from[i]} << 8 * i;
  }
  // code · scale is exact in fp16, times 2^-14.
  HOPWELL_DEVICE Numbers decode(float global) const {
    uint32_t pairs[4];
    decode_word(codes, pairs);
    const uint32_t twice = scales_fp16(uint16_t(scale | scale << 8));
    Numbers numbers;
    HOPWELL_UNROLL
    for (int i = 0; i < kNumbers; ++i) {
      const uint32_t products = arch::multiply_fp16(pairs[i % 4], twice);
      const float product = arch::to_float(fp16{uint16_t(products >> i / 4 * 16)});
      from_fp32(product * LinearConfig::kCodeUnit * global, &numbers.x[i]);
    }
    return numbers;
  }
};

template <class T>
__global__ void __launch_bounds__(QuantizeConfig::kThreads)
    dequantize_kernel(const __grid_constant__ DequantizeParams<T> p) {
  constexpr int kTogether = QuantizeConfig::kTogether, kNumbers = Piece<T>::kNumbers;
  tile::launch_dependents();
  tile::wait_for_prior_kernels();
  const auto global = float(p.global.get());
  const int64_t count = p.pieces.count();
  const int64_t first = int64_t{arch::block_index()} * (QuantizeConfig::kThreads * kTogether) + arch::thread_index();
  Piece<T> pieces[kTogether];
  T* to[kTogether];
  HOPWELL_UNROLL
  for (int j = 0; j < kTogether; ++j) {
    const int64_t i = first + j * QuantizeConfig::kThreads;
    to[j] = nullptr;
    if (i >= count) continue;
    const int64_t row = p.pieces.row(i), k = (i - row * p.pieces.of_row) * kNumbers;
    pieces[j].load(p, row, k);
    to[j] = p.x + row * p.x_stride + k;
  }
  HOPWELL_UNROLL
  for (int j = 0; j < kTogether; ++j) {
    if (!to[j]) continue;
    const auto numbers = pieces[j].decode(global);
    if (p.x_aligned) {
      *reinterpret_cast<typename Piece<T>::Numbers*>(to[j]) = numbers;
    } else {
      HOPWELL_UNROLL
      for (int i = 0; i < kNumbers; ++i) to[j][i] = numbers.x[i];
    }
  }
}

}  // namespace
}  // namespace hopwell::ops::nvfp4
