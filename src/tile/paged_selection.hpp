// The slots that a query of sparse_mla_decode selects in one paged cache.
#pragma once

#include <cstdint>

#include "arch/platform.hpp"

namespace hopwell {

// An int32 array [b, q_len], or [b] with a stride of 0 from query to query; or absent.
struct PerQuery {
  const std::int32_t* data = nullptr;
  std::int64_t stride_b = 0, stride_i = 0;
  bool given = false;  // an empty array may have a null pointer

  [[nodiscard]] HOPWELL_HOST_DEVICE std::int64_t at(std::int64_t b, std::int64_t i) const {
    return data[b * stride_b + i * stride_i];
  }
};

// Entries are slots, or with block tables positions of a sequence.
struct PagedSelection {
  const std::int32_t* indices = nullptr;  // [b, q_len, topk]
  std::int64_t indices_stride_b = 0, indices_stride_i = 0;
  PerQuery topk_length;
  const std::int32_t* block_tables = nullptr;  // [b, max_blocks]
  std::int64_t tables_stride = 0, max_blocks = 0;
  bool has_tables = false;
  PerQuery context_lens;
  bool lens_per_query = false;  // else query i of q_len sees context_lens - q_len + 1 + i positions
  std::int64_t q_len = 0, topk = 0, blocks = 0, block = 1;

  [[nodiscard]] HOPWELL_HOST_DEVICE const std::int32_t* row(std::int64_t b, std::int64_t i) const {
    return indices + b * indices_stride_b + i * indices_stride_i;
  }
  // Number of entries of a row before validity checks.
  [[nodiscard]] HOPWELL_HOST_DEVICE std::int64_t length(std::int64_t b, std::int64_t i) const {
    if (!topk_length.given) return topk;
    return clamped(topk_length.at(b, i), topk);
  }
  // Entries of a query's row are valid only if they are less than this, and the table has a block for them.
  [[nodiscard]] HOPWELL_HOST_DEVICE std::int64_t visible(std::int64_t b, std::int64_t i) const {
    if (!has_tables) return blocks * block;
    const std::int64_t positions = max_blocks * block;
    if (!context_lens.given) return positions;
    const std::int64_t length = context_lens.at(b, i);
    return clamped(lens_per_query ? length : length - q_len + 1 + i, positions);
  }
  // The slot that an entry of sequence b names, or -1. visible: see above.
  [[nodiscard]] HOPWELL_HOST_DEVICE std::int32_t slot(std::int64_t b, std::int64_t visible, std::int32_t entry) const {
    if (entry < 0 || entry >= visible) return -1;
    if (!has_tables) return entry;
    const auto rows = static_cast<std::int32_t>(block);
    const std::int32_t page = block_tables[b * tables_stride + entry / rows];
    return page < 0 || page >= blocks ? -1 : page * rows + entry % rows;
  }

 private:
  static HOPWELL_HOST_DEVICE std::int64_t clamped(std::int64_t x, std::int64_t most) {
    return x < 0 ? 0 : x > most ? most : x;
  }
};

}  // namespace hopwell
