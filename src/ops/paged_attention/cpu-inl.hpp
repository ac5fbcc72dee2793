// The inner loops of paged attention on the CPU: q . k and p . v over the tokens of one page, for every cache layout
// and type. Included once per target, from a file that uses foreach_target.h.
#if defined(HOPWELL_OPS_PAGED_ATTENTION_CPU_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef HOPWELL_OPS_PAGED_ATTENTION_CPU_INL_HPP_
#undef HOPWELL_OPS_PAGED_ATTENTION_CPU_INL_HPP_
#else
#define HOPWELL_OPS_PAGED_ATTENTION_CPU_INL_HPP_
#endif

#include <hwy/cache_control.h>
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
constexpr std::int64_t kLanes = 8;   // partial sums of an element of acc in layout vllm
constexpr std::int64_t kTokens = 4;  // tokens that share each load of q or acc
constexpr std::int64_t kPrefetchBytes = 4096;

// Prefetches the vectors `bytes` ahead of the vectors being read, in memory order; beyond the run's end, the vectors of
// the next run. Without it, reads that alternate with arithmetic keep too few lines in flight.
template <class T>
class Prefetcher {
 public:
  HWY_INLINE Prefetcher(const Run<T>& run, std::int64_t bytes) : d_(run.d), at_(run.next), next_(run.next) {
    const std::int64_t slot = run.strides.group < d_ ? d_ : run.strides.slot;  // vllm: a head of a page is contiguous
    const bool heads_inside = run.strides.head < slot;
    inner_ = heads_inside ? run.strides.head : slot;
    inner_count_ = heads_inside ? run.heads : run.tokens;
    outer_ = heads_inside ? slot : run.strides.head;
    const std::int64_t ahead = bytes / (d_ * static_cast<std::int64_t>(sizeof(T))), all = run.heads * run.tokens;
    if (ahead >= all) return;
    remaining_ = all - ahead;
    inner_at_ = ahead % inner_count_;
    at_ = run.data + ahead / inner_count_ * outer_ + inner_at_ * inner_;
  }
  HWY_INLINE void operator()(std::int64_t vectors) {
    for (; vectors > 0; --vectors) {
      for (std::int64_t e = 0; e < d_; e += kLine) hwy::Prefetch(at_ + e);
      at_ += inner_;
      if (++inner_at_ == inner_count_) {
        inner_at_ = 0;
        at_ += outer_ - inner_count_ * inner_;
      }
      if (--remaining_ == 0) {
        inner_at_ = 0;
        at_ = next_;
      }
    }
  }

 private:
  static constexpr auto kLine = static_cast<std::int64_t>(64 / sizeof(T));
  std::int64_t d_, inner_, inner_count_, outer_, inner_at_ = 0,
                                                 remaining_ = 0;  // remaining_: vectors of this run to prefetch
  const T *at_, *next_;
};

// Touches every 4 KiB of the next run, so that its addresses are translated before its vectors are read. The pages of a
// sequence are scattered, and a page table walk takes longer than the read.
template <class T>
HWY_INLINE void Translate(const Run<T>& run) {
  constexpr auto kPage = static_cast<std::int64_t>(4096 / sizeof(T));
  const CacheStrides& s = run.strides;
  const std::int64_t span = HWY_MAX(HWY_MAX(run.heads * s.head, run.tokens * s.slot), run.d / s.group * s.group_stride);
  if (span > 2 * run.heads * run.tokens * run.d) return;  // not contiguous
  for (std::int64_t at = 0; at < span; at += kPage) hwy::Prefetch(run.next + at);
}

// sums[i] = the sum of the lanes of vi
template <class D, class V = hn::Vec<D>>
HWY_INLINE void StoreSums(D d, V v0, V v1, V v2, V v3, float* sums) {
#if HWY_TARGET == HWY_SCALAR
  static_cast<void>(d);
  sums[0] = hn::GetLane(v0), sums[1] = hn::GetLane(v1), sums[2] = hn::GetLane(v2), sums[3] = hn::GetLane(v3);
#else
  const hn::Repartition<double, D> pairs;
  const auto v01 = hn::BitCast(pairs, hn::Add(hn::InterleaveLower(d, v0, v1), hn::InterleaveUpper(d, v0, v1)));
  const auto v23 = hn::BitCast(pairs, hn::Add(hn::InterleaveLower(d, v2, v3), hn::InterleaveUpper(d, v2, v3)));
  const auto lower = hn::BitCast(d, hn::InterleaveLower(pairs, v01, v23));
  const auto sum = hn::Add(lower, hn::BitCast(d, hn::InterleaveUpper(pairs, v01, v23)));  // four sums a 128-bit block
  if (hn::Lanes(d) == 4) return hn::StoreU(sum, d, sums);
  const hn::Half<D> half;
  hn::StoreU(hn::Add(hn::LowerHalf(half, sum), hn::UpperHalf(half, sum)), half, sums);
#endif
}

