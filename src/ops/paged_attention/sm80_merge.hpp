// paged_attention on GPUs: the parts of a strip become one result.
//
// A warp keeps of each strip that it does not have the whole of (maximum, sum, sum · V) in shared memory: of the strip
// that it found begun, and of the one that it leaves unfinished. When all warps are done the CTA joins their parts. A
// strip that goes on in the next CTA is passed on through the workspace, one part a CTA at most; the CTA that has the end
// of a strip takes the parts of the CTAs before it, always in the order of the keys, so that results do not depend on time.
//
//     CTA 3                                        CTA 4
//     warp 0 │ warp 1 │ warp 2 │ … │ warp 7         warp 0 │ warp 1 │ …
//     ▓▓▓▓▓▓▓│▓▓▓▒▒▒▒▒│▒▒▒▒▒▒▒▒│▒▒▒│▒▒▒▒▒▒▒▒        ▒▒▒▒▒▒▒│▒▒░░░░░░│░░
//     └ taken from CTA 2 ┘└ joined, passed on ┘     └ takes ┘
//
// The workspace comes with arbitrary contents, so nothing in it can be counted up. Every 16 bytes of a part carry the mark
// of the launch, 64 random bits, and are written and read as one: what bears the mark is there. The taker wipes the mark out,
// so that a captured graph, which has the same mark each time, finds none at its next launch. A CTA waits only for CTAs
// with lower numbers, which start before it.
#pragma once

#include "arch/sm80/memory.hpp"
#include "ops/paged_attention/sm80_work.hpp"

