// The inner loops of paged attention on the CPU: q . k and p . v over the tokens of one page, for every cache layout
// and type. Included once per target, from a file that uses foreach_target.h.
#if defined(HOPWELL_OPS_PAGED_ATTENTION_CPU_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef HOPWELL_OPS_PAGED_ATTENTION_CPU_INL_HPP_
#undef HOPWELL_OPS_PAGED_ATTENTION_CPU_INL_HPP_
#else
#define HOPWELL_OPS_PAGED_ATTENTION_CPU_INL_HPP_
#endif

#include <hwy/highway.h>

#include "ops/paged_attention/cpu_run.hpp"
#include "tile/cpu/vector-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace hopwell::ops::paged_attention::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
using cpu::HWY_NAMESPACE::LoadFloat;

// d is a multiple of 8 and a page's slot of the vllm layout holds 8 (or 4) elements: vectors of at most 8 lanes need no
// remainders.
using Tag8 = hn::CappedTag<float, 8>;
using Tag4 = hn::CappedTag<float, 4>;
constexpr std::int64_t kLanes = 8;   // of a row's partial sums in the vllm layout
constexpr std::int64_t kTokens = 4;  // that share each load of q, or of acc

// logits[0..4) = q . k0..k3
template <class D, class T>
HWY_INLINE void Dot1x4(D d, const float* q, std::int64_t size, const CacheStrides& s, const T* k0, const T* k1,
                       const T* k2, const T* k3, float* logits) {
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  auto s0 = hn::Zero(d), s1 = s0, s2 = s0, s3 = s0;
  for (std::int64_t g = 0, at = 0; g < size; g += s.group, at += s.group_stride) {
    for (std::int64_t e = 0; e < s.group; e += lanes) {
      const auto x = hn::LoadU(d, q + g + e);
      s0 = hn::MulAdd(x, LoadFloat(d, k0 + at + e), s0);
      s1 = hn::MulAdd(x, LoadFloat(d, k1 + at + e), s1);
      s2 = hn::MulAdd(x, LoadFloat(d, k2 + at + e), s2);
      s3 = hn::MulAdd(x, LoadFloat(d, k3 + at + e), s3);
    }
  }
  logits[0] = hn::GetLane(hn::SumOfLanes(d, s0));
  logits[1] = hn::GetLane(hn::SumOfLanes(d, s1));
  logits[2] = hn::GetLane(hn::SumOfLanes(d, s2));
  logits[3] = hn::GetLane(hn::SumOfLanes(d, s3));
}

// The same for two rows of q, which share the loads and conversions of k.
template <class D, class T>
HWY_INLINE void Dot2x4(D d, const float* qa, const float* qb, std::int64_t size, const CacheStrides& s, const T* k0,
                       const T* k1, const T* k2, const T* k3, float* logits_a, float* logits_b) {
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  auto a0 = hn::Zero(d), a1 = a0, a2 = a0, a3 = a0, b0 = a0, b1 = a0, b2 = a0, b3 = a0;
  for (std::int64_t g = 0, at = 0; g < size; g += s.group, at += s.group_stride) {
    for (std::int64_t e = 0; e < s.group; e += lanes) {
      const auto a = hn::LoadU(d, qa + g + e), b = hn::LoadU(d, qb + g + e);
      const auto x0 = LoadFloat(d, k0 + at + e), x1 = LoadFloat(d, k1 + at + e);
      a0 = hn::MulAdd(a, x0, a0), b0 = hn::MulAdd(b, x0, b0);
      a1 = hn::MulAdd(a, x1, a1), b1 = hn::MulAdd(b, x1, b1);
      const auto x2 = LoadFloat(d, k2 + at + e), x3 = LoadFloat(d, k3 + at + e);
      a2 = hn::MulAdd(a, x2, a2), b2 = hn::MulAdd(b, x2, b2);
      a3 = hn::MulAdd(a, x3, a3), b3 = hn::MulAdd(b, x3, b3);
    }
  }
  logits_a[0] = hn::GetLane(hn::SumOfLanes(d, a0)), logits_b[0] = hn::GetLane(hn::SumOfLanes(d, b0));
  logits_a[1] = hn::GetLane(hn::SumOfLanes(d, a1)), logits_b[1] = hn::GetLane(hn::SumOfLanes(d, b1));
  logits_a[2] = hn::GetLane(hn::SumOfLanes(d, a2)), logits_b[2] = hn::GetLane(hn::SumOfLanes(d, b2));
  logits_a[3] = hn::GetLane(hn::SumOfLanes(d, a3)), logits_b[3] = hn::GetLane(hn::SumOfLanes(d, b3));
}

