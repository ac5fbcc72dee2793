// Shared by the CPU backends of the three sparse MLA operators: rows as fp32, and tiles of the keys that a query
// attends.
#pragma once

#include <cstdint>

#include "runtime/check.hpp"
#include "tile/cpu/parallel.hpp"
#include "tile/selection.hpp"
#include "tile/window.hpp"

namespace hopwell::cpu {

// Entries of a query per tile. Their kv rows in fp32 (1.2 MB at d_qk 576) and the scores of all heads should fit
// in a core's L2 cache, and each matrix product should be large enough to amortise packing its operands.
inline constexpr std::int64_t kTileEntries = 512;

// load_heads: x[s, :, :] of a bf16 or fp32 [s_q, heads, width] as fp32 rows with a pitch of `row_stride`. store_heads:
// writes such rows to columns first .. first + width - 1.
void load_heads(const View& x, std::int64_t s, float* rows, std::int64_t row_stride);
void store_heads(const float* rows, std::int64_t row_stride, const View& x, std::int64_t s, std::int64_t first,
                 std::int64_t width);

// The rows of the valid entries of a query's tiles, gathered and converted to fp32. Invalid entries cost nothing, and
// the rows that they name are never read. The entries of a query are the window keys that it sees, if there is a
// window, and then the entries of its index row. Tiles are counted from the query's own first entry.
class SelectedRows {
 public:
  // Allocates space for `tiles` tiles, which together have at most kTileEntries entries.
  explicit SelectedRows(const Selection& selection, const View& kv, const Window& window = {},
                        const View& window_kv = {}, std::int64_t tiles = 1)
      : selection_(selection),
        kv_(kv),
        window_(window),
        window_kv_(window_kv),
        tile_(std::clamp<std::int64_t>(entries(selection.topk, window), 1, kTileEntries)),
        keys_(tiles * tile_),
        places_(tile_),
        rows_(tiles * tile_ * kv.shape[1]) {}

  // The most entries of a query.
  [[nodiscard]] static std::int64_t entries(std::int64_t topk, const Window& window) {
    return topk + window.most_keys();
  }
  // Number of tiles of that many entries; at least 1.
  [[nodiscard]] static std::int64_t tiles(std::int64_t entries) {
    return std::max<std::int64_t>(1, (entries + kTileEntries - 1) / kTileEntries);
  }

  // Rows appended by one call: window keys, then keys that the index row selects.
  struct Part {
    std::int64_t of_window = 0, selected = 0;
    [[nodiscard]] std::int64_t count() const { return of_window + selected; }
  };

  void clear() { count_ = 0; }
  // Appends the rows of the valid entries of a tile of query s.
  Part append(std::int64_t s, std::int64_t tile);
  // Writes a tile's part of a row [topk] of numbers, one per entry of the index row: the numbers of its valid entries,
  // from of_valid [count of the part], the part appended last, and zeros for the other entries.
  void spread(std::int64_t s, std::int64_t tile, const float* of_valid, float* row) const;

  [[nodiscard]] std::int64_t tile_entries() const { return tile_; }  // entries of a full tile
  [[nodiscard]] std::int64_t count() const { return count_; }
  [[nodiscard]] const std::int32_t* keys() const { return keys_.get(); }  // [count], rows of kv or of window_kv
  [[nodiscard]] float* rows() const { return rows_.get(); }               // [count, d_qk]

 private:
  // The entries of an index row that are in a tile, after `window` keys.
  struct Span {
    std::int64_t first, last;
  };
  [[nodiscard]] Span span(std::int64_t tile, std::int64_t window) const {
    const std::int64_t first = tile * kTileEntries - window;
    return {std::clamp<std::int64_t>(first, 0, selection_.topk),
            std::clamp<std::int64_t>(first + kTileEntries, 0, selection_.topk)};
  }
  void gather(const View& from, std::int64_t count);

  const Selection& selection_;
  const View& kv_;
  Window window_;  // copies of both: the default arguments are temporaries
  View window_kv_;
  std::int64_t tile_, count_ = 0;
  Part appended_;                        // by the last append
  Scratch<std::int32_t> keys_, places_;  // places: of the selected keys appended last, from the first entry of its span
  Scratch<float> rows_;
};

}  // namespace hopwell::cpu
