#include "tile/cpu/vector.hpp"

#include <hwy/cache_control.h>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tile/cpu/vector.cpp"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include "tile/cpu/vector-inl.hpp"

#include <cmath>
#include <limits>

HWY_BEFORE_NAMESPACE();
namespace hopwell::cpu::HWY_NAMESPACE {

template <class T>
void ToFloat(const T* in, float* out, std::size_t count) {
  const hn::ScalableTag<float> d;
  const std::size_t lanes = hn::Lanes(d);
  std::size_t i = 0;
  for (; i + lanes <= count; i += lanes) hn::StoreU(LoadFloat(d, in + i), d, out + i);
  for (; i < count; ++i) out[i] = hopwell::to_float(in[i]);
}

template <class T>
void FromFloat(const float* in, T* out, std::size_t count) {
  const hn::ScalableTag<float> d;
  const std::size_t lanes = hn::Lanes(d);
  std::size_t i = 0;
  for (; i + lanes <= count; i += lanes) StoreFloat(hn::LoadU(d, in + i), d, out + i);
  for (; i < count; ++i) out[i] = hopwell::rounded<T>(in[i]);
}

void ToFloatF32(const float* in, float* out, std::size_t count) { ToFloat(in, out, count); }
void ToFloatBF16(const bfloat16* in, float* out, std::size_t count) { ToFloat(in, out, count); }
void ToFloatF16(const float16* in, float* out, std::size_t count) { ToFloat(in, out, count); }
void FromFloatF32(const float* in, float* out, std::size_t count) { FromFloat(in, out, count); }
void FromFloatBF16(const float* in, bfloat16* out, std::size_t count) { FromFloat(in, out, count); }
void FromFloatF16(const float* in, float16* out, std::size_t count) { FromFloat(in, out, count); }

float Max(const float* x, std::size_t count) {
  const hn::ScalableTag<float> d;
  const std::size_t lanes = hn::Lanes(d);
  auto best = hn::Set(d, -std::numeric_limits<float>::infinity());
  std::size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto v = hn::LoadU(d, x + i);
    best = hn::IfThenElse(hn::Gt(v, best), v, best);  // false for NaN, unlike hn::Max on some targets
  }
  float result = hn::GetLane(hn::MaxOfLanes(d, best));
  for (; i < count; ++i) result = x[i] > result ? x[i] : result;
  return result;
}

// exp(factor * x - (shift + rest)). `shift` is rounded to float, `rest` is the rounding error.
template <class D>
hn::Vec<D> ScaledExp(D d, hn::Vec<D> x, float factor, float shift, float rest) {
  return SafeExp(d, hn::Sub(hn::MulSub(hn::Set(d, factor), x, hn::Set(d, shift)), hn::Set(d, rest)));
}

float ExpSum(float* x, float factor, double whole_shift, std::size_t count) {
  const hn::ScalableTag<float> d;
  const std::size_t lanes = hn::Lanes(d);
  const auto shift = static_cast<float>(whole_shift);
  const auto rest = std::isinf(shift) ? 0.0F : static_cast<float>(whole_shift - static_cast<double>(shift));
  auto sum = hn::Zero(d);
  std::size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto e = ScaledExp(d, hn::LoadU(d, x + i), factor, shift, rest);
    hn::StoreU(e, d, x + i);
    sum = hn::Add(sum, e);
  }
  float result = hn::GetLane(hn::SumOfLanes(d, sum));
  const hn::CappedTag<float, 1> one;
  for (; i < count; ++i) {
    x[i] = hn::GetLane(ScaledExp(one, hn::Set(one, x[i]), factor, shift, rest));
    result += x[i];
  }
  return result;
}

void Scale(float* x, float factor, std::size_t count) {
  const hn::ScalableTag<float> d;
  const std::size_t lanes = hn::Lanes(d);
  std::size_t i = 0;
  for (; i + lanes <= count; i += lanes) hn::StoreU(hn::Mul(hn::LoadU(d, x + i), hn::Set(d, factor)), d, x + i);
  for (; i < count; ++i) x[i] *= factor;
}

void Add(const float* x, float* y, std::size_t count) {
  const hn::ScalableTag<float> d;
  const std::size_t lanes = hn::Lanes(d);
  std::size_t i = 0;
  for (; i + lanes <= count; i += lanes) hn::StoreU(hn::Add(hn::LoadU(d, x + i), hn::LoadU(d, y + i)), d, y + i);
  for (; i < count; ++i) y[i] += x[i];
}

