// NVFP4 on the CPU: converts scales and codes to floats and back.
#include "tile/cpu/nvfp4.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tile/cpu/nvfp4.cpp"
#include <hwy/foreach_target.h>
//
#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <bit>
#include <cstring>
#include <limits>

#include "tile/cpu/nvfp4-inl.hpp"
#include "tile/cpu/vector-inl.hpp"
#include "tile/nvfp4.hpp"

HWY_BEFORE_NAMESPACE();
namespace hopwell::cpu::nvfp4::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace format = hopwell::nvfp4;
using hopwell::cpu::HWY_NAMESPACE::LoadFloat;

#if HWY_TARGET != HWY_SCALAR

void Decode(const std::uint8_t* codes, const float* scales, float factor, std::size_t k, float* out) {
  const hn::CappedTag<std::uint8_t, 16> d8;
  const hn::Repartition<std::uint16_t, decltype(d8)> d16;
  const hn::CappedTag<float, 16> d;
  const auto upper_bytes = hn::Load(d8, kUpperByte), lower_bytes = hn::Load(d8, kLowerByte);
  for (std::size_t i = 0; i < k; i += 16, codes += 8) {
    HWY_ALIGN std::uint8_t bytes[16] = {};
    std::memcpy(bytes, codes, 8);
    const auto packed = hn::Load(d8, bytes), mask = hn::Set(d8, 0x0F);
    const auto odd = hn::And(hn::BitCast(d8, hn::ShiftRight<4>(hn::BitCast(d16, packed))), mask);
    const auto nibbles = hn::InterleaveLower(d8, hn::And(packed, mask), odd);
    const auto high = hn::TableLookupBytes(upper_bytes, nibbles), low = hn::TableLookupBytes(lower_bytes, nibbles);
    HWY_ALIGN bfloat16 values[16];
    hn::Store(hn::InterleaveLower(d8, low, high), d8, reinterpret_cast<std::uint8_t*>(values));
    hn::Store(hn::InterleaveUpper(d8, low, high), d8, reinterpret_cast<std::uint8_t*>(values + 8));
    const auto scale = hn::Set(d, scales[i / 16]), global = hn::Set(d, factor);
    for (std::size_t j = 0; j < 16; j += hn::Lanes(d))
      hn::StoreU(hn::Mul(hn::Mul(LoadFloat(d, values + j), scale), global), d, out + i + j);
  }
}

#else  // HWY_SCALAR

void Decode(const std::uint8_t* codes, const float* scales, float factor, std::size_t k, float* out) {
  for (std::size_t i = 0; i < k; ++i) out[i] = DecodeOne(codes, i) * scales[i / 16] * factor;
}

#endif

// Decodes a vector of e4m3 bytes times 2^-8, through fp16, whose bits they are after a shift. No step flushes
// subnormals, in any floating-point mode of the process.
template <class D>
HWY_INLINE hn::Vec<D> DecodeScales(D d, const std::uint8_t* from) {
  const hn::Rebind<std::int8_t, D> d8;
  const hn::Rebind<std::int16_t, D> d16;
  const hn::Rebind<hwy::float16_t, D> d_half;
  const auto shifted = hn::ShiftLeft<7>(hn::PromoteTo(d16, hn::LoadU(d8, reinterpret_cast<const std::int8_t*>(from))));
  const auto half =
      hn::AndNot(hn::Set(d16, 0x4000), shifted);  // the sign is in bit 15; extension left a copy in bit 14
  const auto value = hn::PromoteTo(d, hn::BitCast(d_half, half));
  const auto is_nan = hn::Eq(hn::Abs(value), hn::Set(d, 480.0F / 256));  // the bits 0x7F without NaN
  return hn::IfThenElse(is_nan, hn::Set(d, std::numeric_limits<float>::quiet_NaN()), value);
}

// The same for scales that are neither negative nor NaN, which is the common case: half the instructions.
template <class D>
HWY_INLINE hn::Vec<D> DecodeUsualScales(D d, const std::uint8_t* from) {
  const hn::Rebind<std::uint8_t, D> d8;
  const hn::Rebind<std::uint16_t, D> d16;
  const hn::Rebind<hwy::float16_t, D> d_half;
  return hn::PromoteTo(d, hn::BitCast(d_half, hn::ShiftLeft<7>(hn::PromoteTo(d16, hn::LoadU(d8, from)))));
}

// Short rows have fewer scales than a vector has lanes: narrower vectors follow, then single scales.

