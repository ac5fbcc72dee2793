// Valid entries of a query's index row: the device side of tile/selection.hpp.
#pragma once

#include "arch/platform.hpp"
#include "tile/selection.hpp"

namespace hopwell::tile {

/// The index rows and all masks, as kernel parameters.
struct SelectionParams {
  const int* indices;                     // [s_q, topk] if has_indices; else entry t is key t, topk is s_kv
  const int* lengths;                     // [s_q], or null
  int64_t indices_stride, length_stride;  // elements
  Visibility visibility;
  int s_kv, topk;
  bool has_indices;  // testing the pointer instead would make its loads generic
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

/// One query's row. Its first `length` entries are valid if they name a visible key. Without indices the entries are
/// the visible keys only, so that the work depends on the visible keys, and the sums do not depend on the first of
/// them.
struct Entries {
  const int* row;
  int length;
  KeyRange visible;
  bool has_indices;  // false: no row; entry i is key visible.first + i, and length is visible.count

  /// Index of entry i; -1 beyond the length. The caller checks whether the index is a visible key, after the load has
  /// completed.
  HOPWELL_DEVICE int at(int i) const {
    // One predicated load into the register that already holds the other result. With branches the backward was 10 %
    // slower.
    int key = has_indices ? -1 : int(visible.first) + i;
    if (has_indices && i < length) key = row[i];
    return key;
  }
  HOPWELL_DEVICE bool counts(int key) const { return visible.has(key); }
  /// Number of tiles of `size` entries; the last tile may be partial.
  HOPWELL_DEVICE int tiles(int size) const { return (length + size - 1) / size; }
  /// The part of the row in slots first … first + size − 1: its entries up to the length, or the visible keys among
  /// these slots.
  HOPWELL_DEVICE Entries slice(int first, int size) const {
    const int begin = has_indices || int(visible.first) < first ? first : int(visible.first);
    const int left = (has_indices ? length : int(visible.end())) - first;
    int count = (left < size ? left : size) - (begin - first);
    count = count < 0 ? 0 : count;
    return {row + first, count, has_indices ? visible : KeyRange{uint32_t(begin), uint32_t(count)}, has_indices};
  }
  /// Slot of entry 0 in a row of numbers that has one slot per entry, or without indices one per key. `first`: as for
  /// slice().
  HOPWELL_DEVICE int place(int first = 0) const { return has_indices || length == 0 ? first : int(visible.first); }
  /// Key of entry i, or -1 if the entry is not valid. `entry`: at(i).
  HOPWELL_DEVICE int key(int, int entry) const { return counts(entry) ? entry : -1; }
  HOPWELL_DEVICE int key(int i) const { return key(i, at(i)); }
};

HOPWELL_DEVICE Entries entries_of(const SelectionParams& p, int64_t query) {
  const KeyRange visible = p.visibility.keys(query, p.s_kv);
  int length = p.has_indices ? p.topk : int(visible.count);
  if (p.lengths) {
    length = p.lengths[query * p.length_stride];
    length = length < 0 ? 0 : length > p.topk ? p.topk : length;
  }
  return {p.indices + query * p.indices_stride, length, visible, p.has_indices};
}

}  // namespace hopwell::tile
