// Shared by the CPU backends of the three sparse MLA operators: rows as fp32, and tiles of the keys that a query
// selects.
#pragma once

#include <cstdint>

#include "runtime/check.hpp"
#include "tile/cpu/parallel.hpp"
#include "tile/selection.hpp"

namespace hopwell::cpu {

// Entries of an index row per tile. Their kv rows in fp32 (1.2 MB at d_qk 576) and the scores of all heads should fit
// in a core's L2 cache, and each matrix product should be large enough to amortise packing its operands.
inline constexpr std::int64_t kTileEntries = 512;

// load_heads: x[s, :, :] of a bf16 or fp32 [s_q, heads, width] as fp32 rows with a pitch of `row_stride`. store_heads:
// writes such rows to columns first .. first + width - 1.
void load_heads(const View& x, std::int64_t s, float* rows, std::int64_t row_stride);
void store_heads(const float* rows, std::int64_t row_stride, const View& x, std::int64_t s, std::int64_t first,
                 std::int64_t width);

// The kv rows that the valid entries of index-row tiles select, gathered and converted to fp32. Invalid entries cost
// nothing, and the rows that they name are never read.
class SelectedRows {
 public:
  // Allocates space for `tiles` tiles, which together have at most kTileEntries entries.
  explicit SelectedRows(const Selection& selection, const View& kv, std::int64_t tiles = 1)
      : selection_(selection),
        kv_(kv),
        tile_(std::clamp<std::int64_t>(selection.topk, 1, kTileEntries)),
        keys_(tiles * tile_),
        places_(tile_),
        rows_(tiles * tile_ * kv.shape[1]) {}

  // Number of tiles of an index row; at least 1.
  [[nodiscard]] static std::int64_t tiles(std::int64_t topk) {
    return std::max<std::int64_t>(1, (topk + kTileEntries - 1) / kTileEntries);
  }

  void clear() { count_ = 0; }
  // Appends the rows that the valid entries of a tile of query s select. Returns their number.
  std::int64_t append(std::int64_t s, std::int64_t tile);
  // Writes a tile's part of a row [topk] of numbers, one per entry: the numbers of the valid entries, which were
  // appended last, and zeros for the other entries.
  void spread(std::int64_t s, std::int64_t tile, const float* of_valid, float* row) const;

  [[nodiscard]] std::int64_t tile_entries() const { return tile_; }  // entries of a full tile
  [[nodiscard]] std::int64_t count() const { return count_; }
  [[nodiscard]] const std::int32_t* keys() const { return keys_.get(); }  // [count]
  [[nodiscard]] float* rows() const { return rows_.get(); }               // [count, d_qk]

 private:
  const Selection& selection_;
  const View& kv_;
  std::int64_t tile_, count_ = 0, appended_ = 0;  // appended_: by the last append
  Scratch<std::int32_t> keys_, places_;           // of the tile appended last: entry - tile * kTileEntries
  Scratch<float> rows_;
};

}  // namespace hopwell::cpu
