// Products of NVFP4 weights with x on the CPU. A single row of x uses 16-bit fixed point where it is accurate enough,
// else floats.
#include "tile/cpu/nvfp4.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tile/cpu/nvfp4_dot.cpp"
#include <hwy/foreach_target.h>
//
#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "tile/cpu/nvfp4-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace hopwell::cpu::nvfp4::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET != HWY_SCALAR

// Offset in k, within a step, of lane `lane` of vector `vector`. A step decodes to 8 vectors of floats.
HWY_INLINE std::size_t PlaceOfLane(std::size_t vector, std::size_t lane) {
  const std::size_t half = vector / 4, nibble = vector / 2 % 2, second = vector % 2;
  return 2 * (16 * (lane / 4) + 8 * half + 2 * (lane % 4) + second) + nibble;
}

// Index of the scale of each lane. Lane j of the lower vectors uses scale 2 * (j / 4), of the upper vectors 2 * (j / 4)
// + 1. Lane j of a vector of pair sums uses scale j / 2.
struct ScaleLanes {
  HWY_INLINE ScaleLanes() {
    for (std::size_t j = 0; j < hn::Lanes(Floats()); ++j) {
      lower[j] = static_cast<std::int32_t>(j / 4 * 2);
      upper[j] = lower[j] + 1;
      pairs[j] = static_cast<std::int32_t>(j / 2);
    }
  }
  HWY_ALIGN std::int32_t lower[kStep / 8], upper[kStep / 8], pairs[kStep / 8];
};

// Returns sum + (codes . x) * scale for one step of 8 vectors of x.
HWY_INLINE FloatVec DotStep(const std::uint8_t* codes, const float* scales, const ScaleLanes& lanes, const float* x,
                            FloatVec sum) {
  const Floats d;
  const std::size_t n = hn::Lanes(d);
  const auto bytes = hn::LoadU(Bytes(), codes);
  hn::Vec<Words> even_lower, even_upper, odd_lower, odd_upper;
  DecodePairs(LowNibbles(bytes), even_lower, even_upper);
  DecodePairs(HighNibbles(bytes), odd_lower, odd_upper);
  auto lower = hn::Mul(First(even_lower), hn::LoadU(d, x));
  lower = hn::MulAdd(Second(even_lower), hn::LoadU(d, x + n), lower);
  lower = hn::MulAdd(First(odd_lower), hn::LoadU(d, x + 2 * n), lower);
  lower = hn::MulAdd(Second(odd_lower), hn::LoadU(d, x + 3 * n), lower);
  auto upper = hn::Mul(First(even_upper), hn::LoadU(d, x + 4 * n));
  upper = hn::MulAdd(Second(even_upper), hn::LoadU(d, x + 5 * n), upper);
  upper = hn::MulAdd(First(odd_upper), hn::LoadU(d, x + 6 * n), upper);
  upper = hn::MulAdd(Second(odd_upper), hn::LoadU(d, x + 7 * n), upper);
  const auto scale = hn::LoadU(d, scales);
  sum = hn::MulAdd(lower, hn::TableLookupLanes(scale, hn::SetTableIndices(d, lanes.lower)), sum);
  return hn::MulAdd(upper, hn::TableLookupLanes(scale, hn::SetTableIndices(d, lanes.upper)), sum);
}

// ---- n = 1: x in 16-bit fixed point -------------------------------------------------------------------------------

using Shorts = hn::Repartition<std::int16_t, Bytes>;
using Ints = hn::Repartition<std::int32_t, Bytes>;
using ShortVec = hn::Vec<Shorts>;