namespace hopwell::ops::paged_attention {
namespace {

struct Stats {
  float maximum, sum;
};

// What a warp leaves of a segment.
template <int kTheValues, int kTheVectors>
struct State {
  static constexpr int kValues = kTheValues, kVectors = kTheVectors;
  alignas(16) float values[kValues];  // [vectors][pitch]: sums of exp2(logit − maximum) · v
  Stats stats[kVectors];
};
enum : int { kBegunBefore, kBegunHere };  // which of a warp's two states

enum class Reach : int { none, on, end };  // a part that goes on in the next warp, or is the last one of its strip
struct Part {
  Reach reach;
  int sequence, strip;
  int64_t begin;  // of the strip
};

struct MergeStorage {
  Part part[kMaxWarps][2];
  float sums[kMaxThreads][4];
};

// Neighbouring values of a vector.
template <int kTheValues>
struct Sums {
  static constexpr int kValues = kTheValues;
  float maximum = -INFINITY, sum = 0, value[kValues] = {};
  HOPWELL_DEVICE void add(const Sums& other) {
    const float larger = fmaxf(maximum, other.maximum), base = finite_or_zero(larger);
    const float mine = arch::exp2_approx(maximum - base), its = arch::exp2_approx(other.maximum - base);
    maximum = larger, sum = sum * mine + other.sum * its;
    for (int i = 0; i < kValues; ++i) value[i] = value[i] * mine + other.value[i] * its;
  }
};
using Pair = Sums<2>;
using Quad = Sums<4>;
struct Place {
  int vector, pair;
  HOPWELL_DEVICE Place(const Params& p, int of_strip) : vector(of_strip / p.half), pair(of_strip - vector * p.half) {}
};

// Elements [e, end) of a result once more, if values that the query sees are not finite: those count whole, while times a
// weight that has rounded to 0, or times the low part of one in fragments, infinities become NaN.
template <class T>
HOPWELL_DEVICE void store_infinite(const Params& p, int sequence, Vector to, int e, int end) {
  const int context = context_of(p, sequence), position = context - p.q_len + to.query;
  const Keys seen = keys_of_query(p, context, to.query);
  const int64_t bias = sequence * p.bias_stride[0] + to.query * p.bias_stride[1] + to.head * p.bias_stride[2];
  T* out = static_cast<T*>(p.out) + sequence * p.out_stride[0] + to.query * p.out_stride[1] + to.head * p.out_stride[2];
  HOPWELL_NO_UNROLL
  for (; e < end; ++e) {
    float sum = 0;
    HOPWELL_NO_UNROLL
    for (int key = seen.begin; key < seen.end; ++key) {
      const int page = page_of(p, sequence, key);
      const int column = p.bias_kind == Relative::none ? -1 : column_of(p, position, key);
      if (page < 0 || (column >= 0 && meaning(load_bits(p.bias, p.bias_type, bias + column), p.bias_type) == -INFINITY))
        continue;
      const float value = to_fp32(*element_of<T>(p.v, p.v_at, page, to.head / p.group, key % p.block, e));
      if (!(fabsf(value) < INFINITY)) sum += value;
    }
    if (sum != 0) from_fp32(sum, out + e);
  }
}
// A call, for kernels that have no registers left to inline it.
template <class T>
HOPWELL_NO_INLINE void call_store_infinite(const Params& p, int sequence, Vector to, int e, int end) {
  store_infinite<T>(p, sequence, to, e, end);
}
template <int kValues>
HOPWELL_DEVICE bool may_be_infinite(const Sums<kValues>& sums) {
  float all = 0;
  for (int i = 0; i < kValues; ++i) all += sums.value[i];
  return all * 0 != 0 && sums.sum > 0 && sums.sum < INFINITY;
}

template <class T, int kValues>
HOPWELL_DEVICE void store_sums(const Params& p, int sequence, int strip, const Place& at, const Sums<kValues>& sums) {
  const Vector to = vector_of(p, strip, at.vector);
  HOPWELL_UNROLL
  for (int i = 0; i < kValues; ++i)
    store_result<T>(p, sequence, to, 2 * at.pair + i, sums.maximum, sums.sum, sums.value[i]);
  if (to.exists && may_be_infinite(sums)) call_store_infinite<T>(p, sequence, to, 2 * at.pair, 2 * at.pair + kValues);
}

// The parts of one strip that successive warps have: the first one's state is `state`, the others' their first.
struct Chain {
  int warp, state, count;
  bool ends;
};

// Which warps of the CTA have what, a bit each.
struct Chains {
  uint32_t begins, on, ends;
  HOPWELL_DEVICE explicit Chains(const Params& p, const MergeStorage& s) {
    const int lane = arch::lane_index();
    const bool exists = lane < p.warps;
    const Reach before = exists ? s.part[lane][kBegunBefore].reach : Reach::none;
    begins = arch::ballot(exists && s.part[lane][kBegunHere].reach != Reach::none);
    on = arch::ballot(before == Reach::on), ends = arch::ballot(before == Reach::end);
  }
  HOPWELL_DEVICE Chain from(int warp, int state) const {
    const int next = state == kBegunBefore ? warp : warp + 1;  // the first that it may go on in
    const uint32_t stops = ~(on >> next);
    const int last = next + int(arch::bfind(stops & (0U - stops)));
    const bool has_end = ends >> last & 1;
    return {warp, state, last - warp + (has_end ? 1 : 0), has_end};
  }
};

// One sum out of several, at most kMost. All loads are under way together: the code runs once, so that its length in time is
// that of what waits for what.
template <int kMost, class PartOf>
HOPWELL_DEVICE auto join_parts(int count, const PartOf& part_of) {
  decltype(part_of(0)) part[kMost], all;
  HOPWELL_UNROLL
  for (int i = 0; i < kMost; ++i)
    if (i < count) part[i] = part_of(i);
  HOPWELL_UNROLL
  for (int i = 0; i < kMost; ++i) all.maximum = fmaxf(all.maximum, part[i].maximum);
  const float base = finite_or_zero(all.maximum);
  HOPWELL_UNROLL
  for (int i = 0; i < kMost; ++i) {
    const float weight = arch::exp2_approx(part[i].maximum - base);
    all.sum += weight * part[i].sum;
    for (int e = 0; e < all.kValues; ++e) all.value[e] += weight * part[i].value[e];
  }
  return all;
}

// What a state has of kValues values.
template <int kValues, class State>
HOPWELL_DEVICE Sums<kValues> sums_of_state(const State& state, int pitch, const Place& at) {
  struct alignas(4 * kValues) Values {
    float of[kValues];
  };
  const Stats stats = state.stats[at.vector];
  const auto values = *reinterpret_cast<const Values*>(&state.values[at.vector * pitch + 2 * at.pair]);
  Sums<kValues> sums{stats.maximum, stats.sum};
  for (int e = 0; e < kValues; ++e) sums.value[e] = values.of[e];
  return sums;
}

// Whose states they are: `state_of(warp, which)`.
template <int kValues, class StateOf>
HOPWELL_DEVICE Sums<kValues> sums_of_chain(const Chain& chain, const StateOf& state_of, int pitch, const Place& at) {
  return join_parts<kMaxWarps>(chain.count, [&](int i) {
    return sums_of_state<kValues>(state_of(chain.warp + i, i == 0 ? chain.state : kBegunBefore), pitch, at);
  });
}

// ---- from CTA to CTA ------------------------------------------------------------------------------------------------

// The pieces of a vector of a CTA's part: `half` pairs of values, then maximum and sum.
HOPWELL_DEVICE arch::Words4* part_of(const Params& p, int cta, int vector) {
  return p.parts + (int64_t{cta} * (p.heads * p.queries) + vector) * (p.half + 1);
}
HOPWELL_DEVICE void pass_on(const Params& p, const Place& at, const Quad& quad) {
  arch::Words4* to = part_of(p, arch::block_index(), at.vector);
  const auto store = [&](int piece, float x, float y) {
    arch::store_relaxed_v4(to + piece,
                           {arch::bit_cast<uint32_t>(x), arch::bit_cast<uint32_t>(y), p.mark[0], p.mark[1]});
  };
  store(at.pair, quad.value[0], quad.value[1]), store(at.pair + 1, quad.value[2], quad.value[3]);
  if (at.pair == 0) store(p.half, quad.maximum, quad.sum);
}

HOPWELL_DEVICE bool arrived(const Params& p, const arch::Words4& piece) {
  return piece.w[2] == p.mark[0] && piece.w[3] == p.mark[1];
}

// Every `step`-th part from CTA `from` on, of `count`. Waits for pairs, maxima and sums together, and wipes out the marks of
// the pairs; several threads need the others.
HOPWELL_DEVICE Pair take_parts(const Params& p, int from, int first, int count, int step, const Place& at) {
  constexpr int kAhead = 4;  // loads under way, of values and of maxima and sums
  arch::Words4* vector = part_of(p, from + first, at.vector);
  const int64_t stride = int64_t{step} * (p.heads * p.queries) * (p.half + 1);
  Pair pair;
  HOPWELL_NO_UNROLL
  for (int n = first; n < count; n += kAhead * step, vector += kAhead * stride) {
    arch::Words4 value[kAhead], stats[kAhead];
    HOPWELL_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      if (n + i * step >= count) continue;
      value[i] = arch::load_relaxed_v4(vector + i * stride + at.pair);
      stats[i] = arch::load_relaxed_v4(vector + i * stride + p.half);
    }
    HOPWELL_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      if (n + i * step >= count) continue;
      while (!arrived(p, value[i])) value[i] = arch::load_relaxed_v4(vector + i * stride + at.pair);
      while (!arrived(p, stats[i])) stats[i] = arch::load_relaxed_v4(vector + i * stride + p.half);
      arch::store_relaxed_v4(vector + i * stride + at.pair, {});
      const auto number = [](uint32_t bits) { return arch::bit_cast<float>(bits); };
      pair.add({number(stats[i].w[0]), number(stats[i].w[1]), {number(value[i].w[0]), number(value[i].w[1])}});
    }
  }
  return pair;
}

