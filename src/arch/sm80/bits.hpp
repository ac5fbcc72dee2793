// Bit and byte operations on words.
// "PTX:" anchors are sections of https://docs.nvidia.com/cuda/parallel-thread-execution/
#pragma once

#include <bit>

#include "../platform.hpp"

namespace hopwell::arch {

/// lop3.b32: bits of a where the mask is 1, bits of b elsewhere. One instruction; for the same expression with & and |
/// compilers emit two if they find mask bits that do not matter. PTX: #logic-and-shift-instructions-lop3
HOPWELL_DEVICE uint32_t select_bits(uint32_t a, uint32_t b, uint32_t mask) {
#if HOPWELL_ON_DEVICE
  uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(r) : "r"(a), "r"(b), "r"(mask));
  return r;
#else
  return (a & mask) | (b & ~mask);
#endif
}

/// prmt.b32: selects four bytes from the eight of a (0 to 3) and b (4 to 7). Each hexadecimal digit of the selector
/// selects one byte; the last digit selects the lowest byte. PTX: #data-movement-and-conversion-instructions-prmt
template <uint32_t kSelector>
HOPWELL_DEVICE uint32_t permute_bytes(uint32_t a, uint32_t b) {
  static_assert((kSelector & 0xffff8888u) == 0);
#if HOPWELL_ON_DEVICE
  uint32_t r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "n"(kSelector));
  return r;
#else
  const uint64_t bytes = uint64_t{b} << 32 | a;
  uint32_t r = 0;
  for (uint32_t i = 0; i < 4; ++i) r |= uint32_t(bytes >> (kSelector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return r;
#endif
}

/// prmt.b32 with bit 8 set in each digit of the selector: each result byte repeats the sign bit of the byte that the
/// digit's other bits select. PTX: #data-movement-and-conversion-instructions-prmt
HOPWELL_DEVICE uint32_t permute_signs(uint32_t a, uint32_t b, uint32_t selector) {
#if HOPWELL_ON_DEVICE
  uint32_t r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
  return r;
#else
  const uint64_t bytes = uint64_t{b} << 32 | a;
  uint32_t r = 0;
  for (uint32_t i = 0; i < 4; ++i) r |= (bytes >> ((selector >> 4 * i & 7) * 8 + 7) & 1 ? 0xffU : 0) << 8 * i;
  return r;
#endif
}

/// bfind.u32: index of the highest set bit; 0xffffffff for x = 0. PTX: #integer-arithmetic-instructions-bfind
HOPWELL_DEVICE uint32_t bfind(uint32_t x) {
#if HOPWELL_ON_DEVICE
  uint32_t r;
  asm("bfind.u32 %0, %1;" : "=r"(r) : "r"(x));
  return r;
#else
  return uint32_t(31 - std::countl_zero(x));
#endif
}

/// mov.b32 of a pair: duplicates the low or the high half of a word. Instructions on pairs of 16-bit floats can read
/// one half twice, so the duplication is usually free. PTX: #data-movement-and-conversion-instructions-mov
template <bool kHigh>
HOPWELL_DEVICE uint32_t half_twice(uint32_t a) {
#if HOPWELL_ON_DEVICE
  uint32_t r;
  if constexpr (kHigh)
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {high, high};}" : "=r"(r) : "r"(a));
  else
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {low, low};}" : "=r"(r) : "r"(a));
  return r;
#else
  return kHigh ? (a >> 16) | (a & 0xffff0000u) : (a & 0xffff) | a << 16;
#endif
}

}  // namespace hopwell::arch
