// Which entries of a query's index row count: the device's side of tile/selection.hpp.
#pragma once

#include "arch/platform.hpp"
#include "tile/selection.hpp"

namespace hopwell::tile {

/// The index rows with all that masks them, as kernel parameters.
struct SelectionParams {
  const int* indices;                     // [s_q, topk], if given; else entry t names key t, and topk is s_kv
  const int* topk_length;                 // [s_q], or null
  int64_t indices_stride, length_stride;  // elements
  Visibility visibility;
  int s_kv, topk;
  bool given;  // indices are; to ask the pointer itself makes its loads generic ones
};

inline SelectionParams params_of(const Selection& selection) {
  return {selection.indices,
          selection.topk_length,
          selection.indices_stride,
          selection.topk_length_stride,
          selection.visibility,
          static_cast<int>(selection.s_kv),
          static_cast<int>(selection.topk),
          selection.indices != nullptr};
}

/// One query's row: its first `length` entries count, if they name a visible key. Without indices they are just the
/// visible keys, so that work follows what a query sees, and its sums do not depend on where its keys begin.
struct Entries {
  const int* row;
  int length;
  KeyRange visible;
  bool given;  // false: no row; entry i names key visible.first + i, and length is visible.count

  /// What entry i names; -1 beyond the length. Whether that is a key is another question, to be asked when the load has
  /// come.
  HOPWELL_DEVICE int at(int i) const {
    // One load under a condition, into the register that has the other result; with branches the backward was a tenth
    // slower.
    int key = given ? -1 : int(visible.first) + i;
    if (given && i < length) key = row[i];
    return key;
  }
  HOPWELL_DEVICE bool counts(int key) const { return visible.has(key); }
  /// How many tiles of so many they fill, the last one perhaps in part.
  HOPWELL_DEVICE int tiles(int size) const { return (length + size - 1) / size; }
  /// Of the row's places first … first + size − 1, what is there: the entries, as far as there are any, or visible keys.
  HOPWELL_DEVICE Entries slice(int first, int size) const {
    const int begin = given || int(visible.first) < first ? first : int(visible.first);
    const int left = (given ? length : int(visible.end())) - first;
    int count = (left < size ? left : size) - (begin - first);
    count = count < 0 ? 0 : count;
    return {row + first, count, given ? visible : KeyRange{uint32_t(begin), uint32_t(count)}, given};
  }
  /// The place of entry 0 in a row of numbers, one for each entry or, without indices, each key. `first`: of the slice.
  HOPWELL_DEVICE int place(int first = 0) const { return given || length == 0 ? first : int(visible.first); }
  /// The key of entry i, or -1 if it does not count.
  HOPWELL_DEVICE int key(int i) const {
    const int key = at(i);
    return counts(key) ? key : -1;
  }
};

HOPWELL_DEVICE Entries entries_of(const SelectionParams& p, int64_t query) {
  const KeyRange visible = p.visibility.keys(query, p.s_kv);
  int length = p.given ? p.topk : int(visible.count);
  if (p.topk_length) {
    length = p.topk_length[query * p.length_stride];
    length = length < 0 ? 0 : length > p.topk ? p.topk : length;
  }
  return {p.indices + query * p.indices_stride, length, visible, p.given};
}

}  // namespace hopwell::tile
