// paged_lightning_indexer: the problem that its backends run. Meaning and shapes: declaration.py.
#pragma once

#include <algorithm>
#include <optional>

#include "runtime/backend.hpp"
#include "runtime/check.hpp"
#include "tile/mla_cache.hpp"
#include "tile/paged_selection.hpp"
#include "tile/selection.hpp"

namespace hopwell {
struct PagedLightningIndexerArgs;
}  // namespace hopwell

namespace hopwell::ops::paged_lightning_indexer {

inline constexpr const char* kName = "paged_lightning_indexer";

struct Problem {
  View q;        // bf16, fp32 or e4m3 [b, q_len, h_index, d_index]
  View weights;  // fp32 or bf16 [b, q_len, h_index]
  View q_scale;  // fp32 [b, q_len, h_index], or absent; e4m3 only
  mla_cache::Blocks cache;
  std::optional<mla_cache::Format> format;  // of keys for an e4m3 q; absent: rows of q's dtype
  PagedSelection positions;                 // block tables and numbers of positions, without indices
  View indices;                             // int32 [b, q_len, topk]
  View scores;                              // fp32 [b, q_len, topk], or absent
  View lengths;                             // int32 [b, q_len], or absent
  std::int64_t b = 0, q_len = 0, h_index = 0, d_index = 0, topk = 0;
  bool relu = true, slots = false;
  runtime::Device device;

  // No query sees more positions, because context_lens are int32.
  [[nodiscard]] std::int64_t most_positions() const {
    return std::min<std::int64_t>(positions.max_blocks * positions.block, INT32_MAX);
  }
  // Whether all positions of a query with `visible` positions are selected, and nothing else about them is asked for.
  [[nodiscard]] bool selects_all(std::int64_t visible) const { return visible <= topk && !scores; }
};

Problem check(const PagedLightningIndexerArgs& args);

}  // namespace hopwell::ops::paged_lightning_indexer
