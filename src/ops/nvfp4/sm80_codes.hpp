// NVFP4 on GPUs: numbers in registers, and what the kernels of its operators share.
#pragma once

#include "arch/sm80/convert.hpp"
#include "arch/sm80/memory.hpp"
#include "arch/sm90/convert.hpp"
#include "ops/nvfp4/op.hpp"
#include "tile/gpu/dependency.hpp"
#include "tile/gpu/numbers.hpp"
#include "tile/gpu/warp.hpp"

namespace hopwell::ops::nvfp4 {
namespace {

using arch::bf16;
using arch::fp16;
using tile::from_fp32, tile::to_fp32;

constexpr int kCodesOfBlock = int(hopwell::nvfp4::kBlock);  // codes that share a scale

// ---- 16-bit and 32-bit floats --------------------------------------------------------------------------------------

// The larger of halves of words, each on its own, unsigned.
HOPWELL_DEVICE uint32_t larger_halves(uint32_t a, uint32_t b) {
#if HOPWELL_HAS_SM90
  return arch::max_u16x2(a, b);
#else
  const uint32_t low = (a & 0xffff) > (b & 0xffff) ? a : b, high = a > b ? a : b;
  return (high & 0xffff0000u) | (low & 0xffff);
#endif
}

// Ones in the halves where a's is larger, as bf16 that are not negative.
HOPWELL_DEVICE uint32_t where_larger(uint32_t a, uint32_t b) {
#if HOPWELL_HAS_SM90
  return arch::greater_bf16(a, b);
#else
  return (a >> 16 > b >> 16 ? 0xffff0000u : 0) | ((a & 0xffff) > (b & 0xffff) ? 0xffffu : 0);
#endif
}

// ---- codes and scales ----------------------------------------------------------------------------------------------

// e2m1, s e e m: the bits lie in a float's as they are, for its exponent 0 is subnormal too; 2^126 undoes the bias.
HOPWELL_DEVICE float code_value(uint32_t nibble) {
  return arch::bit_cast<float>((nibble & 8) << 28 | (nibble & 7) << 22) * 0x1p126f;
}

// e4m3 by the same reasoning; NaN stays NaN.
HOPWELL_DEVICE float scale_value(uint32_t byte) {
  const float value = arch::bit_cast<float>((byte & 0x80) << 24 | (byte & 0x7f) << 20) * 0x1p120f;
  return (byte & 0x7f) == 0x7f ? arch::bit_cast<float>(0x7fc00000u) : value;
}

// A matrix of codes [rows, K/2] in batches, and its scales.
struct Matrix {
  const uint8_t* codes;
  int64_t row_stride, batch_stride;  // bytes
  Scales scales;

  HOPWELL_DEVICE const uint8_t* at(int64_t row, int64_t batch) const {
    return codes + row * row_stride + batch * batch_stride;
  }
  HOPWELL_DEVICE float scale(int64_t row, int64_t block, int64_t batch) const {
    return scale_value(scales.data[scales.offset(row, block, batch)]);
  }
};

// Eight codes, whatever their alignment.
HOPWELL_DEVICE uint32_t load_word(const uint8_t* from) {
  if (reinterpret_cast<uintptr_t>(from) % 4 == 0) return *reinterpret_cast<const uint32_t*>(from);
  uint32_t word = 0;
  HOPWELL_UNROLL
  for (int byte = 0; byte < 4; ++byte) word |= uint32_t{from[byte]} << 8 * byte;
  return word;
}

// A tensor's global scale. In double: the reciprocal of a subnormal overflows a float.
struct Factor {
  const float* pointer;
  float value;
  bool is_reciprocal;

  HOPWELL_DEVICE double get() const {
    const double global = double(pointer ? *pointer : value);
    return is_reciprocal ? 1 / global : global;
  }
  // With its number in a register: memory is asked for it at the beginning, where nothing waits, not before results are stored.
  HOPWELL_DEVICE Factor loaded() const { return {nullptr, pointer ? *pointer : value, is_reciprocal}; }
};

Factor factor_of(const Global& global, bool is_reciprocal = false) {
  return {global.pointer, global.value, is_reciprocal};
}

// ---- results -------------------------------------------------------------------------------------------------------

// y[row, column, batch] = factor · sum + bias[row], rounded once from double, but for float's own rounding.
template <class T>
struct Result {
  T* y;
  int64_t row_stride, column_stride, batch_stride;  // elements
  const T* bias;                                    // or null
  int64_t bias_stride;

  HOPWELL_DEVICE void store(int64_t row, int64_t column, int64_t batch, double factor, float sum) const {
    T* to = y + row * row_stride + column * column_stride + batch * batch_stride;
    if (!bias && double(float(factor)) == factor) return from_fp32(float(factor) * sum, to);  // the same, in fp32
    const double offset = bias ? double(to_fp32(bias[row * bias_stride])) : 0;
    from_fp32(float(factor * double(sum) + offset), to);
  }
};

}  // namespace
}  // namespace hopwell::ops::nvfp4
