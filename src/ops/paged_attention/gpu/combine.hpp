// paged_attention on GPUs: combines the partial results of a row block that several CTAs share.
//
// A CTA publishes at most one partial result, in its slot of the workspace. The CTA that has the end of a row block
// adds the partial results of the CTAs before it, in the order of the keys, so that results do not depend on timing.
//
// Why a partial result is complete and belongs to this launch: the workspace has arbitrary contents, so it cannot hold
// a counter. Every 16 bytes of a partial result carry the tag of the launch, 64 random bits. They are written and read
// with one 128-bit access, which the memory model does not tear: 16 bytes with the tag are complete. The reader erases
// the tags, so that a captured graph, which has the same tag at every launch, finds no stale tag.
//
// Why no CTA waits forever: a CTA publishes its own partial result before it reads others, and its partial result
// depends on no other CTA. So every CTA that runs publishes its partial result. The launch is cooperative: CUDA runs
// all CTAs at the same time or rejects the launch. A CTA waits only for CTAs with lower numbers, because the emulator
// runs CTAs one after another.
#pragma once

#include "ops/paged_attention/gpu/merge.hpp"

namespace hopwell::ops::paged_attention::HOPWELL_TARGET {

constexpr int kChunks = kPieceBytes / (32 * 16);  // of a lane's four values: 2 values, 2 values, maximum and sum
constexpr int kPrefetchDistance = 4;              // partial results that are loaded together

// This lane's first chunk of a piece of a CTA's slot. The chunks of a warp are contiguous.
HOPWELL_DEVICE arch::Words4* slot_of(const Params& p, int64_t cta, int piece) {
  return p.schedule.partials + (cta * p.schedule.pieces + piece) * (32 * kChunks) + arch::lane_index();
}
HOPWELL_DEVICE void publish_partial(const Params& p, int piece, const QuadSums& quad) {
  arch::Words4* to = slot_of(p, arch::block_index(), piece);
  const auto store = [&](int chunk, float x, float y) {
    arch::store_relaxed_v4(to + 32 * chunk, {arch::bit_cast<uint32_t>(x), arch::bit_cast<uint32_t>(y),
                                             p.schedule.tag[0], p.schedule.tag[1]});
  };
  store(0, quad.value[0], quad.value[1]), store(1, quad.value[2], quad.value[3]), store(2, quad.maximum, quad.sum);
}

// Waits for a partial result and erases its tags.
HOPWELL_DEVICE QuadSums wait_for_partial(const Params& p, arch::Words4* from, arch::Words4 (&chunk)[kChunks]) {
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
// Sum of one piece of the partial results of CTAs from, from + step, …, up to the CTA before this one.
HOPWELL_DEVICE QuadSums add_partials(const Params& p, int from, int step, int piece) {
  arch::Words4* slot = slot_of(p, from, piece);
  const int64_t stride = int64_t{step} * p.schedule.pieces.value * (32 * kChunks);
  QuadSums all;
  HOPWELL_NO_UNROLL
  for (int n = from; n < arch::block_index(); n += kPrefetchDistance * step, slot += kPrefetchDistance * stride) {
    const auto exists = [&](int i) { return n + i * step < arch::block_index(); };
    arch::Words4 chunk[kPrefetchDistance][kChunks];
    HOPWELL_UNROLL
    for (int i = 0; i < kPrefetchDistance; ++i) {
      if (!exists(i)) continue;
      HOPWELL_UNROLL
      for (int k = 0; k < kChunks; ++k) chunk[i][k] = arch::load_relaxed_v4(slot + i * stride + 32 * k);
    }
    all.add(merge_partials<kPrefetchDistance>(kPrefetchDistance, [&](int i) {
      return exists(i) ? wait_for_partial(p, slot + i * stride, chunk[i]) : QuadSums{};
    }));
  }
  return all;
}

// The row block that began in an earlier CTA and ends in this one. Each of `groups` groups of warps reads
// every `groups`-th partial result, so that the loads do not wait for each other.
struct SharedRowBlock {
  int from, groups;  // the CTA in which it began
  HOPWELL_DEVICE SharedRowBlock(const Params& p, const MergeStorage& s, const Partition& partition, bool exists)
      : from(0), groups(0) {
    if (!exists) return;
    from = partition.cta_of(s.info[0][kBegunBefore].begin);
    const int wanted = (arch::block_index() - from + kPrefetchDistance - 1) / kPrefetchDistance;
    groups = larger(1, smaller(wanted, p.schedule.merge_groups));
  }
};
// Adds the sums of all groups and stores the result.
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

// Merges the warps' partial results, in pieces of four values per lane. The last row block comes first, because the
// next CTA may wait for it. The row block that began in an earlier CTA comes last, so that a warp publishes before it
// waits.
template <class T, class PartialOf>
HOPWELL_DEVICE void merge_cta(const Params& p, MergeStorage& s, const Partition& partition, const PartialOf& partial_of,
                              int pitch) {
  const Schedule& schedule = p.schedule;
  const int pieces = schedule.pieces.value;
  const WarpChains chains(p, s);
  const WarpChain before = chains.from(0, kBegunBefore);
  int row_blocks = before.count > 0 && !before.ends ? 1 : 0;
  for (uint32_t left = chains.begins; left != 0; left &= left - 1) ++row_blocks;
  const SharedRowBlock shared_block(p, s, partition, before.ends);
  HOPWELL_NO_UNROLL
  for (int i = arch::warp_index(); i < (row_blocks + shared_block.groups) * pieces; i += schedule.warps) {
    const int number = i / schedule.pieces, piece = i - number * pieces, group = number - row_blocks;
    const int o = 64 * piece + 2 * arch::lane_index();
    if (o >= schedule.pairs) continue;
    uint32_t left = chains.begins;
    HOPWELL_NO_UNROLL
    for (int skip = smaller(number, row_blocks); skip > 0; --skip) left &= ~(1U << arch::bfind(left));
    const int share = int(arch::bfind(left));  // −1: the row block that began in an earlier CTA
    WarpChain chain = share >= 0 ? chains.from(share, kBegunHere) : before;
    if (group > 0) chain.count = 0;
    const PairIndex at(p, o);
    QuadSums quad = merge_chain<4>(p, chain, partial_of, pitch, at);
    if (!chain.ends) {
      publish_partial(p, piece, quad);
      continue;
    }
    if (group >= 0) quad.add(add_partials(p, shared_block.from + group, shared_block.groups, piece));
    if (group >= 0 && shared_block.groups > 1) {
      s.sums[(group * pieces + piece) * 32 + arch::lane_index()] = quad;
      continue;
    }
    const PartialInfo& info = s.info[chain.share][chain.which];
    store_sums<T>(p, info.sequence, info.row_block, at, quad);
  }
  if (shared_block.groups <= 1) return;
  arch::syncthreads();
  add_groups<T>(p, s, shared_block.groups);
}

}  // namespace hopwell::ops::paged_attention::HOPWELL_TARGET