// The end of a strip that began in an earlier CTA. Threads that have the same pair take every `groups`-th part each.
template <class T, class StateOf>
HOPWELL_DEVICE void take_strip(const Params& p, MergeStorage& s, const Plan& plan, const Chain& chain,
                               const StateOf& state_of, int pitch) {
  const int thread = arch::thread_index(), groups = p.groups;
  const Part part = s.part[0][kBegunBefore];
  const int from = plan.cta_of(part.begin), count = arch::block_index() - from;
  const int group = groups > 1 ? thread / p.pairs : 0;
  HOPWELL_NO_UNROLL
  for (int of_strip = thread - group * p.pairs; of_strip < p.pairs; of_strip += p.threads) {
    const Place at(p, of_strip);
    Pair mine, own = sums_of_chain<2>(chain, state_of, pitch, at);
    if (group < groups) mine = take_parts(p, from, group, count, groups, at);
    if (groups > 1) {
      float (&sums)[4] = s.sums[thread];
      sums[0] = mine.maximum, sums[1] = mine.sum, sums[2] = mine.value[0], sums[3] = mine.value[1];
      arch::syncthreads();
      HOPWELL_NO_UNROLL
      for (int other = 1; other < groups && group == 0; ++other) {
        const float (&its)[4] = s.sums[thread + other * p.pairs];
        mine.add({its[0], its[1], {its[2], its[3]}});
      }
    }
    if (group > 0) continue;
    mine.add(own);
    store_sums<T>(p, part.sequence, part.strip, at, mine);
  }
  arch::syncthreads();  // kept: who finds the mark of a sum wiped out waits for ever
  const int vectors = p.heads * p.queries;
  HOPWELL_NO_UNROLL
  for (int i = thread; i < count * vectors; i += p.threads)
    arch::store_relaxed_v4(part_of(p, from, 0) + int64_t{i} * (p.half + 1) + p.half, {});
}

