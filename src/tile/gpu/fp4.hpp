// NVFP4 in GPU kernels: converts e2m1 codes and e4m3 scales to float and fp16; a matrix of them in memory.
#pragma once

#include "arch/sm80/bits.hpp"
#include "arch/sm80/convert.hpp"
#include "arch/sm80/memory.hpp"
#include "arch/sm90/convert.hpp"
#include "tile/nvfp4.hpp"

namespace hopwell::tile {

inline constexpr int kCodesPerBlock = int(nvfp4::kBlock);  // codes that share a scale
inline constexpr float kDecodedUnit = 0x1p14f;             // e2m1x8_to_fp16 returns code / kDecodedUnit

// ---- single numbers ------------------------------------------------------------------------------------------------

/// Bits s e e m become a float's bits by shifts alone, because exponent 0 is subnormal in both formats. 2^126 corrects
/// the bias.
HOPWELL_DEVICE float e2m1_to_float(uint32_t nibble) {
  return arch::bit_cast<float>((nibble & 8) << 28 | (nibble & 7) << 22) * 0x1p126f;
}

/// The same for e4m3; NaN stays NaN.
HOPWELL_DEVICE float e4m3_to_float(uint32_t byte) {
  const float value = arch::bit_cast<float>((byte & 0x80) << 24 | (byte & 0x7f) << 20) * 0x1p120f;
  return (byte & 0x7f) == 0x7f ? arch::bit_cast<float>(0x7fc00000u) : value;
}

// ---- several numbers at once ---------------------------------------------------------------------------------------

/// Loads eight codes of any alignment.
HOPWELL_DEVICE uint32_t load_e2m1x8(const uint8_t* from) {
  if (reinterpret_cast<uintptr_t>(from) % 4 == 0) return *reinterpret_cast<const uint32_t*>(from);
  uint32_t word = 0;
  HOPWELL_UNROLL
  for (int byte = 0; byte < 4; ++byte) word |= uint32_t{from[byte]} << 8 * byte;
  return word;
}

/// 8 codes to four pairs (k, k + 4) of fp16, each code · 2^-14: s to bit 15, e e m to bits 11 to 9. First moves all
/// codes into position within bytes, still mixed with bits of their neighbours, then masks them in pairs: 11
/// instructions, 7 of them half rate.
HOPWELL_DEVICE void e2m1x8_to_fp16(uint32_t word, uint32_t (&pairs)[4]) {
  constexpr uint32_t kSigns = 0x80808080u, kCodes = 0x8e008e00u;
  const uint32_t even = arch::select_bits(word << 4, word << 1, kSigns);
  const uint32_t odd = arch::select_bits(word, word >> 3, kSigns);
  pairs[0] = even << 8 & kCodes;
  pairs[1] = odd << 8 & kCodes;
  pairs[2] = even & kCodes;
  pairs[3] = odd & kCodes;
}

/// Two e4m3 as fp16, and as floats.
HOPWELL_DEVICE uint32_t e4m3x2_to_fp16(uint16_t bytes) {
#if HOPWELL_HAS_SM90
  return arch::unpack_e4m3(bytes);
#else
  return arch::pack_fp16(e4m3_to_float(bytes & 0xff), e4m3_to_float(bytes >> 8));
#endif
}
struct FloatPair {
  float low, high;
};
HOPWELL_DEVICE FloatPair e4m3x2_to_float(uint16_t bytes) {
  const uint32_t halves = e4m3x2_to_fp16(bytes);
  return {arch::to_float(arch::fp16{uint16_t(halves)}), arch::to_float(arch::fp16{uint16_t(halves >> 16)})};
}

// ---- in memory -----------------------------------------------------------------------------------------------------

/// Codes [rows, K/2] in batches, and their scales.
struct Fp4Matrix {
  const uint8_t* codes;
  int64_t row_stride, batch_stride;  // bytes
  nvfp4::Scales scales;

  HOPWELL_DEVICE const uint8_t* row(int64_t row, int64_t batch) const {
    return codes + row * row_stride + batch * batch_stride;
  }
  HOPWELL_DEVICE float scale(int64_t row, int64_t block, int64_t batch) const {
    return e4m3_to_float(scales.data[scales.offset(row, block, batch)]);
  }
};

}  // namespace hopwell::tile
