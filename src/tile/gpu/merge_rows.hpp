// Query groups: merges the index rows of adjacent queries. A kernel that processes 64 heads per tile treats several
// queries with fewer heads as one query with all of their heads. Its keys are the union of theirs; each is gathered
// once.
#pragma once

#include <bit>

#include "arch/sm80/memory.hpp"
#include "arch/sm80/reduce.hpp"
#include "tile/gpu/entries.hpp"
#include "tile/gpu/warp.hpp"

namespace hopwell::tile {

inline constexpr int kMostMembers = 8;          // queries per group; a member mask has one bit each
inline constexpr int kLongestMergedRow = 4096;  // entries of the longest row that can be merged
inline constexpr int kMergeThreads = 512;
inline constexpr int kMergeCtasOfSm = 3;  // CTAs per SM on Hopper: saturating memory takes the loads of many groups

struct MergeParams {
  SelectionParams selection;
  int members;            // queries per group
  int words;              // words of a member's key bits: MergeStorage::words_of(members)
  int* keys;              // [groups, members · topk]: the union, ascending except for keys that occur twice in a row
  uint8_t* member_masks;  // member masks, same shape: bit m is set if member m has the key
  int* lengths;           // [groups]: number of keys; 0: the members are processed ungrouped
  float most;             // largest ratio of union length to sum of row lengths for which merging pays
};

/// Selects a kernel's own queries if one kernel processes groups and another one ungrouped queries.
struct MergedRows {
  const int* lengths;   // [groups]; null: no grouping
  int members, groups;  // for the kernel that processes groups as queries: 1 and the number of groups
  bool wants_merged;

  HOPWELL_DEVICE bool wants(int query) const {
    if (!lengths) return true;
    const int group = query / members;
    return (group < groups && lengths[group] > 0) == wants_merged;
  }
  /// Number of keys of a group, or of the group that contains a query; 0 if the group is not merged.
  HOPWELL_DEVICE int keys_of(int query) const {
    const int group = query / members;
    return group < groups ? lengths[group] : 0;
  }
};

/// The selection that a group kernel uses. Groups with length 0 are not its own.
inline SelectionParams merged_rows_of(const MergeParams& p) {
  SelectionParams merged = p.selection;
  merged.indices = p.keys, merged.indices_stride = int64_t{p.members} * p.selection.topk;
  merged.topk = p.members * p.selection.topk;
  merged.lengths = p.lengths, merged.length_stride = 1;
  merged.visibility = {};
  return merged;
}

/// The part of a member's row that one warp reads; all rows are read at the same time. A thread reads every 32nd entry.
struct PartOfRow {
  int member;
  Entries entries;
};

struct MergeStorage {
  static constexpr int kWords = 2048 * kMostMembers, kStaged = 256;

  alignas(16) uint32_t seen[kWords];             // per member one bit for each key of a round
  uint16_t staged[kMergeThreads / 32][kStaged];  // per warp: offsets of the keys to be written next, of 64 words
  PartOfRow parts[kMergeThreads / 32];           // per warp
  alignas(16) int warp_sums[kMergeThreads / 32];