// Tests whether the scales from `j` on are neither negative nor NaN, one vector of D at a time. Does not test the
// remainder.
template <class D>
HWY_INLINE bool AreUsual(D d, const std::uint8_t* scales, std::size_t count, std::size_t& j) {
  auto most = hn::Zero(d);
  for (; j + hn::Lanes(d) <= count; j += hn::Lanes(d)) most = hn::Max(most, hn::LoadU(d, scales + j));
  return hn::AllTrue(d, hn::Lt(most, hn::Set(d, 0x7F)));
}

bool AreUsual(const std::uint8_t* scales, std::size_t count) {
  std::size_t j = 0;
  bool usual = AreUsual(hn::ScalableTag<std::uint8_t>(), scales, count, j) &&
               AreUsual(hn::CappedTag<std::uint8_t, 8>(), scales, count, j);
  for (; j < count; ++j) usual = usual && scales[j] < 0x7F;
  return usual;
}

template <bool kUsual, class D>
HWY_INLINE void DecodeScalesTimes(D d, const std::uint8_t* scales, const float* factors, std::size_t count,
                                  std::size_t& j, float* out) {
  const auto unit = hn::Set(d, 256.0F);
  for (; j + hn::Lanes(d) <= count; j += hn::Lanes(d)) {
    const auto value = kUsual ? DecodeUsualScales(d, scales + j) : DecodeScales(d, scales + j);
    const auto factor = factors == nullptr ? unit : hn::Mul(unit, hn::LoadU(d, factors + j));
    hn::StoreU(hn::Mul(value, factor), d, out + j);
  }
}

template <bool kUsual>
HWY_INLINE void DecodeScalesTimes(const std::uint8_t* scales, const float* factors, std::size_t k, float* out) {
  const std::size_t count = k / 16;
  std::size_t j = 0;
  DecodeScalesTimes<kUsual>(hn::ScalableTag<float>(), scales, factors, count, j, out);
  DecodeScalesTimes<kUsual>(hn::CappedTag<float, 8>(), scales, factors, count, j, out);
  DecodeScalesTimes<kUsual>(hn::CappedTag<float, 4>(), scales, factors, count, j, out);
  for (; j < count; ++j) out[j] = format::decode_e4m3(scales[j]) * (factors == nullptr ? 1 : factors[j]);
  for (; j < scale_room(k); ++j) out[j] = 0;
}

void DecodeScalesOfRow(const std::uint8_t* scales, const float* factors, std::size_t k, float* out) {
  if (AreUsual(scales, k / 16)) return DecodeScalesTimes<true>(scales, factors, k, out);
  DecodeScalesTimes<false>(scales, factors, k, out);
}

float FiniteAmax(const float* x, std::size_t count) {
  constexpr std::int32_t kInfinity = 0x7F800000;
  const hn::ScalableTag<float> d;
  const hn::RebindToSigned<decltype(d)> di;
  const auto infinity = hn::Set(di, kInfinity);
  auto most = hn::Zero(di);
  std::size_t i = 0;
  for (; i + hn::Lanes(d) <= count; i += hn::Lanes(d)) {
    const auto bits = MagnitudeBits(d, x + i);
    most = hn::Max(most, hn::IfThenElseZero(hn::Lt(bits, infinity), bits));
  }
  std::int32_t result = hn::GetLane(hn::MaxOfLanes(di, most));
  for (; i < count; ++i) {
    const std::int32_t bits = std::bit_cast<std::int32_t>(x[i]) & 0x7FFFFFFF;
    if (bits < kInfinity && bits > result) result = bits;
  }
  return std::bit_cast<float>(result);
}

// threshold[i] such that a float magnitude is > threshold[i] iff it rounds above code i of the grid times `unit`: it is
// nearer to code i + 1, or it is halfway and i + 1 is even. Midpoint times unit is exact in double: 3 + 4 + 24
// significant bits.
HWY_INLINE void Thresholds(double unit, float* threshold) {
  constexpr double kMidpoints[7] = {0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5};
  for (std::size_t i = 0; i < 7; ++i) {
    const double midpoint = kMidpoints[i] * unit;
    const auto nearest = static_cast<float>(midpoint);
    const bool one_less =
        static_cast<double>(nearest) > midpoint || (i % 2 == 1 && static_cast<double>(nearest) == midpoint);
    threshold[i] = std::bit_cast<float>(std::bit_cast<std::int32_t>(nearest) - static_cast<std::int32_t>(one_less));
  }
}

