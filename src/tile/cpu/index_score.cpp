#include "tile/cpu/index_score.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tile/cpu/index_score.cpp"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include <algorithm>
#include <array>
#include <bit>
#include <limits>

#include "tile/cpu/vector.hpp"
#include "tile/nvfp4.hpp"

HWY_BEFORE_NAMESPACE();
namespace hopwell::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
using FloatTag = hn::CappedTag<float, 16>;  // so that kLaneBlock is a multiple of the vector length on every target
constexpr float kNegInf = -std::numeric_limits<float>::infinity();

// max(x, 0), which is NaN for NaN; without kRelu, x.
template <bool kRelu, class V>
HWY_INLINE V Gated(V x) {
  const hn::DFromV<V> d;
  return kRelu ? hn::IfThenZeroElse(hn::Lt(x, hn::Zero(d)), x) : x;
}

template <bool kRelu>
HWY_INLINE void AddHeads(const float* dot, std::int64_t ld, const float* w, std::int64_t heads, float* score,
                         std::int64_t count) {
  const FloatTag d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t t = 0; t < count; t += 4 * lanes) {
    float* at = score + t;
    auto s0 = hn::LoadU(d, at), s1 = hn::LoadU(d, at + lanes);
    auto s2 = hn::LoadU(d, at + 2 * lanes), s3 = hn::LoadU(d, at + 3 * lanes);
    for (std::int64_t j = 0; j < heads; ++j) {
      const float* row = dot + j * ld + t;
      const auto weight = hn::Set(d, w[j]);
      s0 = hn::MulAdd(weight, Gated<kRelu>(hn::LoadU(d, row)), s0);
      s1 = hn::MulAdd(weight, Gated<kRelu>(hn::LoadU(d, row + lanes)), s1);
      s2 = hn::MulAdd(weight, Gated<kRelu>(hn::LoadU(d, row + 2 * lanes)), s2);
      s3 = hn::MulAdd(weight, Gated<kRelu>(hn::LoadU(d, row + 3 * lanes)), s3);
    }
    hn::StoreU(s0, d, at);
    hn::StoreU(s1, d, at + lanes);
    hn::StoreU(s2, d, at + 2 * lanes);
    hn::StoreU(s3, d, at + 3 * lanes);
  }
}

void AddHeadScores(const float* dot, std::int64_t ld, const float* w, std::int64_t heads, bool relu, float* score,
                   std::int64_t count) {
  if (relu)
    AddHeads<true>(dot, ld, w, heads, score, count);
  else
    AddHeads<false>(dot, ld, w, heads, score, count);
}

// Adds the scores of one head. ScoreFourHeads does four heads at a time, whose products hide each other's latency.
template <bool kRelu>
HWY_INLINE void ScoreHead(const float* q, float w, std::int64_t d, const float* k, std::int64_t ld, float* score) {
  const FloatTag tag;
  const std::size_t lanes = hn::Lanes(tag);
  auto low = hn::Zero(tag), high = low;
  for (std::int64_t c = 0; c < d; ++c, k += ld) {
    const auto x = hn::Set(tag, q[c]);
    low = hn::MulAdd(x, hn::LoadU(tag, k), low), high = hn::MulAdd(x, hn::LoadU(tag, k + lanes), high);
  }
  const auto weight = hn::Set(tag, w);
  hn::StoreU(hn::MulAdd(weight, Gated<kRelu>(low), hn::LoadU(tag, score)), tag, score);
  hn::StoreU(hn::MulAdd(weight, Gated<kRelu>(high), hn::LoadU(tag, score + lanes)), tag, score + lanes);
}
template <bool kRelu>
HWY_INLINE void ScoreFourHeads(const float* q, const float* w, std::int64_t d, const float* k, std::int64_t ld,
                               float* score) {
  const FloatTag tag;
  const std::size_t lanes = hn::Lanes(tag);
  auto low0 = hn::Zero(tag), low1 = low0, low2 = low0, low3 = low0;
  auto high0 = low0, high1 = low0, high2 = low0, high3 = low0;
  for (std::int64_t c = 0; c < d; ++c, k += ld) {
    const auto low = hn::LoadU(tag, k), high = hn::LoadU(tag, k + lanes);
    const auto x0 = hn::Set(tag, q[c]), x1 = hn::Set(tag, q[d + c]);
    low0 = hn::MulAdd(x0, low, low0), high0 = hn::MulAdd(x0, high, high0);
    low1 = hn::MulAdd(x1, low, low1), high1 = hn::MulAdd(x1, high, high1);
    const auto x2 = hn::Set(tag, q[2 * d + c]), x3 = hn::Set(tag, q[3 * d + c]);
    low2 = hn::MulAdd(x2, low, low2), high2 = hn::MulAdd(x2, high, high2);
    low3 = hn::MulAdd(x3, low, low3), high3 = hn::MulAdd(x3, high, high3);
  }
  const auto add = [&](const auto& sum, const auto& a, const auto& b, const auto& c, const auto& e) {
    auto total = hn::MulAdd(hn::Set(tag, w[0]), Gated<kRelu>(a), sum);
    total = hn::MulAdd(hn::Set(tag, w[1]), Gated<kRelu>(b), total);
    total = hn::MulAdd(hn::Set(tag, w[2]), Gated<kRelu>(c), total);
    return hn::MulAdd(hn::Set(tag, w[3]), Gated<kRelu>(e), total);
  };
  hn::StoreU(add(hn::LoadU(tag, score), low0, low1, low2, low3), tag, score);
  hn::StoreU(add(hn::LoadU(tag, score + lanes), high0, high1, high2, high3), tag, score + lanes);
}