  // A multiple of 4, because words are cleared and counted four at a time.
  static HOPWELL_HOST_DEVICE int words_of(int members) { return kWords / members / 4 * 4; }
};
static_assert(kMergeCtasOfSm * (sizeof(MergeStorage) + 1024) <= 228 * 1024);  // the system reserves 1 KB per CTA

/// Sum of x over the warps before this one; x is equal in all lanes of a warp. `total`: sum over all warps.
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

/// Sum of x over the CTA's threads. No thread may still read the previous sums.
HOPWELL_DEVICE int sum_of_cta(MergeStorage& s, int x) {
  const int of_warp = sum_of_warp(x), warp = arch::warp_index();
  if (arch::lane_index() == 0) s.warp_sums[warp] = of_warp;
  arch::syncthreads();
  int sum = 0;
  HOPWELL_UNROLL
  for (const int sum_of_one : s.warp_sums) sum += sum_of_one;
  return sum;
}

/// 2, 4 or 8 warps read a member's row, so that no division is needed. Warps beyond that have no entries.
HOPWELL_DEVICE PartOfRow part_of_warp(const MergeParams& p, int group) {
  static_assert(kMergeThreads == 512 && kMostMembers == 8 && kLongestMergedRow <= 64 * 32 * 2);  // bits of `taken`
  const int warp = arch::warp_index(), shift = p.members > 4 ? 1 : p.members > 2 ? 2 : 3;
  const int part = warp & ((1 << shift) - 1);
  const bool has_any = warp >> shift < p.members;
  const int member = has_any ? warp >> shift : 0;
  Entries row = entries_of(p.selection, int64_t{group} * p.members + member);
  row.has_indices = true;  // unmodified; tells the compiler that it is true
  const int size = has_any ? (row.length + (32 << shift) - 1) >> (5 + shift) << 5 : 0;
  return {member, row.slice(part * size, size)};
}

/// Loads every 32nd entry from `first` on; -1 beyond the last.
template <int kCount>
HOPWELL_DEVICE void load_every_32nd(const Entries& entries, int first, int (&keys)[kCount]) {
  HOPWELL_UNROLL
  for (int i = 0; i < kCount; ++i) keys[i] = entries.at(first + 32 * i);
}

/// Clears `count` words, rounded up to a multiple of 4. The address of the first is a multiple of 16.
HOPWELL_DEVICE void clear_words(uint32_t* words, int count) {
  for (int i = 4 * arch::thread_index(); i < count; i += 4 * kMergeThreads)
    *reinterpret_cast<arch::Words4*>(words + i) = {};
}

/// Words of marked keys, from `begin` to `end`.
struct WordRange {
  int begin, end;
};

/// Number of keys that any member has in this lane's part of a warp's words. Words past the last one are zero.
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

/// One bit for each key of two words that any member has.
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

/// Member mask of the key at `bit`.
HOPWELL_DEVICE uint32_t member_mask_of_bit(const MergeParams& p, const MergeStorage& s, int bit) {
  uint32_t member_mask = 0;
  HOPWELL_NO_UNROLL
  for (int m = 0; m < p.members; ++m) member_mask |= (s.seen[m * p.words + bit / 32] >> bit % 32 & 1) << m;
  return member_mask;
}

// ---- sampling

inline constexpr int kSampleSlots = 1 << 15;  // one byte per slot

/// Whether the sample contains a key (one in eight does), and the key's slot. Rows sample the same keys, so that the
/// overlap of rows in different orders is not underestimated. The hash is multiplicative, so that keys at even
/// distances are sampled evenly too.
HOPWELL_HOST_DEVICE uint32_t sample_hash(int key) { return uint32_t(key) * 0x9e3779b1; }
HOPWELL_HOST_DEVICE bool is_sampled(uint32_t hash) { return hash >> 29 == 0; }
HOPWELL_HOST_DEVICE uint32_t sample_slot(uint32_t hash) { return hash >> 14; }

/// Of `entries` sampled entries, `again` hit a slot that another entry marks too. Returns whether the union is clearly
/// too long. A key in n rows counts 1 - most · n. At the limit, the sum over all keys is 0; over the sampled keys its
/// standard deviation is 0.3 (two rows) to 0.95 (eight rows) times √entries. A group near the limit that is rejected by
/// chance would have gained little.
HOPWELL_HOST_DEVICE bool is_clearly_too_long(int entries, int again, float most) {
  const float excess = float(entries - again) - most * float(entries);
  return excess > 0 && excess * excess > float(entries);
}

/// Number of marked slots among this thread's slots.
HOPWELL_DEVICE int count_slots(const arch::Words4* slots) {
  uint32_t marks = 0;  // four counters of one byte, for every fourth slot
  HOPWELL_UNROLL
  for (int i = 0; i < kSampleSlots / 16; i += kMergeThreads)
    for (const uint32_t of_slots : slots[i].w) marks += of_slots;
  return int(marks * 0x01010101 >> 24);
}

/// Samples a group's entries. All rows are read at the same time, slots are marked without tests or branches and
/// counted at the end, and there are few barriers.
HOPWELL_DEVICE bool is_clearly_not_worth_it(MergeStorage& s, const Entries& part, float most) {
  constexpr int kAgain = 1 << 16, kUnroll = 8;
  static_assert(kMostMembers * kLongestMergedRow < kAgain && kSampleSlots <= sizeof(s.seen));
  static_assert(kSampleSlots / kMergeThreads < 256);  // the range of count_slots' counters
  const uint32_t seen = arch::shared_address(s.seen);
  auto* const slots = reinterpret_cast<arch::Words4*>(s.seen) + arch::thread_index();  // then every kMergeThreads-th
  const int lane = arch::lane_index();
  const Entries mine = part.slice(lane, part.length - lane);
  int keys[kUnroll], entries = 0;
  load_every_32nd(mine, 0, keys);  // in flight while slots are cleared
  HOPWELL_NO_UNROLL
  for (int i = 32 * (kUnroll + lane); i < part.length; i += 32 * 32)
    arch::prefetch_l2(part.row + i);  // the lines of the other entries
  HOPWELL_UNROLL
  for (int i = 0; i < kSampleSlots / 16; i += kMergeThreads) slots[i] = {};
  arch::syncthreads();
  HOPWELL_NO_UNROLL
  for (int next = 32 * kUnroll;; next += 32 * kUnroll) {
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

/// Marks a warp's keys from `first` on that are not marked yet. Of equal keys of a row one is marked; the others wait
/// for another round. Returns whether any wait. `taken`: one bit for each of the thread's entries.
HOPWELL_DEVICE bool mark_keys(const MergeParams& p, MergeStorage& s, int first, uint64_t& taken) {
  constexpr int kUnroll = 4;  // entries loaded at a time
  Entries part = s.parts[arch::warp_index()].entries;
  part.has_indices = true;
  const uint32_t seen = arch::shared_address(s.seen + s.parts[arch::warp_index()].member * p.words);
  bool waits = false;
  HOPWELL_NO_UNROLL
  for (int first_entry_of_step = 0; 32 * first_entry_of_step < part.length; first_entry_of_step += kUnroll) {
    int keys[kUnroll];
    load_every_32nd(part, 32 * first_entry_of_step + arch::lane_index(), keys);
    HOPWELL_UNROLL
    for (int i = 0; i < kUnroll; ++i) {
      const uint32_t at = uint32_t(keys[i]) - uint32_t(first);
      const int place = first_entry_of_step + i;
      if (!part.counts(keys[i]) || at >= 32 * uint32_t(p.words) || (taken >> place & 1)) continue;
      const uint32_t bit = 1u << at % 32;
      const bool is_second = arch::atomic_or_shared(seen + at / 32 * 4, bit) & bit;
      taken |= uint64_t(!is_second) << place;
      waits = waits || is_second;
    }
  }
  return waits;
}

/// One marking round: keys from `first` on. `own`: the warp's words, whose keys start at offset `at` of the union.
struct MergeRound {
  int first, at;
  WordRange own;
};

/// Writes the marked keys of a warp's words and their member masks: first two words per lane, then one key per lane, so
/// that full lines are written.
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
      // `capacity` bounds the addresses when a test leaves out a barrier.
      for (int i = first + lane; i < end && at + i < capacity; i += 32) {
        const int bit = 32 * from + staged[i - first];
        p.keys[row + at + i] = round.first + bit;
        p.member_masks[row + at + i] = uint8_t(member_mask_of_bit(p, s, bit));
      }
      arch::syncwarp();  // kept: a warp stages keys once more only where there are more than 32,768
    }
    at += total;
  }
}

