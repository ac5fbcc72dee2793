// Rows of neighbouring queries as one. A kernel that takes 64 heads at a time takes several queries that have fewer as if
// they were one query with all of their heads; its keys are the union of theirs, each gathered once.
#pragma once

#include <bit>

#include "arch/sm80/memory.hpp"
#include "arch/sm80/reduce.hpp"
#include "tile/gpu/entries.hpp"
#include "tile/gpu/warp.hpp"

namespace hopwell::tile {

inline constexpr int kMostMembers = 8;          // queries of a group: a bit each
inline constexpr int kLongestMergedRow = 4096;  // entries of one of them
inline constexpr int kMergeThreads = 512;
inline constexpr int kMergeCtasOfSm = 3;  // that run at a time on Hopper: it takes loads of many groups to fill memory

struct MergeParams {
  SelectionParams selection;
  int members;       // of a group
  int words;         // of a member's bits: MergeStorage::words_of(members)
  int* keys;         // [groups, members · topk]: the union, in ascending order but for keys that occur twice in a row
  uint8_t* holders;  // the same: bit m: member m has the key
  int* lengths;      // [groups]: keys; 0: the members are better taken one by one
  float most;        // of union / sum of the rows, that is worth it
};

/// Which of a kernel's queries are its own, where there is a kernel for groups and one for what is left.
struct MergedRows {
  const int* lengths;   // [groups]; null: there are no groups
  int members, groups;  // 1 and all for the kernel whose queries are groups
  bool wants_merged;

  HOPWELL_DEVICE bool wants(int query) const {
    if (!lengths) return true;
    const int group = query / members;
    return (group < groups && lengths[group] > 0) == wants_merged;
  }
  /// Of a group, or of the one that a query is in; 0 where they are not merged.
  HOPWELL_DEVICE int keys_of(int query) const {
    const int group = query / members;
    return group < groups ? lengths[group] : 0;
  }
};

/// What a kernel for groups is told of its rows; lengths of 0 are not its own.
inline SelectionParams merged_rows_of(const MergeParams& p) {
  SelectionParams merged = p.selection;
  merged.indices = p.keys, merged.indices_stride = int64_t{p.members} * p.selection.topk;
  merged.topk = p.members * p.selection.topk;
  merged.topk_length = p.lengths, merged.length_stride = 1;
  merged.visibility = {};
  return merged;
}

/// The part of a member's row that a warp reads; all rows are read at once. A thread has every 32nd entry.
struct PartOfRow {
  int member;
  Entries entries;
};

struct MergeStorage {
  static constexpr int kWords = 2048 * kMostMembers, kStaged = 256;

  alignas(16) uint32_t seen[kWords];             // of each member a bit for each key of a round
  uint16_t staged[kMergeThreads / 32][kStaged];  // of each warp: places of keys on their way, of 64 words
  PartOfRow parts[kMergeThreads / 32];           // of the warps
  alignas(16) int warp_sums[kMergeThreads / 32];

