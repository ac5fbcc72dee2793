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

inline constexpr int kEntriesOfThread = kLongestMergedRow / kMergeThreads;  // of a member
static_assert(kEntriesOfThread * kMostMembers <= 64);

struct MergeParams {
  SelectionParams selection;
  int members;       // of a group
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

struct MergeStorage {
  static constexpr int kWords = 2048 * kMostMembers, kStaged = 512;

  uint32_t seen[kWords];                         // of each member a bit for each key of a round
  uint32_t staged[kMergeThreads / 32][kStaged];  // of each warp: keys on their way, so that lines are written whole
  int warp_sums[kMergeThreads / 32];

  static HOPWELL_HOST_DEVICE int words_of(int members) { return kWords / members; }
};

/// The sum of x, the same for all of a warp, over the warps before; `total`: over all.
HOPWELL_DEVICE int sum_before_warp(MergeStorage& s, int x, int& total) {
  const int warp = arch::warp_index();
  arch::syncthreads();
  if (arch::lane_index() == 0) s.warp_sums[warp] = x;
  arch::syncthreads();
  int before = total = 0;
  HOPWELL_UNROLL
  for (int w = 0; w < kMergeThreads / 32; ++w) {
    before += w < warp ? s.warp_sums[w] : 0;
    total += s.warp_sums[w];
  }
  return before;
}

/// A bit for each key of a word that any member has.
HOPWELL_DEVICE uint32_t keys_of_word(const MergeStorage& s, int members, int word) {
  uint32_t any = 0;
  for (int m = 0; m < members; ++m) any |= s.seen[m * MergeStorage::words_of(members) + word];
  return any;
}

/// Marks the keys from `first` on of a member's row that have not been taken yet. Of equal ones of a row one is taken, the
/// others wait for another round. Returns whether there are such; `taken`: a bit for each of the thread's entries.
HOPWELL_DEVICE bool mark_keys(MergeStorage& s, const Entries& entries, int member, int members, int first,
                              uint64_t& taken) {
  const int words = MergeStorage::words_of(members);
  const uint32_t seen = arch::shared_address(s.seen + member * words);
  int key[kEntriesOfThread];
  HOPWELL_UNROLL
  for (int r = 0; r < kEntriesOfThread; ++r) key[r] = entries.at(arch::thread_index() + r * kMergeThreads);
  bool waits = false;
  HOPWELL_UNROLL
  for (int r = 0; r < kEntriesOfThread; ++r) {
    const uint32_t at = uint32_t(key[r]) - uint32_t(first);
    const int place = kEntriesOfThread * member + r;
    if (!entries.counts(key[r]) || at >= 32 * uint32_t(words) || (taken >> place & 1)) continue;
    const uint32_t bit = 1u << at % 32;
    const bool is_second = arch::atomic_or_shared(seen + at / 32 * 4, bit) & bit;
    taken |= uint64_t(!is_second) << place;
    waits = waits || is_second;
  }
  return waits;
}

/// Words of marked keys, from `begin` to `end`.
struct WordRange {
  int begin, end;
};

/// What is marked at a time: keys from `first` on. `own`: the warp's words, whose keys lie from place `at` on in the union.
struct MergeRound {
  int first, at;
  WordRange own;
};

/// Writes the marked keys of a warp's words, a lane a word at a time, and who holds them.
HOPWELL_DEVICE void write_marked_keys(const MergeParams& p, MergeStorage& s, int group, const MergeRound& round) {
  const int64_t capacity = int64_t{p.members} * p.selection.topk, row = group * capacity;
  const int lane = arch::lane_index();
  uint32_t* const staged = s.staged[arch::warp_index()];
  int at = round.at;
  for (int from = round.own.begin; from < round.own.end; from += 32) {
    const int word = from + lane;
    uint32_t own[kMostMembers] = {}, any = 0;
    HOPWELL_UNROLL
    for (int m = 0; m < kMostMembers; ++m) {
      if (m < p.members && word < round.own.end) own[m] = s.seen[m * MergeStorage::words_of(p.members) + word];
      any |= own[m];
    }
    const int count = std::popcount(any), up_to_lane = sum_up_to_lane(count), total = arch::shuffle(up_to_lane, 31);
    int place = up_to_lane - count;
    for (int first = 0; first < total; first += MergeStorage::kStaged) {
      const int end = total < first + MergeStorage::kStaged ? total : first + MergeStorage::kStaged;
      HOPWELL_NO_UNROLL
      for (; any != 0 && place < end; any &= any - 1, ++place) {
        const int bit = std::popcount(~any & (any - 1));
        uint32_t holders = 0;
        HOPWELL_UNROLL
        for (int m = 0; m < kMostMembers; ++m) holders |= (own[m] >> bit & 1) << m;
        staged[place - first] = uint32_t(32 * lane + bit) << kMostMembers | holders;
      }
      arch::syncwarp();
      for (int i = first + lane; i < end && at + i < capacity; i += 32) {  // were a barrier lost, it would end here
        const uint32_t key_and_holders = staged[i - first];
        p.keys[row + at + i] = round.first + 32 * from + int(key_and_holders >> kMostMembers);
        p.holders[row + at + i] = uint8_t(key_and_holders);
      }
      arch::syncwarp();  // kept: a warp stages keys once more only where there are more than 16,384
    }
    at += total;
  }
}

/// The keys that any of the members may see.
HOPWELL_DEVICE KeyRange visible_keys(const MergeParams& p, int group) {
  uint32_t begin = ~0u, end = 0;
  for (int m = 0; m < p.members; ++m) {
    const KeyRange visible = p.selection.visibility.keys(int64_t{group} * p.members + m, p.selection.s_kv);
    if (visible.count == 0) continue;
    begin = visible.first < begin ? visible.first : begin;
    end = visible.end() > end ? visible.end() : end;
  }
  return end == 0 ? KeyRange{} : KeyRange{begin, end - begin};
}

/// Of a group: how many keys the union has and in how many rounds they were marked; of this thread's entries, how many are
/// valid, and a bit for each member that has any of them.
struct MergeTotals {
  int length = 0, rounds = 0, entries = 0;
  uint32_t members = 0;
};

/// Marks the keys of a group, as many at a time as there are bits for, a key that a row has again in a round of its own,
/// and shows each round to `look`.
template <class Look>
HOPWELL_DEVICE MergeTotals mark_in_rounds(const MergeParams& p, MergeStorage& s, int group, const Look& look) {
  constexpr int kWarps = kMergeThreads / 32;
  const int t = arch::thread_index(), warp = arch::warp_index(), most_words = MergeStorage::words_of(p.members);
  const KeyRange visible = visible_keys(p, group);
  MergeTotals totals;
  for (uint32_t first = visible.first; first < visible.end(); first += 32 * uint32_t(most_words)) {
    const uint32_t left = visible.end() - first;
    const int words = left < 32 * uint32_t(most_words) ? int(left + 31) / 32 : most_words;
    const int share = (words + kWarps - 1) / kWarps, end = share * (warp + 1);
    const WordRange own{share * warp, end < words ? end : words};
    uint64_t taken = 0;
    int waiting;
    do {
      for (int m = 0; m < p.members; ++m)
        for (int word = t; word < words; word += kMergeThreads) s.seen[m * most_words + word] = 0;
      arch::syncthreads();
      bool waits = false;
      HOPWELL_NO_UNROLL
      for (int m = 0; m < p.members; ++m) {
        const Entries entries = entries_of(p.selection, int64_t{group} * p.members + m);
        waits = mark_keys(s, entries, m, p.members, int(first), taken) || waits;
      }
      arch::syncthreads();
      int count = 0;
      for (int word = own.begin + arch::lane_index(); word < own.end; word += 32)
        count += std::popcount(keys_of_word(s, p.members, word));
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
    for (int m = 0; m < p.members; ++m)
      totals.members |= uint32_t((taken >> kEntriesOfThread * m & ((1 << kEntriesOfThread) - 1)) != 0) << m;
  }
  return totals;
}

/// Whether all members have entries, and the union is short enough.
HOPWELL_DEVICE bool is_worth_it(const MergeParams& p, MergeStorage& s, const MergeTotals& totals) {
  int all_entries;
  sum_before_warp(s, sum_of_warp(totals.entries), all_entries);
  bool worth = float(totals.length) <= p.most * float(all_entries);
  for (int first = 0; first < p.members; first += 4) {  // warps that have entries of them, a byte each
    int of_warp = 0, warps;
    for (int m = first; m < first + 4; ++m)
      of_warp |= int(arch::ballot(totals.members >> m & 1) != 0) << 8 * (m - first);
    sum_before_warp(s, of_warp, warps);
    for (int m = first; m < first + 4 && m < p.members; ++m) worth = worth && (warps >> 8 * (m - first) & 255) != 0;
  }
  return worth;
}

/// Brings all rows of a group to L2 at once: they are read one after the other.
HOPWELL_DEVICE void prefetch_rows(const MergeParams& p, int group) {
  constexpr int kLine = 32;  // entries
  const int lines = (p.selection.topk + kLine - 1) / kLine;
  for (int i = arch::thread_index(); i < p.members * lines; i += kMergeThreads) {
    const int64_t query = int64_t{group} * p.members + i / lines;
    arch::prefetch_l2(p.selection.indices + query * p.selection.indices_stride + i % lines * kLine);
  }
}

/// Merges the rows of a group, by a CTA of kMergeThreads. Groups with a member that sees no key are left alone: what its
/// rows of q and out hold is nobody's business then. Keys are counted first, since to write them takes most of the time.
HOPWELL_DEVICE void merge_rows_of_group(const MergeParams& p, MergeStorage& s, int group) {
  prefetch_rows(p, group);
  MergeRound last{};
  const MergeTotals totals = mark_in_rounds(p, s, group, [&](const MergeRound& round) { last = round; });
  const bool worth = is_worth_it(p, s, totals);
  if (arch::thread_index() == 0) p.lengths[group] = worth ? totals.length : 0;
  if (!worth) return;
  if (totals.rounds == 1) return write_marked_keys(p, s, group, last);  // which is still marked
  mark_in_rounds(p, s, group, [&](const MergeRound& round) {
    write_marked_keys(p, s, group, round);
    arch::syncthreads();
  });
}

}  // namespace hopwell::tile