// logits[row, t] = q[row] . k[t] for one head and at most kTokens tokens. `logits` is writable up to kTokens from t =
// 0.
template <class D, class T>
HWY_INLINE void ScoreTokens(D d, const Run<T>& run, const T* k, std::int64_t tokens, const Rows& rows, const float* q,
                            float* logits) {
  const CacheStrides& s = run.strides;
  const T* k1 = k + (tokens > 1 ? s.slot : 0);  // the last token again where there are fewer than four
  const T* k2 = k1 + (tokens > 2 ? s.slot : 0);
  const T* k3 = k2 + (tokens > 3 ? s.slot : 0);
  std::int64_t row = 0;
  for (; row + 2 <= rows.rows_per_head; row += 2) {
    const float* at = q + row * rows.ld_vector;
    float* to = logits + row * rows.ld_logits;
    Dot2x4(d, at, at + rows.ld_vector, run.d, s, k, k1, k2, k3, to, to + rows.ld_logits);
  }
  if (row < rows.rows_per_head)
    Dot1x4(d, q + row * rows.ld_vector, run.d, s, k, k1, k2, k3, logits + row * rows.ld_logits);
}

// acc[0..d) += p0 * v0 + ... + p3 * v3
template <class T>
HWY_INLINE void Add1x4(const float* p, std::int64_t size, const T* v0, const T* v1, const T* v2, const T* v3,
                       float* acc) {
  const Tag8 d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto p0 = hn::Set(d, p[0]), p1 = hn::Set(d, p[1]), p2 = hn::Set(d, p[2]), p3 = hn::Set(d, p[3]);
  for (std::int64_t e = 0; e < size; e += lanes) {
    auto sum = hn::MulAdd(p0, LoadFloat(d, v0 + e), hn::LoadU(d, acc + e));
    sum = hn::MulAdd(p1, LoadFloat(d, v1 + e), sum);
    sum = hn::MulAdd(p2, LoadFloat(d, v2 + e), sum);
    hn::StoreU(hn::MulAdd(p3, LoadFloat(d, v3 + e), sum), d, acc + e);
  }
}

template <class T>
HWY_INLINE void Add2x4(const float* pa, const float* pb, std::int64_t size, const T* v0, const T* v1, const T* v2,
                       const T* v3, float* acc_a, float* acc_b) {
  const Tag8 d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto a0 = hn::Set(d, pa[0]), a1 = hn::Set(d, pa[1]), a2 = hn::Set(d, pa[2]), a3 = hn::Set(d, pa[3]);
  const auto b0 = hn::Set(d, pb[0]), b1 = hn::Set(d, pb[1]), b2 = hn::Set(d, pb[2]), b3 = hn::Set(d, pb[3]);
  for (std::int64_t e = 0; e < size; e += lanes) {
    const auto x0 = LoadFloat(d, v0 + e), x1 = LoadFloat(d, v1 + e), x2 = LoadFloat(d, v2 + e),
               x3 = LoadFloat(d, v3 + e);
    auto a = hn::MulAdd(a0, x0, hn::LoadU(d, acc_a + e)), b = hn::MulAdd(b0, x0, hn::LoadU(d, acc_b + e));
    a = hn::MulAdd(a1, x1, a), b = hn::MulAdd(b1, x1, b);
    a = hn::MulAdd(a2, x2, a), b = hn::MulAdd(b2, x2, b);
    hn::StoreU(hn::MulAdd(a3, x3, a), d, acc_a + e);
    hn::StoreU(hn::MulAdd(b3, x3, b), d, acc_b + e);
  }
}

