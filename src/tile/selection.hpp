// Which keys a query attends: the index rows of the sparse MLA operators with everything that masks them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "arch/platform.hpp"

namespace hopwell {

// Causal visibility of a key that stands for `kv_stride` consecutive tokens: all of them must be at or before the
// query's position. Positions are computed in 64 bits.
struct Causality {
  const std::int32_t* q_positions = nullptr;  // [s_q], or null
  std::int64_t q_positions_stride = 0;
  bool has_q_start = false;
  std::int64_t q_start = 0;
  std::int64_t kv_stride = 1;

  // Number of leading keys that query s may see, 0 .. s_kv. Also what kernels ask.
  [[nodiscard]] HOPWELL_HOST_DEVICE std::int64_t visible_keys(std::int64_t s, std::int64_t s_kv) const {
    if (q_positions == nullptr && !has_q_start) return s_kv;
    const std::int64_t position =
        q_positions != nullptr ? std::int64_t{q_positions[s * q_positions_stride]} : q_start + s;
    const std::int64_t keys = position < 0 ? 0 : (position + 1) / kv_stride;
    return keys < s_kv ? keys : s_kv;
  }
};

struct Selection {
  const std::int32_t* indices = nullptr;  // [s_q, topk]
  std::int64_t indices_stride = 0;
  const std::int32_t* topk_length = nullptr;  // [s_q], or null: topk
  std::int64_t topk_length_stride = 0;
  Causality causality;
  std::int64_t s_q = 0, s_kv = 0, topk = 0;

  // Entries of row s that count at all: topk_length clamped to 0 .. topk.
  [[nodiscard]] std::int64_t length(std::int64_t s) const {
    if (topk_length == nullptr) return topk;
    return std::clamp<std::int64_t>(topk_length[s * topk_length_stride], 0, topk);
  }
  [[nodiscard]] const std::int32_t* row(std::int64_t s) const { return indices + s * indices_stride; }

  [[nodiscard]] bool any_valid(std::int64_t s) const {
    const auto visible = static_cast<std::uint32_t>(causality.visible_keys(s, s_kv));
    const auto valid = [visible](std::int32_t key) { return static_cast<std::uint32_t>(key) < visible; };
    return topk > 0 && std::any_of(row(s), row(s) + length(s), valid);
  }

  // Lists the valid ones among entries first .. last - 1 of row s in ascending order: their keys, and their places
  // relative to `first`. Room for last - first each; returns how many.
  std::int64_t valid_entries(std::int64_t s, std::int64_t first, std::int64_t last, std::int32_t* keys,
                             std::int32_t* places) const {
    const auto visible = static_cast<std::uint32_t>(causality.visible_keys(s, s_kv));
    const std::int64_t count = std::min(last, length(s)) - first;
    if (count <= 0) return 0;
    const std::int32_t* entries = row(s) + first;
    std::int64_t valid = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      keys[valid] = entries[i];
      places[valid] = static_cast<std::int32_t>(i);
      valid += static_cast<std::uint32_t>(entries[i]) < visible;  // negative ones are large when unsigned
    }
    return valid;
  }
};

}  // namespace hopwell