template <bool kRelu>
HWY_INLINE void ScoreAllHeads(const float* q, const float* w, std::int64_t heads, std::int64_t d, const float* k,
                              std::int64_t ld, float* score, std::int64_t count) {
  std::fill_n(score, count, 0.0F);
  const auto step = static_cast<std::int64_t>(2 * hn::Lanes(FloatTag()));
  // All heads of one block of keys, one after another, while the block is in the L1 cache.
  for (std::int64_t t = 0; t < count; t += step) {
    std::int64_t j = 0;
    for (; j + 4 <= heads; j += 4) ScoreFourHeads<kRelu>(q + j * d, w + j, d, k + t, ld, score + t);
    for (; j < heads; ++j) ScoreHead<kRelu>(q + j * d, w[j], d, k + t, ld, score + t);
  }
}

void ScoreKeys(const float* q, const float* w, std::int64_t heads, std::int64_t d, const float* k, std::int64_t ld,
               bool relu, float* score, std::int64_t count) {
  if (relu)
    ScoreAllHeads<true>(q, w, heads, d, k, ld, score, count);
  else
    ScoreAllHeads<false>(q, w, heads, d, k, ld, score, count);
}

std::int64_t AppendAbove(const float* score, std::int64_t count, float threshold, std::int32_t first_key, float* scores,
                         std::int32_t* keys) {
  const FloatTag d;
  const hn::RebindToSigned<FloatTag> di;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto limit = hn::Set(d, threshold);
  std::int64_t appended = 0;
  for (std::int64_t t = 0; t < count; t += lanes) {
    const auto loaded = hn::LoadU(d, score + t);
    // Adding 0 turns -0 into +0. The order by bits would otherwise distinguish them.
    const auto s = hn::IfThenElse(hn::IsNaN(loaded), hn::Set(d, kNegInf), hn::Add(loaded, hn::Zero(d)));
    auto chosen = hn::Not(hn::Le(s, limit));
    if (count - t < lanes) chosen = hn::And(chosen, hn::FirstN(d, static_cast<std::size_t>(count - t)));
    if (hn::AllFalse(d, chosen)) continue;
    const auto key = hn::Iota(di, first_key + static_cast<std::int32_t>(t));
    hn::CompressStore(key, hn::RebindMask(di, chosen), di, keys + appended);
    appended += static_cast<std::int64_t>(hn::CompressStore(s, chosen, d, scores + appended));
  }
  return appended;
}

// Maps floats to integers of the same order. Then finds, bit by bit from the top, the largest integer that at least k
// of the numbers reach.
float KthLargest(const float* x, std::int64_t count, std::int64_t k, std::int32_t* ordered) {
  const FloatTag d;
  const hn::RebindToSigned<FloatTag> di;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t i = 0; i < count; i += lanes) {
    const auto bits = hn::BitCast(di, hn::LoadU(d, x + i));
    hn::StoreU(hn::Xor(bits, hn::And(hn::BroadcastSignBit(bits), hn::Set(di, 0x7FFFFFFF))), di, ordered + i);
  }
  std::fill(ordered + count, ordered + count + kLaneBlock, std::numeric_limits<std::int32_t>::min());
  std::int32_t best = std::numeric_limits<std::int32_t>::min();
  for (int bit = 31; bit >= 0; --bit) {
    const auto next = static_cast<std::int32_t>(static_cast<std::uint32_t>(best) + (1U << bit));
    const auto below = hn::Set(di, next - 1);
    auto reached = hn::Zero(di);  // minus one per number that reaches `next`
    for (std::int64_t i = 0; i < count; i += lanes)
      reached = hn::Add(reached, hn::VecFromMask(di, hn::Gt(hn::LoadU(di, ordered + i), below)));
    if (-hn::GetLane(hn::SumOfLanes(di, reached)) >= k) best = next;
  }
  return std::bit_cast<float>(best < 0 ? best ^ 0x7FFFFFFF : best);
}

