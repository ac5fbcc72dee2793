// The keys that a query attends: the index rows of the sparse MLA operators and all masks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "arch/platform.hpp"

namespace hopwell {

// Keys first … first + count − 1. The empty range is {0, 0}.
struct KeyRange {
  std::uint32_t first = 0, count = 0;

  [[nodiscard]] HOPWELL_HOST_DEVICE std::uint32_t end() const { return first + count; }
  [[nodiscard]] HOPWELL_HOST_DEVICE bool overlaps(std::int32_t key, std::int32_t keys) const {
    return std::uint32_t(key) < end() && std::uint32_t(key + keys) > first;
  }
  // A negative key is a large unsigned number, so it is out of range: first + count is below 2^31.
  [[nodiscard]] HOPWELL_HOST_DEVICE bool has(std::int32_t key) const { return std::uint32_t(key) - first < count; }
};

// The keys that a query may see: keys of its key range that are not in its future. A key represents `kv_stride`
// consecutive tokens, and is visible if all of them are at or before the query's position. Tokens count from k_start.
struct Visibility {
  const std::int32_t* q_positions = nullptr;  // [s_q], or null
  std::int64_t q_positions_stride = 0;
  bool has_q_start = false;
  std::int64_t q_start = 0;
  std::int64_t kv_stride = 1;
  const std::int32_t *k_start = nullptr, *k_end = nullptr;  // [s_q], or both null
  std::int64_t k_start_stride = 0, k_end_stride = 0;

  // The visibility of queries from `first` on.
  [[nodiscard]] Visibility from(std::int64_t first) const {
    Visibility v = *this;
    if (q_positions != nullptr) v.q_positions += first * q_positions_stride;
    if (k_start != nullptr) v.k_start += first * k_start_stride, v.k_end += first * k_end_stride;
    v.q_start += first;
    return v;
  }

  // The range of keys 0 … s_kv − 1 that query s may see. Kernels use it too. In 64 bits, because positions and ranges
  // may have any value.
  [[nodiscard]] HOPWELL_HOST_DEVICE KeyRange keys(std::int64_t s, std::int64_t s_kv) const {
    std::int64_t start = 0, end = s_kv;
    if (k_start != nullptr) {
      start = k_start[s * k_start_stride];
      const std::int64_t given = k_end[s * k_end_stride];
      end = given < end ? given : end;
    }
    if (q_positions != nullptr || has_q_start) {
      const std::int64_t position =
          q_positions != nullptr ? std::int64_t{q_positions[s * q_positions_stride]} : q_start + s;
      const std::int64_t past = start + (position < 0 ? 0 : (position + 1) / kv_stride);
      end = past < end ? past : end;
    }
    const std::int64_t first = start < 0 ? 0 : start;
    return end > first ? KeyRange{std::uint32_t(first), std::uint32_t(end - first)} : KeyRange{};
  }
};

// Empty indices may have a null pointer. Replaces it, because null means that there are no indices.
inline const std::int32_t* non_null_indices(const std::int32_t* data) {
  static constexpr std::int32_t kNone = -1;
  return data != nullptr ? data : &kNone;
}

struct Selection {
  const std::int32_t* indices = nullptr;  // [s_q, topk], or null: the visible keys in order, and topk is s_kv
  std::int64_t indices_stride = 0;
  const std::int32_t* topk_length = nullptr;  // [s_q], or null: topk
  std::int64_t topk_length_stride = 0;
  Visibility visibility;
  std::int64_t s_q = 0, s_kv = 0, topk = 0;

  // Number of entries of row s before validity checks: topk_length clamped to 0 .. topk; without indices the number of
  // visible keys.
  [[nodiscard]] std::int64_t length(std::int64_t s) const {
    if (indices == nullptr) return visibility.keys(s, s_kv).count;
    if (topk_length == nullptr) return topk;
    return std::clamp<std::int64_t>(topk_length[s * topk_length_stride], 0, topk);
  }
  [[nodiscard]] const std::int32_t* row(std::int64_t s) const { return indices + s * indices_stride; }
  // Slot of entry 0 of row s in a row [topk] of numbers. With indices there is one slot per entry, without them one per
  // key, visible or not.
  [[nodiscard]] std::int64_t place(std::int64_t s) const {
    return indices == nullptr ? std::int64_t{visibility.keys(s, s_kv).first} : 0;
  }

  [[nodiscard]] bool any_valid(std::int64_t s) const {
    const KeyRange visible = visibility.keys(s, s_kv);
    if (indices == nullptr) return visible.count > 0;
    const auto valid = [visible](std::int32_t key) { return visible.has(key); };
    return topk > 0 && std::any_of(row(s), row(s) + length(s), valid);
  }

  // Lists the valid entries among entries first .. last - 1 of row s in ascending order: their keys, and their slots
  // relative to `first`. Both lists have room for last - first. Returns the number of valid entries.
  std::int64_t valid_entries(std::int64_t s, std::int64_t first, std::int64_t last, std::int32_t* keys,
                             std::int32_t* places) const {
    const KeyRange visible = visibility.keys(s, s_kv);
    const std::int64_t count = std::min(last, length(s)) - first;
    if (count <= 0) return 0;
    if (indices == nullptr) {
      std::iota(keys, keys + count, static_cast<std::int32_t>(visible.first + first));
      std::iota(places, places + count, 0);
      return count;
    }
    const std::int32_t* entries = row(s) + first;
    std::int64_t valid = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      keys[valid] = entries[i];
      places[valid] = static_cast<std::int32_t>(i);
      valid += visible.has(entries[i]);
    }
    return valid;
  }
};

namespace tile {

// Length of the longest row that GPUs sort by key: tile/gpu/order_rows.hpp.
inline constexpr int kLongestOrderedRow = 4096;

}  // namespace tile
}  // namespace hopwell