void EncodeBlock(const float* x, double unit, std::uint8_t* codes) {
  const hn::CappedTag<float, 16> d;
  const hn::RebindToSigned<decltype(d)> di;
  float threshold[7];
  Thresholds(unit, threshold);
  HWY_ALIGN std::int32_t code[16];
  for (std::size_t i = 0; i < 16; i += hn::Lanes(d)) {
    const auto magnitude = hn::BitCast(d, MagnitudeBits(d, x + i));
    auto sum = hn::Zero(di);
    for (const float t : threshold)
      sum = hn::Sub(sum, hn::VecFromMask(di, hn::RebindMask(di, hn::Gt(magnitude, hn::Set(d, t)))));
    const auto sign = hn::And(hn::ShiftRight<28>(hn::BitCast(di, hn::LoadU(d, x + i))), hn::Set(di, 8));
    hn::Store(hn::Or(sum, sign), di, code + i);
  }
  for (std::size_t i = 0; i < 8; ++i) codes[i] = static_cast<std::uint8_t>(code[2 * i] | code[2 * i + 1] << 4);
}

void Encode(const float* x, float global, std::size_t k, std::uint8_t* codes, std::uint8_t* scales) {
  const hn::CappedTag<float, 16> d;
  const hn::RebindToSigned<decltype(d)> di;
  const float six_globals = format::kCodeMax * global;
  for (std::size_t i = 0; i < k; i += 16) {
    auto most = hn::Zero(di);
    for (std::size_t j = 0; j < 16; j += hn::Lanes(d)) most = hn::Max(most, MagnitudeBits(d, x + i + j));
    const auto amax = std::bit_cast<float>(hn::GetLane(hn::MaxOfLanes(di, most)));
    const bool finite = amax < std::numeric_limits<float>::infinity();
    const std::uint8_t scale = finite ? format::encode_e4m3(amax / six_globals) : format::kScaleNan;
    scales[i / 16] = scale;
    if (!finite || scale == 0)
      std::memset(codes + i / 2, 0, 8);
    else
      EncodeBlock(x + i, static_cast<double>(format::decode_e4m3(scale)) * static_cast<double>(global), codes + i / 2);
  }
}

}  // namespace hopwell::cpu::nvfp4::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace hopwell::cpu::nvfp4 {

HWY_EXPORT(DecodeScalesOfRow);
HWY_EXPORT(Decode);
HWY_EXPORT(FiniteAmax);
HWY_EXPORT(Encode);

void decode_scales(const std::uint8_t* scales, const float* factors, std::size_t k, float* out) {
  HWY_DYNAMIC_DISPATCH(DecodeScalesOfRow)(scales, factors, k, out);
}
void decode(const std::uint8_t* codes, const float* scales, float factor, std::size_t k, float* out) {
  HWY_DYNAMIC_DISPATCH(Decode)(codes, scales, factor, k, out);
}
float finite_amax(const float* x, std::size_t count) { return HWY_DYNAMIC_DISPATCH(FiniteAmax)(x, count); }
void encode(const float* x, float global, std::size_t k, std::uint8_t* codes, std::uint8_t* scales) {
  HWY_DYNAMIC_DISPATCH(Encode)(x, global, k, codes, scales);
}

void Matrix::decode_scales(std::int64_t m, std::int64_t first, std::int64_t count, std::uint8_t* bytes, float* out,
                           const float* factors) const {
  if (count == 0) return nvfp4::decode_scales(nullptr, nullptr, 0, out);
  constexpr std::int64_t kBlock = hopwell::nvfp4::kBlock, kTileBytes = 512;
  const auto k_count = static_cast<std::size_t>(count);
  const std::uint8_t* row_scales = scales.data + scales.offset(m, first / kBlock, batch);
  if (!scales.blocked) return nvfp4::decode_scales(row_scales, factors, k_count, out);
  for (std::int64_t tile = 0; 4 * kBlock * tile < count; ++tile)
    std::memcpy(bytes + 4 * tile, row_scales + kTileBytes * tile, 4);
  nvfp4::decode_scales(bytes, factors, k_count, out);
}

void Matrix::prefetch_scales(std::int64_t m) const {
  constexpr std::int64_t kLine = 64;
  const std::uint8_t* row_scales = scales.data + scales.offset(m, 0, batch);
  for (std::int64_t byte = 0; byte < k / hopwell::nvfp4::kBlock && !scales.blocked; byte += kLine)
    hwy::Prefetch(row_scales + byte);
}

}  // namespace hopwell::cpu::nvfp4
#endif  // HWY_ONCE
