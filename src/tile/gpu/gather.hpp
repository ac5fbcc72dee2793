// Gathers rows of bf16 from arbitrary addresses into the panels of a tile.
#pragma once

#include "arch/sm80/async_copy.hpp"
#include "arch/sm80/memory.hpp"
#include "arch/sm80/threads.hpp"
#include "arch/sm90/mbarrier.hpp"
#include "tile/gpu/panel.hpp"
#include "tile/selection.hpp"

namespace hopwell::tile {

/// Stands for the row of an entry that is not valid.
inline constexpr uint32_t kNoRow = 0xffffffff;

/// Starts the copies of a row's 16-byte chunk for `panels` panels with a pitch of panel_bytes; zeros if the row is not
/// valid. Without kAsync: copies through registers, for rows of any alignment. `to` and `source` are the addresses for
/// the first panel.
template <bool kAsync>
HOPWELL_DEVICE void copy_chunk(uint32_t to, uint32_t panel_bytes, const arch::bf16* source, bool valid, int panels) {
  HOPWELL_UNROLL
  for (int panel = 0; panel < panels; ++panel) {
    if constexpr (kAsync) {
      arch::cp_async(to + uint32_t(panel) * panel_bytes, source + panel * kPanelColumns, valid ? 16 : 0);
    } else {
      arch::Words4 words{};
      HOPWELL_UNROLL
      for (int i = 0; i < 4; ++i)
        if (valid)
          words.w[i] = source[panel * kPanelColumns + 2 * i].bits |
                       uint32_t{source[panel * kPanelColumns + 2 * i + 1].bits} << 16;
      arch::store_shared_v4(to + uint32_t(panel) * panel_bytes, words);
    }
  }
}

/// Source rows of a tile's 64 rows: lane l of a warp holds the indices of rows l and l + 32. Rows with an index outside
/// of `rows` are filled with zeros.
struct RowIndices {
  int low, high;
  KeyRange rows;
};

/// Starts copying a tile, executed by one warp: row i is data + index · stride (elements), to kColumns / 64 panels from
/// `destination` on. data and stride are multiples of 16 bytes, and all rows lie within 64 GiB after the first.
/// kUnroll, a divisor of 16: number of four-row copies in flight per loop iteration; more is faster and takes more
/// registers.
template <int kColumns, int kUnroll = 1>
HOPWELL_DEVICE void gather_rows(uint32_t destination, const arch::bf16* data, int64_t stride, RowIndices indices) {
  constexpr uint32_t kNone = 0xffffffff;
  const uint32_t lane = uint32_t(arch::lane_index()), chunk = lane % 8;  // unsigned: fewer registers for addresses
  const uint32_t chunks = uint32_t(stride / 8);                          // in chunks: offsets take one register
  const uint32_t low = indices.rows.has(indices.low) ? uint32_t(indices.low) * chunks : kNone;
  const uint32_t high = indices.rows.has(indices.high) ? uint32_t(indices.high) * chunks : kNone;
  HOPWELL_NO_UNROLL
  for (uint32_t first = 0; first < kTileRows / 4; first += kUnroll) {
    HOPWELL_UNROLL
    for (uint32_t i = first; i < first + kUnroll; ++i) {
      const uint32_t row = 4 * i + lane / 8, offset = arch::shuffle(i < kTileRows / 8 ? low : high, int(row));
      const bool valid = offset != kNone;
      const arch::bf16* source = data + (valid ? uint64_t{offset} + chunk : 0) * 8;
      copy_chunk<true>(destination + swizzled(row, chunk), kPanelBytes, source, valid, kColumns / kPanelColumns);
    }
  }
}

/// The same for rows of any alignment and address; slow.
template <int kColumns>
HOPWELL_DEVICE void copy_rows(uint32_t destination, const arch::bf16* data, int64_t stride, RowIndices indices) {
  HOPWELL_NO_UNROLL
  for (int row = 0; row < kTileRows; ++row) {
    const int index = arch::shuffle(row < 32 ? indices.low : indices.high, row);
    HOPWELL_NO_UNROLL
    for (int chunk = arch::lane_index(); chunk < kColumns / 8; chunk += 32) {
      arch::Words4 words{};
      HOPWELL_UNROLL
      for (int i = 0; i < 8 && indices.rows.has(index); ++i)
        words.w[i / 2] |= uint32_t{data[index * stride + 8 * chunk + i].bits} << 16 * (i % 2);
      arch::store_shared_v4(
          destination + uint32_t(chunk / 8) * kPanelBytes + swizzled(uint32_t(row), uint32_t(chunk % 8)), words);
    }
  }
}

/// Executed by each thread that has copied: one arrival when all its copies so far have completed. With kAsync the
/// copies write through the generic proxy, and a fence here would delay the next copies: the reader executes the proxy
/// fence after its wait.
template <bool kAsync>
HOPWELL_DEVICE void arrive_after_copies(arch::mbarrier& full, arch::Site site = arch::Site::current()) {
  if constexpr (kAsync) {
    arch::cp_async_mbarrier_arrive_noinc(full, site);
  } else {
    arch::fence_proxy_async();
    arch::mbarrier_arrive(full, site);
  }
}

/// Whether gather_rows can copy `rows` rows with a pitch of `stride` elements: aligned, ascending, and within 64 GiB.
inline bool can_gather(const void* data, int64_t rows, int64_t stride) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 &&
         (rows <= 1 || (stride >= 0 && stride % 8 == 0 && rows * (stride / 8) < 0xffffffff));
}

}  // namespace hopwell::tile
