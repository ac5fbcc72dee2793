// Shared by the kernels of nvfp4_gemv, nvfp4_linear and nvfp4_matmul: slices of K, the order of x, and results.
#pragma once

#include "arch/sm100/convert.hpp"
#include "ops/nvfp4/plan.hpp"
#include "tile/gpu/dependency.hpp"
#include "tile/gpu/fp4.hpp"
#include "tile/gpu/numbers.hpp"
#include "tile/gpu/warp.hpp"

namespace hopwell::ops::nvfp4::HOPWELL_TARGET {

using arch::bf16, arch::fp16;
using tile::Fp4Matrix, tile::kCodesPerBlock, tile::to_fp32;

// A range [begin, end) of K, in `stages` stages of 256 k. The first `whole` stages are complete.
struct Slice {
  int begin, end, stages, whole;
};

HOPWELL_DEVICE Slice slice_of(int begin, int width, int k) {
  const int end = begin + width < k ? begin + width : k;
  if (end <= begin) return {begin, begin, 0, 0};
  return {begin, end, (end - begin + StageConfig::kStageK - 1) / StageConfig::kStageK,
          (end - begin) / StageConfig::kStageK};
}

HOPWELL_DEVICE arch::Words4 load_words(const unsigned char* from) { return arch::load_vector<arch::Words4>(from); }

// Prefetches rows of x into L2, in pieces of 64 bytes that alternate between the CTAs. Harmless while another kernel
// still writes x.
template <class T>
HOPWELL_DEVICE void prefetch_x(const T* x, int64_t stride, int columns, int k, int threads) {
  constexpr int kPiece = 64 / int(sizeof(T));
  const int of_row = (k + kPiece - 1) / kPiece;
  for (int i = arch::block_index() + arch::grid_size() * arch::thread_index(); i < columns * of_row;
       i += arch::grid_size() * threads)
    arch::prefetch_l2(x + i / of_row * stride + i % of_row * kPiece);
}

// Reorders 8 consecutive elements to pairs (k, k + 4), the order of decoded codes.
HOPWELL_DEVICE arch::Words4 as_pairs(const arch::Words4& v) {
  const auto low = [](uint32_t a, uint32_t b) { return (a & 0xffff) | b << 16; };
  const auto high = [](uint32_t a, uint32_t b) { return a >> 16 | (b & 0xffff0000u); };
  return {{low(v.w[0], v.w[2]), high(v.w[0], v.w[2]), low(v.w[1], v.w[3]), high(v.w[1], v.w[3])}};
}

// Decodes the 8 codes of a word to four pairs of fp16, code / kUnit. in_order() brings 8 elements of x into their
// order.
struct DecodeByBits {
  static constexpr float kUnit = tile::kDecodedUnit;
  HOPWELL_DEVICE static void decode(uint32_t word, uint32_t (&pairs)[4]) { tile::e2m1x8_to_fp16(word, pairs); }
  HOPWELL_DEVICE static arch::Words4 in_order(const arch::Words4& v) { return as_pairs(v); }
};
// Decodes by Blackwell's conversion instruction, whose pairs are (k, k + 1).
struct DecodeByConversion {
  static constexpr float kUnit = 1;
  HOPWELL_DEVICE static void decode([[maybe_unused]] uint32_t word, [[maybe_unused]] uint32_t (&pairs)[4]) {
#if HOPWELL_HAS_SM100A
    arch::unpack_e2m1(word, pairs);
#endif
  }
  HOPWELL_DEVICE static const arch::Words4& in_order(const arch::Words4& v) { return v; }
};

// Number of bytes of a copy of `most` bytes that exist, if `left` bytes remain before the end of K.
HOPWELL_DEVICE int clamp_bytes(int left, int most) { return left < 0 ? 0 : left > most ? most : left; }

// y[row, column, batch] = factor · sum + bias[row, column], computed in double, rounded to fp32 and then to T.
template <class T>
struct Result {
  T* y;
  int64_t row_stride, column_stride, batch_stride;  // elements
  const T* bias;                                    // or null
  int64_t bias_row_stride, bias_column_stride;      // at least one is 0

  HOPWELL_DEVICE T* at(int64_t row, int64_t column, int64_t batch) const {
    return y + row * row_stride + column * column_stride + batch * batch_stride;
  }
  HOPWELL_DEVICE T value(int64_t row, int64_t column, double factor, float sum) const {
    T value;
    if (!bias && double(float(factor)) == factor) {
      tile::from_fp32(float(factor) * sum, &value);  // the same result, without double
    } else {
      const double offset = bias ? double(to_fp32(bias[row * bias_row_stride + column * bias_column_stride])) : 0;
      tile::from_fp32(float(factor * double(sum) + offset), &value);
    }
    return value;
  }
  HOPWELL_DEVICE void store(int64_t row, int64_t column, int64_t batch, double factor, float sum) const {
    *at(row, column, batch) = value(row, column, factor, sum);
  }
};

}  // namespace hopwell::ops::nvfp4::HOPWELL_TARGET