template <bool kRelu>
HWY_INLINE float Gradient(const float* g, float w, float* dot, std::int64_t count) {
  const FloatTag d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto weight = hn::Set(d, w), zero = hn::Zero(d), one = hn::Set(d, 1.0F);
  auto sum0 = zero, sum1 = zero;
  for (std::int64_t i = 0; i < count; i += 2 * lanes) {
    const auto g0 = hn::LoadU(d, g + i), g1 = hn::LoadU(d, g + i + lanes);
    const auto x0 = hn::LoadU(d, dot + i), x1 = hn::LoadU(d, dot + i + lanes);
    const auto open0 = kRelu ? hn::Gt(x0, zero) : hn::Eq(zero, zero), open1 = kRelu ? hn::Gt(x1, zero) : open0;
    sum0 = hn::MulAdd(g0, hn::IfThenElseZero(open0, x0), sum0);
    sum1 = hn::MulAdd(g1, hn::IfThenElseZero(open1, x1), sum1);
    hn::StoreU(hn::Mul(hn::Mul(weight, g0), hn::IfThenElseZero(open0, one)), d, dot + i);
    hn::StoreU(hn::Mul(hn::Mul(weight, g1), hn::IfThenElseZero(open1, one)), d, dot + i + lanes);
  }
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(sum0, sum1)));
}

float HeadGradient(const float* g, float w, float* dot, std::int64_t count, bool relu) {
  return relu ? Gradient<true>(g, w, dot, count) : Gradient<false>(g, w, dot, count);
}

}  // namespace hopwell::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace hopwell::cpu {

HWY_EXPORT(ScoreKeys);
HWY_EXPORT(AddHeadScores);
HWY_EXPORT(AppendAbove);
HWY_EXPORT(KthLargest);
HWY_EXPORT(HeadGradient);

constexpr std::array<float, 256> kE4m3 = [] {
  std::array<float, 256> values{};
  for (unsigned code = 0; code < 256; ++code) values[code] = nvfp4::decode_e4m3(static_cast<std::uint8_t>(code));
  return values;
}();

void load(const View& from, std::int64_t offset, float* to, std::int64_t count) {
  const auto n = static_cast<std::size_t>(count);
  if (from.dtype == DType::kFloat32)
    to_float(from.as<const float>() + offset, to, n);
  else if (from.dtype == DType::kFloat8E4m3)
    std::transform(from.as<const std::uint8_t>() + offset, from.as<const std::uint8_t>() + offset + n, to,
                   [](std::uint8_t code) { return kE4m3[code]; });
  else
    to_float(from.as<const bfloat16>() + offset, to, n);
}

void store(const float* from, const View& to, std::int64_t offset, std::int64_t count) {
  const auto n = static_cast<std::size_t>(count);
  if (to.dtype == DType::kFloat32)
    from_float(from, to.as<float>() + offset, n);
  else
    from_float(from, to.as<bfloat16>() + offset, n);
}

void score_keys(const float* q, const float* w, std::int64_t heads, std::int64_t d, const float* k, std::int64_t ld,
                bool relu, float* score, std::int64_t count) {
  HWY_DYNAMIC_DISPATCH(ScoreKeys)(q, w, heads, d, k, ld, relu, score, count);
}

void add_head_scores(const float* dot, std::int64_t ld, const float* w, std::int64_t heads, bool relu, float* score,
                     std::int64_t count) {
  HWY_DYNAMIC_DISPATCH(AddHeadScores)(dot, ld, w, heads, relu, score, count);
}

std::int64_t append_above(const float* score, std::int64_t count, float threshold, std::int32_t first_key,
                          float* scores, std::int32_t* keys) {
  return HWY_DYNAMIC_DISPATCH(AppendAbove)(score, count, threshold, first_key, scores, keys);
}

float kth_largest(const float* x, std::int64_t count, std::int64_t k, std::int32_t* ordered) {
  return HWY_DYNAMIC_DISPATCH(KthLargest)(x, count, k, ordered);
}

float head_gradient(const float* g, float w, float* dot, std::int64_t count, bool relu) {
  return HWY_DYNAMIC_DISPATCH(HeadGradient)(g, w, dot, count, relu);
}

}  // namespace hopwell::cpu
#endif  // HWY_ONCE