// sums[i] = qi . ki
template <class D, class T>
HWY_INLINE void Dot4(D d, std::int64_t size, const CacheStrides& s, const float* q0, const float* q1, const float* q2,
                     const float* q3, const T* k0, const T* k1, const T* k2, const T* k3, float* sums) {
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  auto s0 = hn::Zero(d), s1 = s0, s2 = s0, s3 = s0;
  for (std::int64_t g = 0, at = 0; g < size; g += s.group, at += s.group_stride) {
    for (std::int64_t e = 0; e < s.group; e += lanes) {
      s0 = hn::MulAdd(hn::LoadU(d, q0 + g + e), LoadFloat(d, k0 + at + e), s0);
      s1 = hn::MulAdd(hn::LoadU(d, q1 + g + e), LoadFloat(d, k1 + at + e), s1);
      s2 = hn::MulAdd(hn::LoadU(d, q2 + g + e), LoadFloat(d, k2 + at + e), s2);
      s3 = hn::MulAdd(hn::LoadU(d, q3 + g + e), LoadFloat(d, k3 + at + e), s3);
    }
  }
  StoreSums(d, s0, s1, s2, s3, sums);
}

// logits_a[i] = qa . ki and logits_b[i] = qb . ki: two rows of q share the loads and conversions of k.
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
  StoreSums(d, a0, a1, a2, a3, logits_a);
  StoreSums(d, b0, b1, b2, b3, logits_b);
}

