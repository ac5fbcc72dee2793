// paged_attention on GPUs: a row block that lies in the shares of several CTAs.
//
// A CTA hands over at most one partial result, through its slot of the workspace; the CTA that has the end of a row
// block takes those of the CTAs before it, in the order of the keys, so that results do not depend on time.
//
// Why what is taken is whole, and is of this launch. The workspace comes with arbitrary contents, so nothing in it can
// be counted up. Every 16 bytes of a partial result carry the tag of the launch, 64 random bits, and are written and
// read by one 128-bit access, which the memory model keeps whole: what bears the tag is there. Who takes a partial
// result erases its tag, so that a captured graph, which has the same tag each time, finds none at its next launch.
//
// Why nobody waits for ever. A CTA hands over its own partial result before it takes others, and what it hands over
// depends on none of them. So every CTA that runs hands over what others wait for, and the launch is cooperative: CUDA
// runs all its CTAs at the same time, or refuses it. Besides, CTAs wait only for those with lower numbers, since the
// emulator runs CTAs one after another.
#pragma once

#include "ops/paged_attention/gpu/merge.hpp"

namespace hopwell::ops::paged_attention::HOPWELL_TARGET {

// The chunks of one row of a CTA's partial result: `half` pairs of values, then maximum and sum.
HOPWELL_DEVICE arch::Words4* slot_of(const Params& p, int cta, int row) {
  const Schedule& schedule = p.schedule;
  return schedule.partials + (int64_t{cta} * (schedule.heads * schedule.queries) + row) * (p.query.half + 1);
}
HOPWELL_DEVICE void hand_over(const Params& p, const PairIndex& at, const QuadSums& quad) {
  arch::Words4* to = slot_of(p, arch::block_index(), at.row);
  const auto store = [&](int chunk, float x, float y) {
    arch::store_relaxed_v4(
        to + chunk, {arch::bit_cast<uint32_t>(x), arch::bit_cast<uint32_t>(y), p.schedule.tag[0], p.schedule.tag[1]});
  };
  store(at.pair, quad.value[0], quad.value[1]), store(at.pair + 1, quad.value[2], quad.value[3]);
  if (at.pair == 0) store(p.query.half, quad.maximum, quad.sum);
}

HOPWELL_DEVICE bool arrived(const Params& p, const arch::Words4& chunk) {
  return chunk.w[2] == p.schedule.tag[0] && chunk.w[3] == p.schedule.tag[1];
}

// The sum of every `step`-th partial result from CTA `from` on, of `count`. Waits for pairs, maxima and sums together,
// and erases the tags of the pairs; several threads need the others.
HOPWELL_DEVICE PairSums take_partials(const Params& p, int from, int first, int count, int step, const PairIndex& at) {
  constexpr int kAhead = 4;  // loads under way, of values and of maxima and sums
  arch::Words4* slot = slot_of(p, from + first, at.row);
  const int half = p.query.half;
  const int64_t stride = int64_t{step} * (p.schedule.heads * p.schedule.queries) * (half + 1);
  PairSums pair;
  HOPWELL_NO_UNROLL
  for (int n = first; n < count; n += kAhead * step, slot += kAhead * stride) {
    arch::Words4 value[kAhead], stats[kAhead];
    HOPWELL_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      if (n + i * step >= count) continue;
      value[i] = arch::load_relaxed_v4(slot + i * stride + at.pair);
      stats[i] = arch::load_relaxed_v4(slot + i * stride + half);
    }
    HOPWELL_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      if (n + i * step >= count) continue;
      while (!arrived(p, value[i])) value[i] = arch::load_relaxed_v4(slot + i * stride + at.pair);
      while (!arrived(p, stats[i])) stats[i] = arch::load_relaxed_v4(slot + i * stride + half);
      arch::store_relaxed_v4(slot + i * stride + at.pair, {});
      const auto number = [](uint32_t bits) { return arch::bit_cast<float>(bits); };
      pair.add({number(stats[i].w[0]), number(stats[i].w[1]), {number(value[i].w[0]), number(value[i].w[1])}});
    }
  }
  return pair;
}

