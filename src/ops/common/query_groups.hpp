// Query groups: adjacent queries with few heads, processed as one query with the heads of all of them, over the union
// of their keys. This file finds the possible groups. tile/gpu/merge_rows.hpp decides on the device for which of them
// merging pays.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "runtime/check.hpp"
#include "runtime/workspace.hpp"

namespace hopwell::ops {

inline constexpr std::int64_t kMostMembers = 8;          // queries per group
inline constexpr std::int64_t kLongestMergedRow = 4096;  // entries of the longest row that can be merged

struct QueryGroups {
  int members = 1;
  std::int64_t count = 0;
};

// Byte offsets in the workspace: the groups' keys, their member masks, and their lengths.
struct MergedRowsPlace {
  std::size_t keys = 0, member_masks = 0, lengths = 0;
};

// Groups as many queries of a problem as fit in a kernel's `tile_heads` heads. `rows`: tensors in which the rows of a
// group must have the layout of one query, with equal distances between all heads of all queries.
template <class Problem>
QueryGroups query_groups(const Problem& p, std::int64_t tile_heads, std::initializer_list<View> rows) {
  const std::int64_t members = std::min(tile_heads / std::max<std::int64_t>(p.h_q, 1), kMostMembers);
  const auto even = [&p](const View& v) { return !v || p.h_q == 1 || v.stride[0] == p.h_q * v.stride[1]; };
  if (!p.share_keys || p.selection.indices == nullptr || members < 2 || p.s_q < members || p.topk < 1 ||
      p.topk > kLongestMergedRow || !std::all_of(rows.begin(), rows.end(), even))
    return {};
  return {static_cast<int>(members), p.s_q / members};
}

inline MergedRowsPlace place_merged_rows(const QueryGroups& groups, std::int64_t topk,
                                         runtime::WorkspaceLayout& layout) {
  if (groups.count == 0) return {};
  const std::int64_t entries = groups.count * groups.members * topk;
  MergedRowsPlace place;
  place.keys = layout.reserve(4 * entries), place.member_masks = layout.reserve(entries);
  place.lengths = layout.reserve(4 * groups.count);
  return place;
}

}  // namespace hopwell::ops