// logits[row, t] = q[row] . k[t] for one head and at most kTokens tokens. `logits` is writable for kTokens.
template <class D, class T>
HWY_INLINE void ScoreTokens(D d, const Run<T>& run, const T* k, std::int64_t tokens, const RowGroup& rows,
                            const float* q, float* logits) {
  const CacheStrides& s = run.strides;
  const T* k1 = k + (tokens > 1 ? s.slot : 0);  // repeats the last token if there are fewer than four
  const T* k2 = k1 + (tokens > 2 ? s.slot : 0);
  const T* k3 = k2 + (tokens > 3 ? s.slot : 0);
  std::int64_t row = 0;
  for (; row + 2 <= rows.rows_per_head; row += 2) {
    const float* at = q + row * rows.ld_vector;
    float* to = logits + row * rows.ld_logits;
    Dot2x4(d, at, at + rows.ld_vector, run.d, s, k, k1, k2, k3, to, to + rows.ld_logits);
  }
  if (row == rows.rows_per_head) return;
  const float* last = q + row * rows.ld_vector;
  Dot4(d, run.d, s, last, last, last, last, k, k1, k2, k3, logits + row * rows.ld_logits);
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

// acc[row] += sum_t p[row, t] * v[t] for one head and at most kTokens tokens with contiguous elements.
template <class T>
HWY_INLINE void AddTokens(const Run<T>& run, const T* v, std::int64_t tokens, const RowGroup& rows, const float* p,
                          float* acc) {
  static constexpr T kZeros[kMaxD] = {};  // for missing tokens
  const std::int64_t slot = run.strides.slot;
  const T* v1 = tokens > 1 ? v + slot : kZeros;
  const T* v2 = tokens > 2 ? v1 + slot : kZeros;
  const T* v3 = tokens > 3 ? v2 + slot : kZeros;
  const auto weights = [&](std::int64_t row, float* few) {
    const float* from = p + row * rows.ld_logits;
    if (tokens == kTokens) return from;
    for (std::int64_t t = 0; t < kTokens; ++t) few[t] = t < tokens ? from[t] : 0.0F;
    return static_cast<const float*>(few);
  };
  float a[kTokens], b[kTokens];
  std::int64_t row = 0;
  for (; row + 2 <= rows.rows_per_head; row += 2) {
    float* to = acc + row * rows.ld_vector;
    Add2x4(weights(row, a), weights(row + 1, b), run.d, v, v1, v2, v3, to, to + rows.ld_vector);
  }
  if (row < rows.rows_per_head) Add1x4(weights(row, a), run.d, v, v1, v2, v3, acc + row * rows.ld_vector);
}

// acc[row, e, lane] += p[row, t] * v[e, t] for one head, if the tokens of an element are contiguous. lane = t mod
// kLanes.
template <class T>
HWY_INLINE void AddColumns(const Run<T>& run, const T* v, const RowGroup& rows, const float* p, float* acc) {
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

// logits[head, t] = q[head] . k[head, t] if a token's heads are contiguous and each has one row: token by token, so
// that memory is read sequentially.
template <class T>
HWY_INLINE void ScoreHeads(const Run<T>& run, const RowGroup& rows, const float* q, float* logits) {
  const CacheStrides& s = run.strides;
  Prefetcher<T> prefetch(run, kPrefetchBytes);
  for (std::int64_t t = 0; t < run.tokens; ++t) {
    for (std::int64_t head = 0; head < run.heads; head += 4) {
      const std::int64_t left = run.heads - head;  // repeats the last head if there are fewer than four
      const std::int64_t i1 = left > 1 ? 1 : 0, i2 = left > 2 ? 2 : i1, i3 = left > 3 ? 3 : i2;
      prefetch(i3 + 1);
      const T* k = run.data + t * s.slot + head * s.head;
      const float* from = q + head * rows.ld_vector;
      float sums[4];
      Dot4(Tag8(), run.d, s, from, from + i1 * rows.ld_vector, from + i2 * rows.ld_vector, from + i3 * rows.ld_vector,
           k, k + i1 * s.head, k + i2 * s.head, k + i3 * s.head, sums);
      float* to = logits + head * rows.ld_logits + t;
      for (std::int64_t i = 0; i <= i3; ++i) to[i * rows.ld_logits] = sums[i];
    }
  }
}

// acc[head] += sum_t p[head, t] * v[head, t] in the same order.
template <class T>
HWY_INLINE void AddHeads(const Run<T>& run, const RowGroup& rows, const float* p, float* acc) {
  const Tag8 d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const std::int64_t size = run.d;
  Prefetcher<T> prefetch(run, kPrefetchBytes);
  for (std::int64_t t = 0; t < run.tokens; ++t) {
    for (std::int64_t head = 0; head < run.heads; ++head) {
      prefetch(1);
      const auto weight = hn::Set(d, p[head * rows.ld_logits + t]);
      const T* v = run.data + t * run.strides.slot + head * run.strides.head;
      float* to = acc + head * rows.ld_vector;
      for (std::int64_t e = 0; e < size; e += lanes)
        hn::StoreU(hn::MulAdd(weight, LoadFloat(d, v + e), hn::LoadU(d, to + e)), d, to + e);
    }
  }
}

// Calls body(head, first token, tokens) over a run in blocks of kTokens, in the order of its memory.
template <class T, class Body>
HWY_INLINE void ForEachTokenBlock(const Run<T>& run, Body body) {
  const bool heads_inside = run.strides.head < run.strides.slot;
  const std::int64_t block = heads_inside ? kTokens : run.tokens;
  const std::int64_t block_bytes =
      heads_inside ? kTokens * run.heads * run.d * static_cast<std::int64_t>(sizeof(T)) : 0;
  Prefetcher<T> prefetch(run, HWY_MAX(block_bytes, kPrefetchBytes));
  for (std::int64_t first = 0; first < run.tokens; first += block) {
    for (std::int64_t head = 0; head < run.heads; ++head) {
      for (std::int64_t t = first; t < HWY_MIN(first + block, run.tokens); t += kTokens) {
        const std::int64_t tokens = HWY_MIN(kTokens, run.tokens - t);
        prefetch(tokens);
        body(head, t, tokens);
      }
    }
  }
}

// logits[head * rows_per_head + row, t] = q[head * rows_per_head + row] . k[head, t]
template <class T>
void Score(const Run<T>& run, const RowGroup& rows, const float* q, float* logits) {
  Translate(run);
  const bool whole_vectors = run.strides.group % 8 == 0;  // false for layout vllm with fp32: groups of 4
  if (whole_vectors && rows.rows_per_head == 1 && run.strides.head < run.strides.slot)
    return ScoreHeads(run, rows, q, logits);
  ForEachTokenBlock(run, [&](std::int64_t head, std::int64_t t, std::int64_t tokens) {
    const T* k = run.data + head * run.strides.head + t * run.strides.slot;
    const std::int64_t row = head * rows.rows_per_head;
    const float* from = q + row * rows.ld_vector;
    float* to = logits + row * rows.ld_logits + t;
    if (whole_vectors)
      ScoreTokens(Tag8(), run, k, tokens, rows, from, to);
    else
      ScoreTokens(Tag4(), run, k, tokens, rows, from, to);
  });
}

// acc[head * rows_per_head + row] += sum_t p[head * rows_per_head + row, t] * v[head, t]
template <class T>
void Accumulate(const Run<T>& run, const RowGroup& rows, const float* p, float* acc) {
  Translate(run);
  if (run.strides.group == 1) {
    Prefetcher<T> prefetch(run, run.tokens * run.d * static_cast<std::int64_t>(sizeof(T)));
    for (std::int64_t head = 0; head < run.heads; ++head) {
      const std::int64_t row = head * rows.rows_per_head;
      prefetch(run.tokens);
      AddColumns(run, run.data + head * run.strides.head, rows, p + row * rows.ld_logits, acc + row * rows.ld_vector);
    }
    return;
  }
  if (rows.rows_per_head == 1 && run.strides.head < run.strides.slot) return AddHeads(run, rows, p, acc);
  ForEachTokenBlock(run, [&](std::int64_t head, std::int64_t t, std::int64_t tokens) {
    const T* v = run.data + head * run.strides.head + t * run.strides.slot;
    const std::int64_t row = head * rows.rows_per_head;
    AddTokens(run, v, tokens, rows, p + row * rows.ld_logits + t, acc + row * rows.ld_vector);
  });
}

}  // namespace hopwell::ops::paged_attention::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
