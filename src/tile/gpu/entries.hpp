// Which entries of a query's index row count: the device's side of tile/selection.hpp.
#pragma once

#include "arch/platform.hpp"
#include "tile/selection.hpp"

namespace hopwell::tile {

/// The index rows with all that masks them, as kernel parameters.
struct SelectionParams {
  const int* indices;                     // [s_q, topk]
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

/// One query's row: its first `length` entries count, if they name a visible key.
struct Entries {
  const int* row;
  int length;
  KeyRange visible;

  /// What entry i names; -1 beyond the length. Whether that is a key is another question, to be asked when the load has
  /// come.
  HOPWELL_DEVICE int at(int i) const { return i < length ? row[i] : -1; }
  HOPWELL_DEVICE bool counts(int key) const { return visible.has(key); }
  /// Entries first … first + size − 1 of these, as far as there are any.
  HOPWELL_DEVICE Entries slice(int first, int size) const {
    const int left = length - first;
    return {row + first, left < 0 ? 0 : left < size ? left : size, visible};
  }
  /// The key of entry i, or -1 if it does not count.
  HOPWELL_DEVICE int key(int i) const {
    const int key = at(i);
    return counts(key) ? key : -1;
  }
};

HOPWELL_DEVICE Entries entries_of(const SelectionParams& p, int64_t query) {
  int length = p.topk;
  if (p.topk_length) {
    length = p.topk_length[query * p.length_stride];
    length = length < 0 ? 0 : length > p.topk ? p.topk : length;
  }
  return {p.indices + query * p.indices_stride, length, p.visibility.keys(query, p.s_kv)};
}

}  // namespace hopwell::tile