float Dot(const float* x, const float* y, std::size_t count) {
  const hn::ScalableTag<float> d;
  const std::size_t lanes = hn::Lanes(d);
  auto sum0 = hn::Zero(d), sum1 = hn::Zero(d);
  std::size_t i = 0;
  for (; i + 2 * lanes <= count; i += 2 * lanes) {
    sum0 = hn::MulAdd(hn::LoadU(d, x + i), hn::LoadU(d, y + i), sum0);
    sum1 = hn::MulAdd(hn::LoadU(d, x + i + lanes), hn::LoadU(d, y + i + lanes), sum1);
  }
  float result = hn::GetLane(hn::SumOfLanes(d, hn::Add(sum0, sum1)));
  for (; i < count; ++i) result += x[i] * y[i];
  return result;
}

// Scalar version of MaxOrNan.
double MaxOrNanOfFew(const float* x, float factor, std::size_t count) {
  double best = -std::numeric_limits<double>::infinity();
  for (std::size_t i = 0; i < count; ++i) {
    const double product = static_cast<double>(factor) * static_cast<double>(x[i]);
    if (std::isnan(product)) return product;
    if (product > best) best = product;
  }
  return best;
}

double MaxOrNan(const float* x, float factor, std::size_t count) {
  const hn::ScalableTag<float> d;
  const std::size_t lanes = hn::Lanes(d);
  std::size_t i = 0;
  double best = -std::numeric_limits<double>::infinity();
  // The largest product comes from the largest x, or from the largest -x, and only a NaN gives NaN, unless the factor
  // is 0 or infinite.
  if (factor != 0 && std::isfinite(factor) && count >= 2 * lanes) {
    const auto flip = hn::Set(d, factor < 0 ? -0.0F : 0.0F);
    auto best0 = hn::Set(d, -std::numeric_limits<float>::infinity()), best1 = best0;
    auto nan = hn::FirstN(d, 0);
    for (; i + 2 * lanes <= count; i += 2 * lanes) {
      const auto v0 = hn::LoadU(d, x + i), v1 = hn::LoadU(d, x + i + lanes);
      best0 = hn::Max(best0, hn::Xor(v0, flip));
      best1 = hn::Max(best1, hn::Xor(v1, flip));
      nan = hn::Or(nan, hn::Or(hn::IsNaN(v0), hn::IsNaN(v1)));
    }
    if (!hn::AllFalse(d, nan)) return std::numeric_limits<double>::quiet_NaN();
    best = static_cast<double>(std::abs(factor)) *
           static_cast<double>(hn::GetLane(hn::MaxOfLanes(d, hn::Max(best0, best1))));
  }
  const double rest = MaxOrNanOfFew(x + i, factor, count - i);
  if (!(rest <= best)) best = rest;
  return std::abs(best) > std::numeric_limits<float>::max()
             ? std::copysign(std::numeric_limits<double>::infinity(), best)
             : best;
}

void SoftmaxGradient(float* p, float* dp, float factor, float delta, float scale, std::size_t count) {
  const hn::ScalableTag<float> d;
  const std::size_t lanes = hn::Lanes(d);
  const auto vfactor = hn::Set(d, factor), vdelta = hn::Set(d, delta), vscale = hn::Set(d, scale);
  std::size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto v = hn::Mul(hn::LoadU(d, p + i), vfactor);
    hn::StoreU(v, d, p + i);
    hn::StoreU(hn::Mul(hn::Mul(v, hn::Sub(hn::LoadU(d, dp + i), vdelta)), vscale), d, dp + i);
  }
  for (; i < count; ++i) {
    p[i] *= factor;
    dp[i] = p[i] * (dp[i] - delta) * scale;
  }
}

// Prefetch distance in rows: selected rows are at arbitrary addresses, which no hardware prefetcher predicts.
constexpr std::size_t kPrefetchRows = 4;

template <class T>
void PrefetchRow(const T* row, std::size_t width) {
  for (std::size_t byte = 0; byte < width * sizeof(T); byte += 64)
    hwy::Prefetch(reinterpret_cast<const char*>(row) + byte);
}

template <class T>
void GatherRows(const T* rows, std::int64_t stride, const std::int32_t* keys, std::size_t count, std::size_t width,
                float* out) {
  for (std::size_t i = 0; i < count; ++i) {
    if (i + kPrefetchRows < count) PrefetchRow(rows + keys[i + kPrefetchRows] * stride, width);
    ToFloat(rows + keys[i] * stride, out + i * width, width);
  }
}

