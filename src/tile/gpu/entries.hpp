// Which entries of a query's index row count: the device's side of tile/selection.hpp.
#pragma once

#include "arch/platform.hpp"
#include "tile/selection.hpp"

namespace hopwell::tile {

/// The index rows with all that masks them, as kernel parameters.
struct SelectionParams {
  const int* indices;                     // [s_q, topk], or null: entry t names key t, and topk is s_kv
  const int* topk_length;                 // [s_q], or null
  int64_t indices_stride, length_stride;  // elements
  Visibility visibility;
  int s_kv, topk;
};

inline SelectionParams params_of(const Selection& selection) {
  return {selection.indices,
          selection.topk_length,
          selection.indices_stride,
          selection.topk_length_stride,
          selection.visibility,
          static_cast<int>(selection.s_kv),
          static_cast<int>(selection.topk)};
}

/// One query's row: its first `length` entries count, if they name a visible key. Without indices they are just the
/// visible keys, so that work follows what a query sees, and its sums do not depend on where its keys begin.
struct Entries {
  const int* row;  // null: entry i names key visible.first + i, and length is visible.count
  int length;
  KeyRange visible;

  /// What entry i names; -1 beyond the length. Whether that is a key is another question, to be asked when the load has
  /// come.
  HOPWELL_DEVICE int at(int i) const { return i < length ? row ? row[i] : int(visible.first) + i : -1; }
  HOPWELL_DEVICE bool counts(int key) const { return visible.has(key); }
  /// Of the row's places first … first + size − 1, what is there: the entries, as far as there are any, or visible keys.
  HOPWELL_DEVICE Entries slice(int first, int size) const {
    if (row) {
      const int left = length - first;
      return {row + first, left < 0 ? 0 : left < size ? left : size, visible};
    }
    const int begin = int(visible.first) > first ? int(visible.first) : first, left = int(visible.end()) - first;
    const int count = (left < size ? left : size) - (begin - first);
    return {nullptr, count < 0 ? 0 : count, count < 0 ? KeyRange{} : KeyRange{uint32_t(begin), uint32_t(count)}};
  }
  /// The place of entry 0 in a row of numbers, one for each entry or, without indices, each key. `first`: of the slice.
  HOPWELL_DEVICE int place(int first = 0) const { return row || length == 0 ? first : int(visible.first); }
  /// The key of entry i, or -1 if it does not count.
  HOPWELL_DEVICE int key(int i) const {
    const int key = at(i);
    return counts(key) ? key : -1;
  }
};

HOPWELL_DEVICE Entries entries_of(const SelectionParams& p, int64_t query) {
  const KeyRange visible = p.visibility.keys(query, p.s_kv);
  if (!p.indices) return {nullptr, int(visible.count), visible};
  int length = p.topk;
  if (p.topk_length) {
    length = p.topk_length[query * p.length_stride];
    length = length < 0 ? 0 : length > p.topk ? p.topk : length;
  }
  return {p.indices + query * p.indices_stride, length, visible};
}

}  // namespace hopwell::tile