// What the warps have left when all are done. The last strip first: the next CTA may be waiting for it.
template <class T, class StateOf>
HOPWELL_DEVICE void join(const Params& p, MergeStorage& s, const Plan& plan, const StateOf& state_of, int pitch) {
  const Chains chains(p, s);
  const Chain before = chains.from(0, kBegunBefore);
  int strips = before.count > 0 && !before.ends ? 1 : 0;
  for (uint32_t left = chains.begins; left != 0; left &= left - 1) ++strips;
  HOPWELL_NO_UNROLL
  for (int o = 2 * arch::thread_index(); o < strips * p.pairs; o += 2 * p.threads) {  // four values
    const int number = o / p.pairs;
    uint32_t left = chains.begins;
    HOPWELL_NO_UNROLL
    for (int skip = number; skip > 0; --skip) left &= ~(1U << arch::bfind(left));
    const int warp = int(arch::bfind(left));  // −1: the strip that goes through the whole share
    const Chain chain = warp >= 0 ? chains.from(warp, kBegunHere) : before;
    const Place at(p, o - number * p.pairs);
    const Quad quad = sums_of_chain<4>(chain, state_of, pitch, at);
    const Part& part = s.part[chain.warp][chain.state];
    if (chain.ends)
      store_sums<T>(p, part.sequence, part.strip, at, quad);
    else
      pass_on(p, at, quad);
  }
  if (before.ends) take_strip<T>(p, s, plan, before, state_of, pitch);
}

// Zeros for the sequences of which no query sees a key.
template <class T>
HOPWELL_DEVICE void store_empty(const Params& p) {
  for (int n = arch::block_index(); n < p.b; n += arch::grid_size()) {
    const int context = context_of(p, n);
    if (units_of(p, keys_of_sequence(p, context)) > 0) continue;
    for (int o = arch::thread_index(); o < p.q_len * p.h_q * p.d; o += p.threads) {
      const int vector = o / p.d, e = o - vector * p.d, i = vector / p.h_q;
      store_result<T>(p, n, {vector - i * p.h_q, i, true}, e, -INFINITY, 0, 0);
    }
  }
}

}  // namespace
}  // namespace hopwell::ops::paged_attention