// acc[row] += sum_t p[row, t] * v[t] for one head and at most kTokens tokens whose elements lie together.
template <class T>
HWY_INLINE void AddTokens(const Run<T>& run, const T* v, std::int64_t tokens, const Rows& rows, const float* p,
                          float* acc) {
  const std::int64_t slot = run.strides.slot;
  const T* v1 = v + (tokens > 1 ? slot : 0);
  const T* v2 = v1 + (tokens > 2 ? slot : 0);
  const T* v3 = v2 + (tokens > 3 ? slot : 0);
  const auto weights = [&](std::int64_t row, float* to) {  // 0 for the repeated last token
    for (std::int64_t t = 0; t < kTokens; ++t) to[t] = t < tokens ? p[row * rows.ld_logits + t] : 0.0F;
  };
  float a[kTokens], b[kTokens];
  std::int64_t row = 0;
  for (; row + 2 <= rows.rows_per_head; row += 2) {
    weights(row, a);
    weights(row + 1, b);
    float* to = acc + row * rows.ld_vector;
    Add2x4(a, b, run.d, v, v1, v2, v3, to, to + rows.ld_vector);
  }
  if (row == rows.rows_per_head) return;
  weights(row, a);
  Add1x4(a, run.d, v, v1, v2, v3, acc + row * rows.ld_vector);
}

// acc[row, e, lane] += p[row, t] * v[e, t] for one head, with the tokens of an element lying together and t = lane mod
// kLanes.
template <class T>
HWY_INLINE void AddColumns(const Run<T>& run, const T* v, const Rows& rows, const float* p, float* acc) {
  const Tag8 d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const std::int64_t stride = run.strides.group_stride;
  for (std::int64_t row = 0; row < rows.rows_per_head; ++row, p += rows.ld_logits, acc += rows.ld_vector) {
    std::int64_t t = 0;
    for (; t + kLanes <= run.tokens; t += kLanes) {
      for (std::int64_t lane = 0; lane < kLanes; lane += lanes) {
        const auto weights = hn::LoadU(d, p + t + lane);
        for (std::int64_t e = 0; e < run.d; ++e) {
          float* to = acc + e * kLanes + lane;
          hn::StoreU(hn::MulAdd(weights, LoadFloat(d, v + e * stride + t + lane), hn::LoadU(d, to)), d, to);
        }
      }
    }
    for (; t < run.tokens; ++t)
      for (std::int64_t e = 0; e < run.d; ++e)
        acc[e * kLanes + t % kLanes] += p[t] * hopwell::to_float(v[e * stride + t]);
  }
}

// Calls body(head, first token, tokens) over a run in the order of its memory.
template <class T, class Body>
HWY_INLINE void ForEachPiece(const Run<T>& run, Body body) {
  const bool heads_inside = run.strides.head < run.strides.slot;
  const std::int64_t block = heads_inside ? kTokens : run.tokens;
  for (std::int64_t first = 0; first < run.tokens; first += block)
    for (std::int64_t head = 0; head < run.heads; ++head)
      for (std::int64_t t = first; t < HWY_MIN(first + block, run.tokens); t += kTokens)
        body(head, t, HWY_MIN(kTokens, run.tokens - t));
}

// logits[head * rows_per_head + row, t] = q[head * rows_per_head + row] . k[head, t]
template <class T>
void Score(const Run<T>& run, const Rows& rows, const float* q, float* logits) {
  ForEachPiece(run, [&](std::int64_t head, std::int64_t t, std::int64_t tokens) {
    const T* k = run.data + head * run.strides.head + t * run.strides.slot;
    const std::int64_t row = head * rows.rows_per_head;
    if (run.strides.group % 8 == 0)
      ScoreTokens(Tag8(), run, k, tokens, rows, q + row * rows.ld_vector, logits + row * rows.ld_logits + t);
    else
      ScoreTokens(Tag4(), run, k, tokens, rows, q + row * rows.ld_vector, logits + row * rows.ld_logits + t);
  });
}

// acc[head * rows_per_head + row] += sum_t p[head * rows_per_head + row, t] * v[head, t]
template <class T>
void Accumulate(const Run<T>& run, const Rows& rows, const float* p, float* acc) {
  if (run.strides.group == 1) {
    for (std::int64_t head = 0; head < run.heads; ++head) {
      const std::int64_t row = head * rows.rows_per_head;
      AddColumns(run, run.data + head * run.strides.head, rows, p + row * rows.ld_logits, acc + row * rows.ld_vector);
    }
    return;
  }
  ForEachPiece(run, [&](std::int64_t head, std::int64_t t, std::int64_t tokens) {
    const std::int64_t row = head * rows.rows_per_head;
    AddTokens(run, run.data + head * run.strides.head + t * run.strides.slot, tokens, rows,
              p + row * rows.ld_logits + t, acc + row * rows.ld_vector);
  });
}

}  // namespace hopwell::ops::paged_attention::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
