// Decoding of NVFP4 codes on the CPU. Included once per target, from files that use foreach_target.h.
#if defined(HOPWELL_TILE_CPU_NVFP4_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef HOPWELL_TILE_CPU_NVFP4_INL_HPP_
#undef HOPWELL_TILE_CPU_NVFP4_INL_HPP_
#else
#define HOPWELL_TILE_CPU_NVFP4_INL_HPP_
#endif

#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>

#include "tile/cpu/nvfp4.hpp"
#include "tile/nvfp4.hpp"

HWY_BEFORE_NAMESPACE();
namespace hopwell::cpu::nvfp4::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// |x| as integers, which have the order of the magnitudes: finite numbers, then inf, then NaN.
template <class D>
HWY_INLINE hn::Vec<hn::RebindToSigned<D>> MagnitudeBits(D d, const float* x) {
  const hn::RebindToSigned<D> di;
  return hn::And(hn::BitCast(di, hn::LoadU(d, x)), hn::Set(di, 0x7FFFFFFF));
}

#if HWY_TARGET != HWY_SCALAR

using Bytes = hn::CappedTag<std::uint8_t, kStep / 2>;  // one step decodes the codes of one vector of bytes
using Words = hn::Repartition<std::uint32_t, Bytes>;
using Floats = hn::Repartition<float, Bytes>;
using ByteVec = hn::Vec<Bytes>;
using FloatVec = hn::Vec<Floats>;

// Upper and lower byte of the e2m1 values as bf16, which is exact.
HWY_ALIGN constexpr std::uint8_t kUpperByte[16] = {0x00, 0x3F, 0x3F, 0x3F, 0x40, 0x40, 0x40, 0x40,
                                                   0x80, 0xBF, 0xBF, 0xBF, 0xC0, 0xC0, 0xC0, 0xC0};
HWY_ALIGN constexpr std::uint8_t kLowerByte[16] = {0x00, 0x00, 0x80, 0xC0, 0x00, 0x40, 0x80, 0xC0,
                                                   0x00, 0x00, 0x80, 0xC0, 0x00, 0x40, 0x80, 0xC0};

HWY_INLINE ByteVec LowNibbles(ByteVec codes) { return hn::And(codes, hn::Set(Bytes(), 0x0F)); }
HWY_INLINE ByteVec HighNibbles(ByteVec codes) {
  const hn::Repartition<std::uint16_t, Bytes> d16;  // Highway has no byte shifts
  return LowNibbles(hn::BitCast(Bytes(), hn::ShiftRight<4>(hn::BitCast(d16, codes))));
}

// Converts codes, one per byte, to pairs of bf16 in 32-bit lanes: the codes of the lower and of the upper halves of the
// 128-bit blocks.
HWY_INLINE void DecodePairs(ByteVec nibbles, hn::Vec<Words>& lower, hn::Vec<Words>& upper) {
  const Bytes d;
  const auto high = hn::TableLookupBytes(hn::LoadDup128(d, kUpperByte), nibbles);
  const auto low = hn::TableLookupBytes(hn::LoadDup128(d, kLowerByte), nibbles);
  lower = hn::BitCast(Words(), hn::InterleaveLower(d, low, high));
  upper = hn::BitCast(Words(), hn::InterleaveUpper(d, low, high));
}
HWY_INLINE FloatVec First(hn::Vec<Words> pairs) { return hn::BitCast(Floats(), hn::ShiftLeft<16>(pairs)); }
HWY_INLINE FloatVec Second(hn::Vec<Words> pairs) {
  return hn::BitCast(Floats(), hn::And(pairs, hn::Set(Words(), 0xFFFF0000U)));
}

#else  // scalar target

HWY_INLINE float DecodeOne(const std::uint8_t* codes, std::size_t i) {
  return hopwell::nvfp4::decode_e2m1((codes[i / 2] >> (4 * (i % 2))) & 0xFU);
}

#endif

}  // namespace hopwell::cpu::nvfp4::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard
