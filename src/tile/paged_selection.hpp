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

// Which slot an entry of a query names. Block: int, or in kernels tile::Divisor.
template <class Block>
struct PagedSlots {
  const std::int32_t* table;  // of the sequence, or null: entries are slots
  std::uint32_t visible;      // entries from this number on are not valid
  std::uint32_t blocks;       // pages from this number on do not exist
  Block block;                // rows of a page

  // The slot of an entry, or -1 if the entry is not valid.
  [[nodiscard]] HOPWELL_HOST_DEVICE std::int32_t of(std::int32_t entry) const {
    if (std::uint32_t(entry) >= visible) return -1;
    if (table == nullptr) return entry;
    const std::int32_t page = table[entry / block];
    return std::uint32_t(page) < blocks ? page * block + entry % block : -1;
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
  // The slots of sequence b. `limit`: entries from this number on are not valid, see visible(). `rows`: the block, as
  // an int or as a divisor.
  template <class Block>
  [[nodiscard]] HOPWELL_HOST_DEVICE PagedSlots<Block> slots(std::int64_t b, std::int64_t limit,
                                                            const Block& rows) const {
    constexpr std::int64_t kMost = std::int64_t{1} << 31;  // more than any int32
    return {has_tables ? block_tables + b * tables_stride : nullptr, std::uint32_t(clamped(limit, kMost)),
            std::uint32_t(blocks), rows};
  }

 private:
  static HOPWELL_HOST_DEVICE std::int64_t clamped(std::int64_t x, std::int64_t most) {
    return x < 0 ? 0 : x > most ? most : x;
  }
};

}  // namespace hopwell
