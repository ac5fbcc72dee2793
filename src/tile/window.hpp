// The window keys that a query attends besides its selected keys: consecutive rows of a tensor of their own.
#pragma once

#include <algorithm>
#include <cstdint>

#include "arch/platform.hpp"
#include "tile/selection.hpp"

namespace hopwell {

// Query s sees the rows max(lo, hi - size) <= t < hi of window_kv. lo and hi are starts[s] and ends[s], clamped to
// 0 .. s_w. Without starts and ends, lo is 0 and hi is s_w - s_q + s + 1.
struct Window {
  std::int64_t size = 0;                                  // the most keys that a query sees; 0: there is no window
  const std::int32_t *starts = nullptr, *ends = nullptr;  // [s_q], or both null
  std::int64_t starts_stride = 0, ends_stride = 0;
  std::int64_t s_q = 0, s_w = 0;

  explicit operator bool() const { return size > 0; }

  // The most keys of any query: a bound for every value of starts and ends.
  [[nodiscard]] std::int64_t most_keys() const { return std::min(size, s_w); }

  // The rows that query s sees. Kernels use it too.
  [[nodiscard]] HOPWELL_HOST_DEVICE KeyRange keys(std::int64_t s) const {
    std::int64_t low = 0, high = s_w - s_q + s + 1;
    if (starts != nullptr) low = starts[s * starts_stride], high = ends[s * ends_stride];
    low = low < 0 ? 0 : low;
    high = high > s_w ? s_w : high;
    low = low < high - size ? high - size : low;
    return high > low ? KeyRange{std::uint32_t(low), std::uint32_t(high - low)} : KeyRange{};
  }
};

}  // namespace hopwell