// e2m1 values times two.
HWY_ALIGN constexpr std::int8_t kTwice[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// sum[i] += the products of lanes 2i and 2i + 1.
HWY_INLINE hn::Vec<Ints> AddPairs(ShortVec a, ShortVec b, hn::Vec<Ints> sum) {
#if HWY_ARCH_X86
  hn::Vec<Ints> unused = hn::Zero(Ints());  // on x86 every pair is added to its own lane of the first sum
  return hn::ReorderWidenMulAccumulate(Ints(), a, b, sum, unused);
#else
  const Ints d;
  const auto a32 = hn::BitCast(d, a), b32 = hn::BitCast(d, b);
  const auto even = hn::Mul(hn::ShiftRight<16>(hn::ShiftLeft<16>(a32)), hn::ShiftRight<16>(hn::ShiftLeft<16>(b32)));
  return hn::Add(hn::Add(sum, even), hn::Mul(hn::ShiftRight<16>(a32), hn::ShiftRight<16>(b32)));
#endif
}

// Offset in k, within a step, of lane `lane` of vector `vector`. A step decodes to 4 vectors of shorts: the low nibbles
// of even and of odd bytes, then the high nibbles. Four lanes, so two pair sums, share a scale.
HWY_INLINE std::size_t PlaceOfShort(std::size_t vector, std::size_t lane) {
  return 4 * lane + 2 * (vector % 2) + vector / 2;
}

// Like DotStep: 256 * 2 * code . digits in exact integers, then the scales. A pair sum has 8 products of at most 256 *
// 12 * 2^15: less than 2^30.
HWY_INLINE FloatVec FixedPointStep(const std::uint8_t* codes, const float* scales, const ScaleLanes& lanes,
                                   const std::int16_t* digits, FloatVec sum) {
  const Floats d;
  const Shorts d16;
  const std::size_t n = hn::Lanes(d16);
  const auto bytes = hn::LoadU(Bytes(), codes);
  const auto table = hn::LoadDup128(Bytes(), reinterpret_cast<const std::uint8_t*>(kTwice));
  const auto low = hn::BitCast(d16, hn::TableLookupBytes(table, LowNibbles(bytes)));
  const auto high = hn::BitCast(d16, hn::TableLookupBytes(table, HighNibbles(bytes)));
  const auto upper_byte = hn::Set(d16, static_cast<std::int16_t>(0xFF00));
  auto dot = AddPairs(hn::ShiftLeft<8>(low), hn::LoadU(d16, digits), hn::Zero(Ints()));
  dot = AddPairs(hn::And(low, upper_byte), hn::LoadU(d16, digits + n), dot);
  dot = AddPairs(hn::ShiftLeft<8>(high), hn::LoadU(d16, digits + 2 * n), dot);
  dot = AddPairs(hn::And(high, upper_byte), hn::LoadU(d16, digits + 3 * n), dot);
  const auto scale = hn::TableLookupLanes(hn::LoadU(d, scales), hn::SetTableIndices(d, lanes.pairs));
  return hn::MulAdd(hn::ConvertTo(d, dot), scale, sum);
}

// Converts a block of x to units of 2^(e - 15), with |x| < 2^e, and returns its factor; false if the block must stay in
// floating point. At least half of the nonzero magnitudes must be within a factor 16 of the largest: then these keep 11
// bits, and large values times small weights do not hide the rest. `loss` bounds the total rounding error with codes of
// magnitude 6.
bool FixedPointOfBlock(const float* x, bool exact, std::int16_t* digits, float* factor, float* loss) {
  const hn::CappedTag<float, 16> d;
  const hn::RebindToSigned<decltype(d)> di;
  const hn::Rebind<std::int16_t, decltype(d)> d16;
  auto bits = hn::Zero(di);
  for (std::size_t i = 0; i < 16; i += hn::Lanes(d)) bits = hn::Max(bits, MagnitudeBits(d, x + i));
  const float most = std::max(std::bit_cast<float>(hn::GetLane(hn::MaxOfLanes(di, bits))), 0x1p-60F);
  if (!(most < 0x1p60F)) return false;  // NaN, inf, and magnitudes that could overflow the scale
  const int exponent = static_cast<int>(std::bit_cast<std::uint32_t>(most) >> 23) - 126;
  const float unit = std::ldexp(1.0F, exponent - 15);
  std::size_t large = 0, zeros = 0;
  auto lost = hn::Zero(d);
  for (std::size_t i = 0; i < 16; i += hn::Lanes(d)) {
    const auto value = hn::LoadU(d, x + i);
    const auto digit = hn::NearestInt(hn::Mul(value, hn::Set(d, 1 / unit)));
    large += hn::CountTrue(d, hn::Ge(hn::Abs(value), hn::Set(d, most / 16)));
    zeros += hn::CountTrue(d, hn::Eq(value, hn::Zero(d)));
    const auto demoted = hn::DemoteTo(d16, digit);
    const auto taken = hn::ConvertTo(d, hn::PromoteTo(di, demoted));
    lost = hn::Add(lost, hn::Abs(hn::Sub(value, hn::Mul(taken, hn::Set(d, unit)))));
    hn::StoreU(demoted, d16, digits + i);
  }
  constexpr float kFactor = 512, kLargestCode = 6;  // weights are decoded 2 * 256 times too large
  *factor = unit / kFactor;
  *loss = kLargestCode * kFactor * (hn::GetLane(hn::SumOfLanes(d, lost)) / unit);
  return *loss == 0 || (!exact && 2 * large >= 16 - zeros);
}

// The end of a row that is not a whole step, padded with zero codes.
struct Tail {
  HWY_INLINE Tail(const std::uint8_t* codes, std::size_t k, std::size_t step) : begin(k / step * step) {
    if (begin < k) std::memcpy(bytes, codes + begin / 2, (k - begin) / 2);
  }
  std::size_t begin;  // offset of the tail in k
  HWY_ALIGN std::uint8_t bytes[kStep / 2] = {};
};

// sum[r] += the products of a run of whole steps. next[r] as in dot_row.
template <std::size_t kRows>
HWY_INLINE void AddRun(const std::uint8_t* const* codes, const float* scales, std::size_t room, const ScaleLanes& lanes,
                       const Row& x, Row::Run run, const std::uint8_t* const* next, FloatVec* sum) {
  const std::size_t step = 2 * hn::Lanes(Bytes());
  if (run.is_fixed) {
    for (std::size_t i = run.begin; i < run.end; i += step) {
      for (std::size_t r = 0; r < kRows; ++r) {
        hwy::Prefetch(next[r] + i / 2);
        sum[r] = FixedPointStep(codes[r] + i / 2, scales + r * room + i / 16, lanes, x.digits.get() + i, sum[r]);
      }
    }
  } else {
    for (std::size_t i = run.begin; i < run.end; i += step) {
      for (std::size_t r = 0; r < kRows; ++r) {
        hwy::Prefetch(next[r] + i / 2);
        sum[r] = DotStep(codes[r] + i / 2, scales + r * room + i / 16, lanes, x.floats.get() + i, sum[r]);
      }
    }
  }
}

template <std::size_t kRows>
HWY_INLINE void DotRowOf(const std::uint8_t* const* codes, const float* scales, const Row& x, std::size_t k,
                         const std::uint8_t* const* next, float* out) {
  const Floats d;
  const std::size_t step = 2 * hn::Lanes(Bytes()), room = scale_room(k), whole = k / step * step;
  const ScaleLanes lanes;
  FloatVec sum[kRows];
  for (FloatVec& s : sum) s = hn::Zero(d);
  for (const Row::Run& run : x.runs)
    AddRun<kRows>(codes, scales, room, lanes, x, {run.begin, std::min(run.end, whole), run.is_fixed}, next, sum);
  for (std::size_t r = 0; r < kRows; ++r) {
    if (whole < k) {
      const Tail tail(codes[r], k, step);
      const std::uint8_t* begin = tail.bytes - whole / 2;
      AddRun<1>(&begin, scales + r * room, room, lanes, x, {whole, whole + step, x.runs.back().is_fixed}, &begin,
                sum + r);
    }
    out[r] = hn::GetLane(hn::SumOfLanes(d, sum[r]));
  }
}

void DotRow(const std::uint8_t* const* codes, const float* scales, std::size_t rows, const Row& x, std::size_t k,
            const std::uint8_t* const* next, float* out) {
  if (rows == dot_rows(1)) return DotRowOf<dot_rows(1)>(codes, scales, x, k, next, out);
  for (std::size_t r = 0; r < rows; ++r) DotRowOf<1>(codes + r, scales + r * scale_room(k), x, k, next + r, out + r);
}

// sum[i] += weight * x[i] for kN rows of x, whose vectors are adjacent.
template <std::size_t kN>
HWY_INLINE void Accumulate(FloatVec weight, const float* x, FloatVec* sum) {
  const Floats d;
  for (std::size_t i = 0; i < kN; ++i) sum[i] = hn::MulAdd(weight, hn::LoadU(d, x + i * hn::Lanes(d)), sum[i]);
}

// With several rows of x, scaling each weight once is cheaper than scaling each block's sum of each row.
template <std::size_t kN>
HWY_INLINE void MultiDotStep(const std::uint8_t* codes, const float* scales, const ScaleLanes& lanes, const float* x,
                             FloatVec* sum) {
  const Floats d;
  const std::size_t n = kN * hn::Lanes(d);
  const auto bytes = hn::LoadU(Bytes(), codes);
  const auto scale = hn::LoadU(d, scales);
  const auto scale_lower = hn::TableLookupLanes(scale, hn::SetTableIndices(d, lanes.lower));
  const auto scale_upper = hn::TableLookupLanes(scale, hn::SetTableIndices(d, lanes.upper));
  hn::Vec<Words> lower, upper;
  DecodePairs(LowNibbles(bytes), lower, upper);
  Accumulate<kN>(hn::Mul(First(lower), scale_lower), x, sum);
  Accumulate<kN>(hn::Mul(Second(lower), scale_lower), x + n, sum);
  Accumulate<kN>(hn::Mul(First(upper), scale_upper), x + 4 * n, sum);
  Accumulate<kN>(hn::Mul(Second(upper), scale_upper), x + 5 * n, sum);
  DecodePairs(HighNibbles(bytes), lower, upper);
  Accumulate<kN>(hn::Mul(First(lower), scale_lower), x + 2 * n, sum);
  Accumulate<kN>(hn::Mul(Second(lower), scale_lower), x + 3 * n, sum);
  Accumulate<kN>(hn::Mul(First(upper), scale_upper), x + 6 * n, sum);
  Accumulate<kN>(hn::Mul(Second(upper), scale_upper), x + 7 * n, sum);
}

// out[r * kN + i] for kRows rows of codes and kN rows of x.
template <std::size_t kRows, std::size_t kN>
HWY_INLINE void MultiDotRows(const std::uint8_t* const* codes, const float* scales, const float* x, std::size_t k,
                             float* out) {
  const Floats d;
  const std::size_t step = 2 * hn::Lanes(Bytes()), room = scale_room(k);
  const ScaleLanes lanes;
  FloatVec sum[kRows * kN];
  for (FloatVec& s : sum) s = hn::Zero(d);
  std::size_t i = 0;
  for (; i + step <= k; i += step)
    for (std::size_t r = 0; r < kRows; ++r)
      MultiDotStep<kN>(codes[r] + i / 2, scales + r * room + i / 16, lanes, x + i * kN, sum + r * kN);
  for (std::size_t r = 0; r < kRows && i < k; ++r)
    MultiDotStep<kN>(Tail(codes[r], k, step).bytes, scales + r * room + i / 16, lanes, x + i * kN, sum + r * kN);
  for (std::size_t j = 0; j < kRows * kN; ++j) out[j] = hn::GetLane(hn::SumOfLanes(d, sum[j]));
}

template <std::size_t kN>
HWY_NOINLINE void MultiDot(const std::uint8_t* const* codes, const float* scales, std::size_t rows, const float* x,
                           std::size_t k, float* out) {
  constexpr std::size_t kRows = dot_rows(kN);
  if (rows == kRows) return MultiDotRows<kRows, kN>(codes, scales, x, k, out);
  for (std::size_t r = 0; r < rows; ++r) MultiDotRows<1, kN>(codes + r, scales + r * scale_room(k), x, k, out + r * kN);
}

void Dot(const std::uint8_t* const* codes, const float* scales, std::size_t rows, const float* x, std::size_t n,
         std::size_t k, float* out) {
  if (n == 2) return MultiDot<2>(codes, scales, rows, x, k, out);
  if (n == 4) return MultiDot<4>(codes, scales, rows, x, k, out);
  return MultiDot<8>(codes, scales, rows, x, k, out);
}

void Arrange(const float* x, std::size_t k, std::size_t row, std::size_t n, float* out) {
  const std::size_t lanes = hn::Lanes(Floats()), step = 8 * lanes;
  out += row * lanes;
  for (std::size_t i = 0; i < padded(k); i += step) {
    for (std::size_t vector = 0; vector < 8; ++vector, out += n * lanes) {
      for (std::size_t lane = 0; lane < lanes; ++lane) {
        const std::size_t place = i + PlaceOfLane(vector, lane);
        out[lane] = x != nullptr && place < k ? x[place] : 0.0F;
      }
    }
  }
}

void ArrangeRow(const float* x, std::size_t k, bool exact, Row& out) {
  const std::size_t lanes = hn::Lanes(Shorts()), step = 4 * lanes;
  Arrange(x, k, 0, 1, out.floats.get());
  out.runs.clear();
  out.is_exact = true;
  std::fill_n(out.losses.get(), scale_room(k), 0.0F);
  for (std::size_t i = 0; i < k; i += step) {
    float values[kStep] = {};
    float *factors = out.factors.get() + i / 16, *losses = out.losses.get() + i / 16;
    std::int16_t digits[kStep];
    if (i < k) std::copy_n(x + i, std::min(step, k - i), values);
    bool is_fixed = true;
    for (std::size_t j = 0; j < step && is_fixed; j += 16)
      is_fixed = FixedPointOfBlock(values + j, exact, digits + j, factors + j / 16, losses + j / 16);
    if (out.runs.empty() || out.runs.back().is_fixed != is_fixed) out.runs.push_back({i, i, is_fixed});
    out.runs.back().end = i + step;
    if (!is_fixed) {
      std::fill_n(factors, step / 16, 1.0F);
      std::fill_n(losses, step / 16, 0.0F);
      continue;
    }
    for (std::size_t j = 0; j < step / 16; ++j) out.is_exact = out.is_exact && losses[j] == 0;
    for (std::size_t j = 0; j < step; ++j) out.digits.get()[i + j] = digits[PlaceOfShort(j / lanes, j % lanes)];
  }
}

float LossOfRow(const float* scales, const Row& x, std::size_t k) {
  const Floats d;
  auto sum = hn::Zero(d);
  for (std::size_t j = 0; j < k / 16; j += hn::Lanes(d))
    sum = hn::MulAdd(hn::Abs(hn::LoadU(d, scales + j)), hn::LoadU(d, x.losses.get() + j), sum);
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

void DecodeArranged(const std::uint8_t* codes, const float* scales, std::size_t k, float* out) {
  const Floats d;
  const std::size_t n = hn::Lanes(d), step = 8 * n;
  const ScaleLanes lanes;
  const Tail tail(codes, k, step);
  for (std::size_t i = 0; i < padded(k); i += step, out += step) {
    const auto bytes = i < tail.begin ? hn::LoadU(Bytes(), codes + i / 2)
                       : i < k        ? hn::Load(Bytes(), tail.bytes)
                                      : hn::Zero(Bytes());
    hn::Vec<Words> even_lower, even_upper, odd_lower, odd_upper;
    DecodePairs(LowNibbles(bytes), even_lower, even_upper);
    DecodePairs(HighNibbles(bytes), odd_lower, odd_upper);
    const auto scale = hn::LoadU(d, scales + i / 16);
    const auto lower = hn::TableLookupLanes(scale, hn::SetTableIndices(d, lanes.lower));
    const auto upper = hn::TableLookupLanes(scale, hn::SetTableIndices(d, lanes.upper));
    hn::StoreU(hn::Mul(First(even_lower), lower), d, out);
    hn::StoreU(hn::Mul(Second(even_lower), lower), d, out + n);
    hn::StoreU(hn::Mul(First(odd_lower), lower), d, out + 2 * n);
    hn::StoreU(hn::Mul(Second(odd_lower), lower), d, out + 3 * n);
    hn::StoreU(hn::Mul(First(even_upper), upper), d, out + 4 * n);
    hn::StoreU(hn::Mul(Second(even_upper), upper), d, out + 5 * n);
    hn::StoreU(hn::Mul(First(odd_upper), upper), d, out + 6 * n);
    hn::StoreU(hn::Mul(Second(odd_upper), upper), d, out + 7 * n);
  }
}

#else  // HWY_SCALAR

void Arrange(const float* x, std::size_t k, std::size_t row, std::size_t n, float* out) {
  for (std::size_t i = 0; i < padded(k); ++i) out[i * n + row] = x != nullptr && i < k ? x[i] : 0.0F;
}

void Dot(const std::uint8_t* const* codes, const float* scales, std::size_t rows, const float* x, std::size_t n,
         std::size_t k, float* out) {
  for (std::size_t r = 0; r < rows; ++r, scales += scale_room(k)) {
    for (std::size_t row = 0; row < n; ++row) {
      float sum = 0;
      for (std::size_t i = 0; i < k; ++i) sum += DecodeOne(codes[r], i) * scales[i / 16] * x[i * n + row];
      out[r * n + row] = sum;
    }
  }
}

void ArrangeRow(const float* x, std::size_t k, bool, Row& out) {
  Arrange(x, k, 0, 1, out.floats.get());
  std::fill_n(out.factors.get(), k / 16, 1.0F);
}

void DotRow(const std::uint8_t* const* codes, const float* scales, std::size_t rows, const Row& x, std::size_t k,
            const std::uint8_t* const*, float* out) {
  Dot(codes, scales, rows, x.floats.get(), 1, k, out);
}

float LossOfRow(const float*, const Row&, std::size_t) { return 0; }

void DecodeArranged(const std::uint8_t* codes, const float* scales, std::size_t k, float* out) {
  for (std::size_t i = 0; i < padded(k); ++i) out[i] = i < k ? DecodeOne(codes, i) * scales[i / 16] : 0.0F;
}

#endif

}  // namespace hopwell::cpu::nvfp4::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace hopwell::cpu::nvfp4 {

HWY_EXPORT(Arrange);
HWY_EXPORT(ArrangeRow);
HWY_EXPORT(LossOfRow);
HWY_EXPORT(Dot);
HWY_EXPORT(DotRow);
HWY_EXPORT(DecodeArranged);

void arrange(const float* x, std::size_t k, std::size_t row, std::size_t n, float* out) {
  HWY_DYNAMIC_DISPATCH(Arrange)(x, k, row, n, out);
}
void dot(const std::uint8_t* const* codes, const float* scales, std::size_t rows, const float* x, std::size_t n,
         std::size_t k, float* out) {
  HWY_DYNAMIC_DISPATCH(Dot)(codes, scales, rows, x, n, k, out);
}
float loss_of_row(const float* scales, const Row& x, std::size_t k) {
  return HWY_DYNAMIC_DISPATCH(LossOfRow)(scales, x, k);
}
void arrange_row(const float* x, std::size_t k, bool exact, Row& out) {
  HWY_DYNAMIC_DISPATCH(ArrangeRow)(x, k, exact, out);
}
void dot_row(const std::uint8_t* const* codes, const float* scales, std::size_t rows, const Row& x, std::size_t k,
             const std::uint8_t* const* next, float* out) {
  HWY_DYNAMIC_DISPATCH(DotRow)(codes, scales, rows, x, k, next, out);
}
void decode_arranged(const std::uint8_t* codes, const float* scales, std::size_t k, float* out) {
  HWY_DYNAMIC_DISPATCH(DecodeArranged)(codes, scales, k, out);
}

}  // namespace hopwell::cpu::nvfp4
#endif  // HWY_ONCE
