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
  static constexpr int kWords = 2048, kKeys = 32 * kWords;

  uint32_t seen[kMostMembers][kWords];  // a bit for each of kKeys keys
  int warp_sums[kMergeThreads / 32];
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
  for (int m = 0; m < members; ++m) any |= s.seen[m][word];
  return any;
}

/// Marks the keys from `first` on of a member's row that have not been taken yet. Of equal ones of a row one is taken, the
/// others wait for another round. Returns whether there are such; `taken`: a bit for each of the thread's entries.
HOPWELL_DEVICE bool mark_keys(MergeStorage& s, const Entries& entries, int member, int first, uint64_t& taken) {
  const uint32_t seen = arch::shared_address(s.seen[member]);
  int key[kEntriesOfThread];
  HOPWELL_UNROLL
  for (int r = 0; r < kEntriesOfThread; ++r) key[r] = entries.at(arch::thread_index() + r * kMergeThreads);
  bool waits = false;
  HOPWELL_UNROLL
  for (int r = 0; r < kEntriesOfThread; ++r) {
    const uint32_t at = uint32_t(key[r]) - uint32_t(first);
    const int place = kEntriesOfThread * member + r;
    if (!entries.counts(key[r]) || at >= MergeStorage::kKeys || (taken >> place & 1)) continue;
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

/// Writes the marked keys of a warp's words, a lane a word at a time, and who holds them, from place `at` on.
HOPWELL_DEVICE void write_marked_keys(const MergeParams& p, const MergeStorage& s, int group, int first,
                                      const WordRange& words, int at) {
  const int64_t capacity = int64_t{p.members} * p.selection.topk, row = group * capacity;
  for (int from = words.begin; from < words.end; from += 32) {
    const int word = from + arch::lane_index();
    uint32_t own[kMostMembers] = {}, any = 0;
    HOPWELL_UNROLL
    for (int m = 0; m < kMostMembers; ++m) {
      if (m < p.members && word < words.end) own[m] = s.seen[m][word];
      any |= own[m];
    }
    const int count = std::popcount(any), up_to_lane = sum_up_to_lane(count);
    int place = at + up_to_lane - count;
    at += arch::shuffle(up_to_lane, 31);
    HOPWELL_NO_UNROLL
    for (; any != 0 && place < capacity; any &= any - 1, ++place) {  // were a barrier lost, addresses would be right
      const int bit = std::popcount(~any & (any - 1));
      uint32_t holders = 0;
      HOPWELL_UNROLL
      for (int m = 0; m < kMostMembers; ++m) holders |= (own[m] >> bit & 1) << m;
      p.keys[row + place] = first + 32 * word + bit;
      p.holders[row + place] = uint8_t(holders);
    }
    arch::syncwarp();  // kept: lanes have written more or fewer
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

/// Merges the rows of a group, by a CTA of kMergeThreads. Groups with a member that sees no key are left alone: what its
/// rows of q and out hold is nobody's business then.
HOPWELL_DEVICE void merge_rows_of_group(const MergeParams& p, MergeStorage& s, int group) {
  constexpr int kWarps = kMergeThreads / 32, kKeys = MergeStorage::kKeys;
  const int t = arch::thread_index(), warp = arch::warp_index();
  const KeyRange visible = visible_keys(p, group);
  int length = 0, entries = 0;  // of the union; of this thread's rows
  uint32_t members = 0;         // that have any of them
  for (uint32_t first = visible.first; first < visible.end(); first += kKeys) {
    const uint32_t left = visible.end() - first;
    const int words = left < uint32_t(kKeys) ? int(left + 31) / 32 : MergeStorage::kWords;
    const int share = (words + kWarps - 1) / kWarps, end = share * (warp + 1);
    const WordRange own{share * warp, end < words ? end : words};
    uint64_t taken = 0;
    int waiting;
    do {
      for (int m = 0; m < p.members; ++m)
        for (int word = t; word < words; word += kMergeThreads) s.seen[m][word] = 0;
      arch::syncthreads();
      bool waits = false;
      HOPWELL_NO_UNROLL
      for (int m = 0; m < p.members; ++m)
        waits = mark_keys(s, entries_of(p.selection, int64_t{group} * p.members + m), m, int(first), taken) || waits;
      arch::syncthreads();
      int count = 0;
      for (int word = own.begin + arch::lane_index(); word < own.end; word += 32)
        count += std::popcount(keys_of_word(s, p.members, word));
      // Both sums at once: there are at most 2^16 keys.
      constexpr int kFlag = 1 << 20;
      const int of_warp = sum_of_warp(count) + (arch::ballot(waits) ? kFlag : 0);
      int total;
      const int before = sum_before_warp(s, of_warp, total) & (kFlag - 1);
      write_marked_keys(p, s, group, int(first), own, length + before);
      arch::syncthreads();
      length += total & (kFlag - 1), waiting = total / kFlag;
    } while (waiting > 0);
    entries += std::popcount(uint32_t(taken)) + std::popcount(uint32_t(taken >> 32));  // of 64 bits nvcc makes nothing
    for (int m = 0; m < p.members; ++m)
      members |= uint32_t((taken >> kEntriesOfThread * m & ((1 << kEntriesOfThread) - 1)) != 0) << m;
  }
  int all_entries, empty_members = 0;
  sum_before_warp(s, sum_of_warp(entries), all_entries);
  for (int m = 0; m < p.members; ++m) {
    int warps_with_any;
    sum_before_warp(s, arch::ballot(members >> m & 1) != 0, warps_with_any);
    empty_members += warps_with_any == 0;
  }
  if (t == 0) p.lengths[group] = empty_members == 0 && float(length) <= p.most * float(all_entries) ? length : 0;
}

}  // namespace hopwell::tile