  // A multiple of 4, as they are cleared and counted so many at a time.
  static HOPWELL_HOST_DEVICE int words_of(int members) { return kWords / members / 4 * 4; }
};
static_assert(kMergeCtasOfSm * (sizeof(MergeStorage) + 1024) <= 228 * 1024);  // 1 KB of each CTA is the system's

/// The sum of x, the same for all of a warp, over the warps before; `total`: over all.
HOPWELL_DEVICE int sum_before_warp(MergeStorage& s, int x, int& total) {
  const int warp = arch::warp_index();
  arch::syncthreads();
  if (arch::lane_index() == 0) s.warp_sums[warp] = x;
  arch::syncthreads();
  int before = total = 0;
  HOPWELL_NO_UNROLL
  for (int first = 0; first < kMergeThreads / 32; first += 4) {
    HOPWELL_UNROLL
    for (int i = first; i < first + 4; ++i) before += i < warp ? s.warp_sums[i] : 0, total += s.warp_sums[i];
  }
  return before;
}

/// The sum of x over the CTA's threads, none of which reads former sums any more.
HOPWELL_DEVICE int sum_of_cta(MergeStorage& s, int x) {
  const int of_warp = sum_of_warp(x), warp = arch::warp_index();
  if (arch::lane_index() == 0) s.warp_sums[warp] = of_warp;
  arch::syncthreads();
  int sum = 0;
  HOPWELL_UNROLL
  for (const int sum_of_one : s.warp_sums) sum += sum_of_one;
  return sum;
}

/// A member has 2, 4 or 8 of the warps, so that there is nothing to divide; those beyond have no entries.
HOPWELL_DEVICE PartOfRow part_of_warp(const MergeParams& p, int group) {
  static_assert(kMergeThreads == 512 && kMostMembers == 8 && kLongestMergedRow <= 64 * 32 * 2);  // bits of `taken`
  const int warp = arch::warp_index(), shift = p.members > 4 ? 1 : p.members > 2 ? 2 : 3;
  const int part = warp & ((1 << shift) - 1);
  const bool has_any = warp >> shift < p.members;
  const int member = has_any ? warp >> shift : 0;
  Entries row = entries_of(p.selection, int64_t{group} * p.members + member);
  row.given = true;  // as it is: so that the compiler knows
  const int size = has_any ? (row.length + (32 << shift) - 1) >> (5 + shift) << 5 : 0;
  return {member, row.slice(part * size, size)};
}

/// What every 32nd of some entries names, from one on; -1 beyond the last.
template <int kCount>
HOPWELL_DEVICE void load_every_32nd(const Entries& entries, int first, int (&keys)[kCount]) {
  HOPWELL_UNROLL
  for (int i = 0; i < kCount; ++i) keys[i] = entries.at(first + 32 * i);
}

/// Clears `count` words, and up to three more, from one whose address is a multiple of 16.
HOPWELL_DEVICE void clear_words(uint32_t* words, int count) {
  for (int i = 4 * arch::thread_index(); i < count; i += 4 * kMergeThreads)
    *reinterpret_cast<arch::Words4*>(words + i) = {};
}

/// Words of marked keys, from `begin` to `end`.
struct WordRange {
  int begin, end;
};

/// How many keys any member has in a warp's words, for this lane's share of these. Words past the last are clear.
HOPWELL_DEVICE int count_keys(const MergeParams& p, const MergeStorage& s, const WordRange& own) {
  int count = 0;
  for (int word = own.begin + 4 * arch::lane_index(); word < own.end; word += 4 * 32) {
    arch::Words4 any = {};
    HOPWELL_NO_UNROLL
    for (int m = 0; m < p.members; ++m) {
      const auto of_member = *reinterpret_cast<const arch::Words4*>(s.seen + m * p.words + word);
      HOPWELL_UNROLL
      for (int i = 0; i < 4; ++i) any.w[i] |= of_member.w[i];
    }
    for (const uint32_t keys : any.w) count += std::popcount(keys);
  }
  return count;
}

/// A bit for each key of two words that any member has.
struct alignas(8) TwoWords {
  uint32_t w[2];
};
HOPWELL_DEVICE TwoWords keys_of_words(const MergeParams& p, const MergeStorage& s, int first_word) {
  TwoWords any = {};
  HOPWELL_NO_UNROLL
  for (int m = 0; m < p.members; ++m) {
    const auto of_member = *reinterpret_cast<const TwoWords*>(s.seen + m * p.words + first_word);
    any.w[0] |= of_member.w[0], any.w[1] |= of_member.w[1];
  }
  return any;
}

/// A bit for each member that has the key of a bit.
HOPWELL_DEVICE uint32_t holders_of_bit(const MergeParams& p, const MergeStorage& s, int bit) {
  uint32_t holders = 0;
  HOPWELL_NO_UNROLL
  for (int m = 0; m < p.members; ++m) holders |= (s.seen[m * p.words + bit / 32] >> bit % 32 & 1) << m;
  return holders;
}

// ---- a first look

inline constexpr int kSampleSlots = 1 << 15;  // a byte each

/// Whether a first look takes a key, which it does with one of eight, and its slot. The same keys are taken of all rows, wherever
/// they stand, so that rows in other orders look no less alike; by a multiplicative hash, so that keys at even distances, too, are
/// taken evenly.
HOPWELL_HOST_DEVICE uint32_t sample_hash(int key) { return uint32_t(key) * 0x9e3779b1; }
HOPWELL_HOST_DEVICE bool is_sampled(uint32_t hash) { return hash >> 29 == 0; }
HOPWELL_HOST_DEVICE uint32_t sample_slot(uint32_t hash) { return hash >> 14; }

/// Of entries that a first look takes, `again` name a slot that others do, too: whether the union is clearly too long. Keys in n
/// rows each count 1 - most · n. At the limit the sum over all keys is 0, and over a class of them its standard deviation is
/// 0.3 (two rows) to 0.95 (eight) of √entries. A group near the limit that is left by chance would have gained little.
HOPWELL_HOST_DEVICE bool is_clearly_too_long(int entries, int again, float most) {
  const float excess = float(entries - again) - most * float(entries);
  return excess > 0 && excess * excess > float(entries);
}

/// How many slots are marked of a thread's share of them.
HOPWELL_DEVICE int count_slots(const arch::Words4* slots) {
  uint32_t marks = 0;  // of every fourth slot, a byte each
  HOPWELL_UNROLL
  for (int i = 0; i < kSampleSlots / 16; i += kMergeThreads)
    for (const uint32_t of_slots : slots[i].w) marks += of_slots;
  return int(marks * 0x01010101 >> 24);
}

/// Looks at a group's sampled entries: all rows are read at once, slots are marked without a question or a branch and counted in the
/// end, and there are few barriers.
HOPWELL_DEVICE bool is_clearly_not_worth_it(MergeStorage& s, const Entries& part, float most) {
  constexpr int kAgain = 1 << 16, kBatch = 8;
  static_assert(kMostMembers * kLongestMergedRow < kAgain && kSampleSlots <= sizeof(s.seen));
  static_assert(kSampleSlots / kMergeThreads < 256);  // what count_slots can count
  const uint32_t seen = arch::shared_address(s.seen);
  auto* const slots = reinterpret_cast<arch::Words4*>(s.seen) + arch::thread_index();  // and every kMergeThreads-th
  const int lane = arch::lane_index();
  const Entries mine = part.slice(lane, part.length - lane);
  int keys[kBatch], entries = 0;
  load_every_32nd(mine, 0, keys);  // on their way while slots are cleared
  HOPWELL_NO_UNROLL
  for (int i = 32 * (kBatch + lane); i < part.length; i += 32 * 32)
    arch::prefetch_l2(part.row + i);  // the others' lines
  HOPWELL_UNROLL
  for (int i = 0; i < kSampleSlots / 16; i += kMergeThreads) slots[i] = {};
  arch::syncthreads();
  HOPWELL_NO_UNROLL
  for (int next = 32 * kBatch;; next += 32 * kBatch) {
    HOPWELL_UNROLL
    for (const int key : keys) {
      const uint32_t hash = sample_hash(key);
      const bool sampled = is_sampled(hash) && mine.counts(key);
      arch::mark_shared(sampled, seen + sample_slot(hash));
      entries += sampled;
    }
    if (next >= mine.length) break;
    load_every_32nd(mine, next, keys);
  }
  arch::syncthreads();
  const int total = sum_of_cta(s, entries + kAgain * (entries - count_slots(slots)));
  return is_clearly_too_long(total % kAgain, total / kAgain, most);
}

// ---- the full count

/// Marks a warp's keys from `first` on that have not been taken yet. Of equal ones of a row one is taken, the others wait for
/// another round. Returns whether there are such; `taken`: a bit for each of the thread's entries.
HOPWELL_DEVICE bool mark_keys(const MergeParams& p, MergeStorage& s, int first, uint64_t& taken) {
  constexpr int kBatch = 4;  // entries that are asked for at a time
  Entries part = s.parts[arch::warp_index()].entries;
  part.given = true;
  const uint32_t seen = arch::shared_address(s.seen + s.parts[arch::warp_index()].member * p.words);
  bool waits = false;
  HOPWELL_NO_UNROLL
  for (int first_of_batch = 0; 32 * first_of_batch < part.length; first_of_batch += kBatch) {
    int keys[kBatch];
    load_every_32nd(part, 32 * first_of_batch + arch::lane_index(), keys);
    HOPWELL_UNROLL
    for (int i = 0; i < kBatch; ++i) {
      const uint32_t at = uint32_t(keys[i]) - uint32_t(first);
      const int place = first_of_batch + i;
      if (!part.counts(keys[i]) || at >= 32 * uint32_t(p.words) || (taken >> place & 1)) continue;
      const uint32_t bit = 1u << at % 32;
      const bool is_second = arch::atomic_or_shared(seen + at / 32 * 4, bit) & bit;
      taken |= uint64_t(!is_second) << place;
      waits = waits || is_second;
    }
  }
  return waits;
}

/// What is marked at a time: keys from `first` on. `own`: the warp's words, whose keys lie from place `at` on in the union.
struct MergeRound {
  int first, at;
  WordRange own;
};

/// Writes the marked keys of a warp's words and who holds them: two words a lane, then a key a lane, so that lines are
/// written whole.
HOPWELL_DEVICE void write_marked_keys(const MergeParams& p, MergeStorage& s, int group, const MergeRound& round) {
  constexpr int kWords = 64;
  const int capacity = p.members * p.selection.topk, lane = arch::lane_index();
  const int64_t row = int64_t{group} * capacity;
  uint16_t* const staged = s.staged[arch::warp_index()];
  int at = round.at;
  for (int from = round.own.begin; from < round.own.end; from += kWords) {
    TwoWords any = {};
    if (from + 2 * lane < round.own.end) any = keys_of_words(p, s, from + 2 * lane);
    const int count = std::popcount(any.w[0]) + std::popcount(any.w[1]);
    const int up_to_lane = sum_up_to_lane(count), total = arch::shuffle(up_to_lane, 31);
    int place = up_to_lane - count;
    for (int first = 0; first < total; first += MergeStorage::kStaged) {
      const int end = total < first + MergeStorage::kStaged ? total : first + MergeStorage::kStaged;
      HOPWELL_UNROLL
      for (int j = 0; j < 2; ++j) {
        HOPWELL_NO_UNROLL
        for (; any.w[j] != 0 && place < end; any.w[j] &= any.w[j] - 1, ++place)
          staged[place - first] = uint16_t(32 * (2 * lane + j) + std::popcount(~any.w[j] & (any.w[j] - 1)));
      }
      arch::syncwarp();
      for (int i = first + lane; i < end && at + i < capacity; i += 32) {  // were a barrier lost, it would end here
        const int bit = 32 * from + staged[i - first];
        p.keys[row + at + i] = round.first + bit;
        p.holders[row + at + i] = uint8_t(holders_of_bit(p, s, bit));
      }
      arch::syncwarp();  // kept: a warp stages keys once more only where there are more than 32,768
    }
    at += total;
  }
}

/// The keys that any of the members may see.
HOPWELL_DEVICE KeyRange visible_keys(const MergeStorage& s) {
  uint32_t begin = ~0u, end = 0;
  HOPWELL_NO_UNROLL
  for (int warp = 0; warp < kMergeThreads / 32; ++warp) {
    const KeyRange visible = s.parts[warp].entries.visible;
    if (visible.count == 0) continue;
    begin = visible.first < begin ? visible.first : begin;
    end = visible.end() > end ? visible.end() : end;
  }
  return end == 0 ? KeyRange{} : KeyRange{begin, end - begin};
}

/// Of a group: how many keys the union has and in how many rounds they were marked, and how many of this thread's entries
/// are valid.
struct MergeTotals {
  int length = 0, rounds = 0, entries = 0;
};

/// Marks the keys of a group, as many at a time as there are bits for, a key that a row has again in a round of its own,
/// and shows each round to `look`.
template <class Look>
HOPWELL_DEVICE MergeTotals mark_in_rounds(const MergeParams& p, MergeStorage& s, const Look& look) {
  constexpr int kWarps = kMergeThreads / 32;
  const int warp = arch::warp_index();
  const KeyRange visible = visible_keys(s);
  MergeTotals totals;
  for (uint32_t first = visible.first; first < visible.end(); first += 32 * uint32_t(p.words)) {
    const uint32_t left = visible.end() - first;
    const int words = left < 32 * uint32_t(p.words) ? int(left + 31) / 32 : p.words;
    const int share = (words + 4 * kWarps - 1) / (4 * kWarps) * 4, end = share * (warp + 1);
    const WordRange own{share * warp, end < words ? end : words};
    uint64_t taken = 0;
    int waiting;
    do {
      for (int m = 0; m < p.members; ++m) clear_words(s.seen + m * p.words, words);
      arch::syncthreads();
      const bool waits = mark_keys(p, s, int(first), taken);
      arch::syncthreads();
      const int count = count_keys(p, s, own);
      // Both sums at once: there are at most 2^18 keys, in groups of two.
      constexpr int kFlag = 1 << 20;
      const int of_warp = sum_of_warp(count) + (arch::ballot(waits) ? kFlag : 0);
      int total;
      const int before = sum_before_warp(s, of_warp, total) & (kFlag - 1);
      look(MergeRound{int(first), totals.length + before, own});
      totals.length += total & (kFlag - 1), waiting = total / kFlag, ++totals.rounds;
    } while (waiting > 0);
    totals.entries +=
        std::popcount(uint32_t(taken)) + std::popcount(uint32_t(taken >> 32));  // of 64 nvcc makes nothing
  }
  return totals;
}

/// Whether all members have entries, and the union is short enough.
HOPWELL_DEVICE bool is_worth_it(const MergeParams& p, MergeStorage& s, const MergeTotals& totals) {
  const int of_warp = sum_of_warp(totals.entries), member = s.parts[arch::warp_index()].member;
  int entries, warps;
  sum_before_warp(s, of_warp, entries);
  sum_before_warp(s, int(of_warp > 0) << 4 * member, warps);  // that have any, four bits a member
  bool worth = float(totals.length) <= p.most * float(entries);
  for (int m = 0; m < p.members; ++m) worth = worth && (warps >> 4 * m & 15) != 0;
  return worth;
}

/// Merges the rows of a group, by a CTA of kMergeThreads. Groups with a member that sees no key are left alone: what its
/// rows of q and out hold is nobody's business then. First comes what takes the least time: a look at some keys, then a count
/// of all; to write them takes the most.
HOPWELL_DEVICE void merge_rows_of_group(const MergeParams& p, MergeStorage& s, int group) {
  const PartOfRow own = part_of_warp(p, group);
  if (is_clearly_not_worth_it(s, own.entries, p.most)) {
    if (arch::thread_index() == 0) p.lengths[group] = 0;
    return;
  }
  const int warp = arch::warp_index();
  if (arch::lane_index() == 0) s.parts[warp] = own;
  arch::syncthreads();
  bool writes = false;
  HOPWELL_NO_UNROLL
  do {
    MergeRound last{};
    const MergeTotals totals = mark_in_rounds(p, s, [&](const MergeRound& round) {
      last = round;
      if (!writes) return;
      write_marked_keys(p, s, group, round);
      arch::syncthreads();
    });
    if (writes) return;
    writes = is_worth_it(p, s, totals);
    if (arch::thread_index() == 0) p.lengths[group] = writes ? totals.length : 0;
    if (writes && totals.rounds == 1) return write_marked_keys(p, s, group, last);  // which is still marked
  } while (writes);
}

}  // namespace hopwell::tile
