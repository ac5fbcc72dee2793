// Entries of a query that has window keys: the device side of tile/window.hpp.
#pragma once

#include "tile/gpu/entries.hpp"
#include "tile/window.hpp"

namespace hopwell::tile {

/// Entries 0 … window.count − 1 are the query's window keys; the entries of its index row follow. Row t of window_kv
/// has the key number s_kv + t, so that one integer names a row of either tensor. The list depends on the query alone,
/// not on where its keys begin.
struct WindowEntries {
  Entries selected;
  KeyRange window;  // key numbers
  int length;       // of both parts

  /// Key number of entry i; -1 beyond the length. Whether an index of `selected` is a visible key is for counts().
  HOPWELL_DEVICE int at(int i) const {
    const int j = i - int(window.count);
    int key = j < 0 ? int(window.first) + i : selected.has_indices ? -1 : int(selected.visible.first) + j;
    if (selected.has_indices && j >= 0 && j < selected.length) key = selected.row[j];
    return key;
  }
  /// Whether entry i, which has the key number `key`, is valid.
  HOPWELL_DEVICE bool counts(int i, int key) const { return uint32_t(i) < window.count || selected.visible.has(key); }
  /// Number of tiles of `size` entries; the last tile may be partial.
  HOPWELL_DEVICE int tiles(int size) const { return (length + size - 1) / size; }
  /// Key number of entry i, or -1 if the entry is not valid. `entry`: at(i).
  HOPWELL_DEVICE int key(int i, int entry) const { return counts(i, entry) ? entry : -1; }
  HOPWELL_DEVICE int key(int i) const { return key(i, at(i)); }
  /// Entries first … first + size − 1 of the list.
  HOPWELL_DEVICE WindowEntries slice(int first, int size) const {
    const int of_window = int(window.count), skipped = first < of_window ? first : of_window;
    const int window_left = of_window - skipped, from_window = window_left < size ? window_left : size;
    const int begin = first - skipped, left = selected.length - begin;  // of `selected`
    int count = left < size - from_window ? left : size - from_window;
    count = count < 0 ? 0 : count;
    const KeyRange visible =
        selected.has_indices ? selected.visible : KeyRange{selected.visible.first + uint32_t(begin), uint32_t(count)};
    return {{selected.row + begin, count, visible, selected.has_indices},
            {window.first + uint32_t(skipped), uint32_t(from_window)},
            from_window + count};
  }
};

HOPWELL_DEVICE WindowEntries entries_of(const SelectionParams& p, const Window& window, int64_t query) {
  const Entries selected = entries_of(p, query);
  const KeyRange rows = window.keys(query);
  return {selected, {uint32_t(p.s_kv) + rows.first, rows.count}, selected.length + int(rows.count)};
}

}  // namespace hopwell::tile