void GatherRowsF32(const float* rows, std::int64_t stride, const std::int32_t* keys, std::size_t count,
                   std::size_t width, float* out) {
  GatherRows(rows, stride, keys, count, width, out);
}
void GatherRowsBF16(const bfloat16* rows, std::int64_t stride, const std::int32_t* keys, std::size_t count,
                    std::size_t width, float* out) {
  GatherRows(rows, stride, keys, count, width, out);
}

void ScatterAddRows(const float* in, std::size_t in_stride, const std::int32_t* keys, std::size_t count,
                    std::size_t width, float* rows, std::int64_t stride) {
  for (std::size_t i = 0; i < count; ++i) {
    if (i + kPrefetchRows < count) PrefetchRow(rows + keys[i + kPrefetchRows] * stride, width);
    Add(in + i * in_stride, rows + keys[i] * stride, width);
  }
}

}  // namespace hopwell::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace hopwell::cpu {

HWY_EXPORT(ToFloatF32);
HWY_EXPORT(ToFloatBF16);
HWY_EXPORT(ToFloatF16);
HWY_EXPORT(FromFloatF32);
HWY_EXPORT(FromFloatBF16);
HWY_EXPORT(FromFloatF16);
HWY_EXPORT(Max);
HWY_EXPORT(ExpSum);
HWY_EXPORT(Scale);
HWY_EXPORT(Add);
HWY_EXPORT(Dot);
HWY_EXPORT(MaxOrNan);
HWY_EXPORT(SoftmaxGradient);
HWY_EXPORT(GatherRowsF32);
HWY_EXPORT(GatherRowsBF16);
HWY_EXPORT(ScatterAddRows);

void to_float(const float* in, float* out, std::size_t count) { HWY_DYNAMIC_DISPATCH(ToFloatF32)(in, out, count); }
void to_float(const bfloat16* in, float* out, std::size_t count) { HWY_DYNAMIC_DISPATCH(ToFloatBF16)(in, out, count); }
void to_float(const float16* in, float* out, std::size_t count) { HWY_DYNAMIC_DISPATCH(ToFloatF16)(in, out, count); }
void from_float(const float* in, float* out, std::size_t count) { HWY_DYNAMIC_DISPATCH(FromFloatF32)(in, out, count); }
void from_float(const float* in, bfloat16* out, std::size_t count) {
  HWY_DYNAMIC_DISPATCH(FromFloatBF16)(in, out, count);
}
void from_float(const float* in, float16* out, std::size_t count) {
  HWY_DYNAMIC_DISPATCH(FromFloatF16)(in, out, count);
}
float max(const float* x, std::size_t count) { return HWY_DYNAMIC_DISPATCH(Max)(x, count); }
float exp_sum(float* x, float factor, double shift, std::size_t count) {
  return HWY_DYNAMIC_DISPATCH(ExpSum)(x, factor, shift, count);
}
void scale(float* x, float factor, std::size_t count) { HWY_DYNAMIC_DISPATCH(Scale)(x, factor, count); }
void add(const float* x, float* y, std::size_t count) { HWY_DYNAMIC_DISPATCH(Add)(x, y, count); }
float dot(const float* x, const float* y, std::size_t count) { return HWY_DYNAMIC_DISPATCH(Dot)(x, y, count); }
double max_or_nan(const float* x, float factor, std::size_t count) {
  return HWY_DYNAMIC_DISPATCH(MaxOrNan)(x, factor, count);
}
void softmax_gradient(float* p, float* dp, float factor, float delta, float scale, std::size_t count) {
  HWY_DYNAMIC_DISPATCH(SoftmaxGradient)(p, dp, factor, delta, scale, count);
}
void gather_rows(const float* rows, std::int64_t stride, const std::int32_t* keys, std::size_t count, std::size_t width,
                 float* out) {
  HWY_DYNAMIC_DISPATCH(GatherRowsF32)(rows, stride, keys, count, width, out);
}
void gather_rows(const bfloat16* rows, std::int64_t stride, const std::int32_t* keys, std::size_t count,
                 std::size_t width, float* out) {
  HWY_DYNAMIC_DISPATCH(GatherRowsBF16)(rows, stride, keys, count, width, out);
}
void scatter_add_rows(const float* in, std::size_t in_stride, const std::int32_t* keys, std::size_t count,
                      std::size_t width, float* rows, std::int64_t stride) {
  HWY_DYNAMIC_DISPATCH(ScatterAddRows)(in, in_stride, keys, count, width, rows, stride);
}

}  // namespace hopwell::cpu
#endif  // HWY_ONCE
