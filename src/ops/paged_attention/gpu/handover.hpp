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

constexpr int kChunks = kPieceBytes / (32 * 16);  // of four values: two and two of them, maximum and sum
constexpr int kAhead = 4;                         // partial results that are loaded together

// The lane's first chunk of a piece of what a CTA hands over. Those of a warp follow one another.
HOPWELL_DEVICE arch::Words4* slot_of(const Params& p, int64_t cta, int piece) {
  return p.schedule.partials + (cta * p.schedule.pieces + piece) * (32 * kChunks) + arch::lane_index();
}
HOPWELL_DEVICE void hand_over(const Params& p, int piece, const QuadSums& quad) {
  arch::Words4* to = slot_of(p, arch::block_index(), piece);
  const auto store = [&](int chunk, float x, float y) {
    arch::store_relaxed_v4(to + 32 * chunk, {arch::bit_cast<uint32_t>(x), arch::bit_cast<uint32_t>(y),
                                             p.schedule.tag[0], p.schedule.tag[1]});
  };
  store(0, quad.value[0], quad.value[1]), store(1, quad.value[2], quad.value[3]), store(2, quad.maximum, quad.sum);
}

// Waits for a partial result and erases its tags.
HOPWELL_DEVICE QuadSums take(const Params& p, arch::Words4* from, arch::Words4 (&chunk)[kChunks]) {
  const auto arrived = [&](const arch::Words4& x) {
    return x.w[2] == p.schedule.tag[0] && x.w[3] == p.schedule.tag[1];
  };
  const auto number = [&](int i, int word) { return arch::bit_cast<float>(chunk[i].w[word]); };
  while (!(arrived(chunk[0]) && arrived(chunk[1]) && arrived(chunk[2]))) {
    HOPWELL_UNROLL
    for (int i = 0; i < kChunks; ++i) chunk[i] = arch::load_relaxed_v4(from + 32 * i);
  }
  HOPWELL_UNROLL
  for (int i = 0; i < kChunks; ++i) arch::store_relaxed_v4(from + 32 * i, {});
  return {number(2, 0), number(2, 1), {number(0, 0), number(0, 1), number(1, 0), number(1, 1)}};
}
// The sum of a piece of every `step`-th partial result from CTA `from` on, as far as this one.
HOPWELL_DEVICE QuadSums take_partials(const Params& p, int from, int step, int piece) {
  arch::Words4* slot = slot_of(p, from, piece);
  const int64_t stride = int64_t{step} * p.schedule.pieces.value * (32 * kChunks);
  QuadSums all;
  HOPWELL_NO_UNROLL
  for (int n = from; n < arch::block_index(); n += kAhead * step, slot += kAhead * stride) {
    const auto exists = [&](int i) { return n + i * step < arch::block_index(); };
    arch::Words4 chunk[kAhead][kChunks];
    HOPWELL_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      if (!exists(i)) continue;
      HOPWELL_UNROLL
      for (int k = 0; k < kChunks; ++k) chunk[i][k] = arch::load_relaxed_v4(slot + i * stride + 32 * k);
    }
    all.add(merge_partials<kAhead>(
        kAhead, [&](int i) { return exists(i) ? take(p, slot + i * stride, chunk[i]) : QuadSums{}; }));
  }
  return all;
}

// The row block that began in an earlier CTA and ends in this one. So that many partial results do not wait for each
// other, groups of warps take every `groups`-th of them each.
struct TakenRowBlock {
  int from, groups;  // the CTA that it began in
  HOPWELL_DEVICE TakenRowBlock(const Params& p, const MergeStorage& s, const Partition& partition, bool exists)
      : from(0), groups(0) {
    if (!exists) return;
    from = partition.cta_of(s.info[0][kBegunBefore].begin);
    const int wanted = (arch::block_index() - from + kAhead - 1) / kAhead;
    groups = larger(1, smaller(wanted, p.schedule.merge_groups));
  }
};
// What the groups have become: group 0 adds up all of it.
template <class T>
HOPWELL_DEVICE void add_groups(const Params& p, const MergeStorage& s, int groups) {
  const int quads = 32 * p.schedule.pieces.value, thread = arch::thread_index();
  const PairIndex at(p, 2 * thread);
  if (2 * thread >= p.schedule.pairs) return;
  QuadSums all;
  HOPWELL_NO_UNROLL
  for (int i = thread; i < groups * quads; i += quads) all.add(s.sums[i]);
  store_sums<T>(p, s.info[0][kBegunBefore].sequence, s.info[0][kBegunBefore].row_block, at, all);
}

// What the warps have left when all are done, in pieces of four values a lane. First the last row block, which the next
// CTA may be waiting for; last the one that this CTA takes, so that a warp hands over before it waits.
template <class T, class PartialOf>
HOPWELL_DEVICE void merge_cta(const Params& p, MergeStorage& s, const Partition& partition, const PartialOf& partial_of,
                              int pitch) {
  const Schedule& schedule = p.schedule;
  const int pieces = schedule.pieces.value;
  const WarpChains chains(p, s);
  const WarpChain before = chains.from(0, kBegunBefore);
  int row_blocks = before.count > 0 && !before.ends ? 1 : 0;
  for (uint32_t left = chains.begins; left != 0; left &= left - 1) ++row_blocks;
  const TakenRowBlock taken(p, s, partition, before.ends);
  HOPWELL_NO_UNROLL
  for (int i = arch::warp_index(); i < (row_blocks + taken.groups) * pieces; i += schedule.warps) {
    const int number = i / schedule.pieces, piece = i - number * pieces, group = number - row_blocks;
    const int o = 64 * piece + 2 * arch::lane_index();
    if (o >= schedule.pairs) continue;
    uint32_t left = chains.begins;
    HOPWELL_NO_UNROLL
    for (int skip = smaller(number, row_blocks); skip > 0; --skip) left &= ~(1U << arch::bfind(left));
    const int share = int(arch::bfind(left));  // −1: the row block that goes through all of them, or is taken
    WarpChain chain = share >= 0 ? chains.from(share, kBegunHere) : before;
    if (group > 0) chain.count = 0;
    const PairIndex at(p, o);
    QuadSums quad = merge_chain<4>(p, chain, partial_of, pitch, at);
    if (!chain.ends) {
      hand_over(p, piece, quad);
      continue;
    }
    if (group >= 0) quad.add(take_partials(p, taken.from + group, taken.groups, piece));
    if (group >= 0 && taken.groups > 1) {
      s.sums[(group * pieces + piece) * 32 + arch::lane_index()] = quad;
      continue;
    }
    const PartialInfo& info = s.info[chain.share][chain.which];
    store_sums<T>(p, info.sequence, info.row_block, at, quad);
  }
  if (taken.groups <= 1) return;
  arch::syncthreads();
  add_groups<T>(p, s, taken.groups);
}

}  // namespace hopwell::ops::paged_attention::HOPWELL_TARGET