// The end of a row block that began in an earlier CTA. Threads that have the same pair take every `groups`-th partial
// result each.
template <class T, class PartialOf>
HOPWELL_DEVICE void finish_row_block(const Params& p, MergeStorage& s, const Partition& partition,
                                     const WarpChain& chain, const PartialOf& partial_of, int pitch) {
  const Schedule& schedule = p.schedule;
  const int thread = arch::thread_index(), groups = schedule.pair_groups;
  const PartialInfo info = s.info[0][kBegunBefore];
  const int from = partition.cta_of(info.begin), count = arch::block_index() - from;
  const int group = groups > 1 ? thread / schedule.pairs : 0;
  HOPWELL_NO_UNROLL
  for (int o = thread - group * schedule.pairs; o < schedule.pairs; o += schedule.threads) {
    const PairIndex at(p, o);
    PairSums mine, own = merge_chain<2>(chain, partial_of, pitch, at);
    if (group < groups) mine = take_partials(p, from, group, count, groups, at);
    if (groups > 1) {
      float (&sums)[4] = s.sums[thread];
      sums[0] = mine.maximum, sums[1] = mine.sum, sums[2] = mine.value[0], sums[3] = mine.value[1];
      arch::syncthreads();
      HOPWELL_NO_UNROLL
      for (int other = 1; other < groups && group == 0; ++other) {
        const float (&its)[4] = s.sums[thread + other * schedule.pairs];
        mine.add({its[0], its[1], {its[2], its[3]}});
      }
    }
    if (group > 0) continue;
    mine.add(own);
    store_sums<T>(p, info.sequence, info.row_block, at, mine);
  }
  arch::syncthreads();  // kept: who finds the tag of a sum erased waits for ever
  const int rows = schedule.heads * schedule.queries;
  HOPWELL_NO_UNROLL
  for (int i = thread; i < count * rows; i += schedule.threads)
    arch::store_relaxed_v4(slot_of(p, from, 0) + int64_t{i} * (p.query.half + 1) + p.query.half, {});
}

// What the warps have left when all are done. The last row block first: the next CTA may be waiting for it.
template <class T, class PartialOf>
HOPWELL_DEVICE void merge_cta(const Params& p, MergeStorage& s, const Partition& partition, const PartialOf& partial_of,
                              int pitch) {
  const Schedule& schedule = p.schedule;
  const WarpChains chains(p, s);
  const WarpChain before = chains.from(0, kBegunBefore);
  int row_blocks = before.count > 0 && !before.ends ? 1 : 0;
  for (uint32_t left = chains.begins; left != 0; left &= left - 1) ++row_blocks;
  HOPWELL_NO_UNROLL
  for (int o = 2 * arch::thread_index(); o < row_blocks * schedule.pairs; o += 2 * schedule.threads) {  // four values
    const int number = o / schedule.pairs;
    uint32_t left = chains.begins;
    HOPWELL_NO_UNROLL
    for (int skip = number; skip > 0; --skip) left &= ~(1U << arch::bfind(left));
    const int warp = int(arch::bfind(left));  // −1: the row block that goes through the whole share
    const WarpChain chain = warp >= 0 ? chains.from(warp, kBegunHere) : before;
    const PairIndex at(p, o - number * schedule.pairs);
    const QuadSums quad = merge_chain<4>(chain, partial_of, pitch, at);
    const PartialInfo& info = s.info[chain.warp][chain.which];
    if (chain.ends)
      store_sums<T>(p, info.sequence, info.row_block, at, quad);
    else
      hand_over(p, at, quad);
  }
  if (before.ends) finish_row_block<T>(p, s, partition, before, partial_of, pitch);
}

}  // namespace hopwell::ops::paged_attention::HOPWELL_TARGET