/// The keys that any member may see.
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

/// Totals of a group: length of the union, number of marking rounds, and number of this thread's valid entries.
struct MergeTotals {
  int length = 0, rounds = 0, entries = 0;
};

/// Marks the keys of a group, per round as many as there are bits, and a key that repeats within a row in another
/// round. Calls `look` with each round.
template <class Look>
HOPWELL_DEVICE MergeTotals mark_in_rounds(const MergeParams& p, MergeStorage& s, const Look& look) {
  constexpr int kWarps = kMergeThreads / 32;
  const int warp = arch::warp_index();
  const KeyRange visible = visible_keys(s);
  MergeTotals totals;
  for (uint32_t first = visible.first; first < visible.end(); first += 32 * uint32_t(p.words)) {
    const uint32_t left = visible.end() - first;
    const int words = left < 32 * uint32_t(p.words) ? int(left + 31) / 32 : p.words;
    const int words_per_warp = (words + 4 * kWarps - 1) / (4 * kWarps) * 4, end = words_per_warp * (warp + 1);
    const WordRange own{words_per_warp * warp, end < words ? end : words};
    uint64_t taken = 0;
    int waiting;
    do {
      for (int m = 0; m < p.members; ++m) clear_words(s.seen + m * p.words, words);
      arch::syncthreads();
      const bool waits = mark_keys(p, s, int(first), taken);
      arch::syncthreads();
      const int count = count_keys(p, s, own);
      // Reduces both sums at once: there are at most 2^18 keys in groups of two.
      constexpr int kFlag = 1 << 20;
      const int of_warp = sum_of_warp(count) + (arch::ballot(waits) ? kFlag : 0);
      int total;
      const int before = sum_before_warp(s, of_warp, total) & (kFlag - 1);
      look(MergeRound{int(first), totals.length + before, own});
      totals.length += total & (kFlag - 1), waiting = total / kFlag, ++totals.rounds;
    } while (waiting > 0);
    totals.entries += std::popcount(uint32_t(taken)) + std::popcount(uint32_t(taken >> 32));  // 64-bit popcount is slow
  }
  return totals;
}

/// Whether all members have entries and the union is short enough.
HOPWELL_DEVICE bool is_worth_it(const MergeParams& p, MergeStorage& s, const MergeTotals& totals) {
  const int of_warp = sum_of_warp(totals.entries), member = s.parts[arch::warp_index()].member;
  int entries, warps;
  sum_before_warp(s, of_warp, entries);
  sum_before_warp(s, int(of_warp > 0) << 4 * member, warps);  // warps with entries, four bits per member
  bool worth = float(totals.length) <= p.most * float(entries);
  for (int m = 0; m < p.members; ++m) worth = worth && (warps >> 4 * m & 15) != 0;
  return worth;
}

/// Merges the rows of a group, executed by a CTA of kMergeThreads. Groups with a member that sees no key are not
/// merged, because the q and out rows of such a member may hold anything. The cheapest test comes first: a sample of
/// the keys, then a count of all keys. Writing the keys costs the most.
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
    if (writes && totals.rounds == 1) return write_marked_keys(p, s, group, last);  // its keys are still marked
  } while (writes);
}

}  // namespace hopwell::tile
