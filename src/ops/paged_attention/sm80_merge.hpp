// paged_attention on GPUs: what no single CTA had the whole of. The CTA with the number of the one that began a strip
// and left it unfinished merges all parts of it, in the order of the keys, so that results do not depend on time.
// Sequences without visible keys get their zeros here too.
//
// A kernel of its own, and not the last CTA to arrive: that one would have to count arrivals in memory that somebody
// has zeroed. It starts while the first kernel runs, makes the plan, and waits for its end.
#pragma once

#include "ops/paged_attention/sm80_work.hpp"

namespace hopwell::ops::paged_attention {
namespace {

struct MergeStorage {
  PlanStorage plan;
  float part[kMaxThreads][6];  // maximum, sum, four values
};

struct Merged {
  float maximum = -INFINITY, sum = 0, value[4] = {0, 0, 0, 0};
  HOPWELL_DEVICE void add(float other_maximum, float other_sum, const float (&other)[4]) {
    const float larger = fmaxf(maximum, other_maximum), base = finite_or_zero(larger);
    const float mine = arch::exp2_approx(maximum - base), its = arch::exp2_approx(other_maximum - base);
    maximum = larger, sum = sum * mine + other_sum * its;
    HOPWELL_UNROLL
    for (int i = 0; i < 4; ++i) value[i] = value[i] * mine + other[i] * its;
  }
};

// The parts of a strip: those of CTAs `first` to `last`; the first one's is its last segment.
struct Parts {
  int first, last;
  bool second_slot;  // of the first CTA: it had begun with another strip
  HOPWELL_DEVICE int64_t slot(int cta) const { return 2 * cta + (cta == first && second_slot ? 1 : 0); }
};

// Every `step`-th part from `from` on: four values of one vector.
HOPWELL_DEVICE Merged merge_parts(const Params& p, const Parts& parts, int from, int step, int v, int e) {
  constexpr int kAhead = 4;  // loads under way
  const int vectors = p.heads * p.queries;
  Merged merged;
  for (int cta = from; cta <= parts.last; cta += kAhead * step) {
    float maximum[kAhead], sum[kAhead], value[kAhead][4];
    HOPWELL_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      const int of = cta + i * step;
      maximum[i] = -INFINITY, sum[i] = 0;
      for (float& x : value[i]) x = 0;
      if (of > parts.last) continue;
      const int64_t at = parts.slot(of) * vectors + v;
      const auto stats = *reinterpret_cast<const arch::Words2*>(p.partial_stats + at * 2);
      const auto four = *reinterpret_cast<const arch::Words4*>(p.partial_out + at * p.d + e);
      maximum[i] = arch::bit_cast<float>(stats.w[0]), sum[i] = arch::bit_cast<float>(stats.w[1]);
      HOPWELL_UNROLL
      for (int w = 0; w < 4; ++w) value[i][w] = arch::bit_cast<float>(four.w[w]);
    }
    HOPWELL_UNROLL
    for (int i = 0; i < kAhead; ++i) merged.add(maximum[i], sum[i], value[i]);
  }
  return merged;
}

// Threads that have the same four values of a vector take every `groups`-th part each. All but the parts themselves is
// found out before they are waited for.
template <class T>
HOPWELL_DEVICE void merge_strip(const Params& p, MergeStorage& s, const Plan& plan, const Segment& segment) {
  const int thread = arch::thread_index(), quads = p.heads * p.queries * p.d / 4;
  const int groups = larger(1, kMaxThreads / quads), group = groups > 1 ? thread / quads : 0;
  const int64_t begin = segment.strip_begin(p);
  const int first = arch::block_index();
  const Parts parts{first, plan.cta_of(begin + segment.units - 1), plan.first_unit(first) != begin};
  for (int quad = thread - group * quads; quad < quads; quad += kMaxThreads) {
    const int v = quad * 4 / p.d, e = quad * 4 - v * p.d;
    const Vector to = vector_of(p, segment.strip, v);
    wait_for_previous();
    Merged merged;
    if (group < groups) merged = merge_parts(p, parts, first + group, groups, v, e);
    if (groups > 1) {
      float (&mine)[6] = s.part[thread];
      mine[0] = merged.maximum, mine[1] = merged.sum;
      for (int i = 0; i < 4; ++i) mine[2 + i] = merged.value[i];
      arch::syncthreads();
      for (int other = 1; other < groups && group == 0; ++other) {
        const float (&its)[6] = s.part[thread + other * quads];
        merged.add(its[0], its[1], {its[2], its[3], its[4], its[5]});
      }
    }
    if (group > 0) continue;
    for (int i = 0; i < 4; ++i)
      store_result<T>(p, segment.sequence, to, e + i, merged.maximum, merged.sum, merged.value[i]);
  }
}

template <class T>
HOPWELL_DEVICE void store_empty(const Params& p) {
  for (int n = arch::block_index(); n < p.b; n += arch::grid_size()) {
    const int context = context_of(p, n);
    if (units_of(p, keys_of_sequence(p, context)) > 0) continue;
    for (int o = arch::thread_index(); o < p.q_len * p.h_q * p.d; o += kMaxThreads) {
      const int vector = o / p.d, e = o - vector * p.d, i = vector / p.h_q;
      store_result<T>(p, n, {vector - i * p.h_q, i, true}, e, -INFINITY, 0, 0);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kMaxThreads) merge_kernel(const __grid_constant__ Params p) {
  auto& s = arch::dynamic_smem<MergeStorage>();
  Plan plan;
  Segment segment;
  let_next_start();
  store_empty<T>(p);
  if (find_share(p, s.plan, kMaxWarps, true, plan, segment)) {
    const int cta = arch::block_index();
    const int64_t begin = segment.strip_begin(p);
    if (begin >= plan.first_unit(cta) && begin + segment.units > plan.first_unit(cta + 1))
      merge_strip<T>(p, s, plan, segment);
  }
  wait_for_previous();  // always: who waits for this kernel waits for the one before it
}

}  // namespace
}  // namespace hopwell::ops::paged_attention
