// Shadow memory: the last accesses to every 4 bytes of shared memory and to every 16 lanes of a tensor-memory column.
// 16 bytes that are always accessed together, as by engines, share one cell.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "clock.hpp"

namespace hopwell::arch::emu {

/// Proxy of a shared-memory access. Generic-proxy data must be fenced before the async proxy reads it.
enum class Proxy : uint8_t { generic, cp_async, async };

/// Kind of a thread's access. Additions are atomic and cover whole words, so they need no order among each other.
enum class Access : uint8_t { read, write, add };

/// The last accesses to 4 bytes. Two writers and two readers are kept, each with the bytes it touched, so that threads
/// that write neighbouring 16-bit elements are both remembered.
struct SharedCell {
  std::array<Epoch, 2> writes, reads;
  std::array<uint8_t, 2> write_bytes{}, read_bytes{};  // bit i: byte i
  std::array<Proxy, 2> write_proxy{};
  std::array<bool, 2> added{};  // the write is an addition
  uint8_t written = 0;          // bytes that hold data
};

/// Records a write, replacing an earlier write that it covers.
inline void remember_write(SharedCell& cell, Epoch epoch, uint8_t bytes, Proxy proxy) {
  cell.written |= bytes;
  for (int i = 0; i < 2; ++i) {
    if (cell.writes[i].empty()) continue;
    if (cell.writes[i].same_step(epoch)) bytes |= cell.write_bytes[i];
    cell.write_bytes[i] &= uint8_t(~bytes);
    if (!cell.write_bytes[i]) cell.writes[i] = {};
  }
  const int slot = cell.writes[0].empty() ? 0 : 1;
  cell.writes[slot] = epoch;
  cell.write_bytes[slot] = bytes;
  cell.write_proxy[slot] = proxy;
  cell.added[slot] = false;
  for (int i = 0; i < 2; ++i) {  // these reads happened before the write, or have been reported
    cell.read_bytes[i] &= uint8_t(~bytes);
    if (!cell.read_bytes[i]) cell.reads[i] = {};
  }
}

/// Chooses the slot for an access of a kind whose accesses do not conflict with each other, so that more may be live
/// than there are slots. Replaces first an old access that the thread is ordered after, else a random one.
template <class Covered, class RandomBit>
int choose_slot(const std::array<Epoch, 2>& slots, Epoch epoch, Covered covered, RandomBit random_bit) {
  for (int i = 0; i < 2; ++i)
    if (slots[i].empty() || slots[i].agent == epoch.agent) return i;
  for (int i = 0; i < 2; ++i)
    if (covered(slots[i])) return i;
  return random_bit();
}

/// Records an addition next to earlier ones.
template <class Covered, class RandomBit>
void remember_add(SharedCell& cell, Epoch epoch, Covered covered, RandomBit random_bit) {
  const bool only_additions = cell.added[0] && (cell.added[1] || cell.writes[1].empty());
  const SharedCell before = cell;
  remember_write(cell, epoch, 15, Proxy::generic);
  if (only_additions) {
    const int slot = choose_slot(before.writes, epoch, covered, random_bit);
    cell.writes = before.writes, cell.write_bytes = before.write_bytes, cell.added = before.added;
    cell.writes[size_t(slot)] = epoch, cell.write_bytes[size_t(slot)] = 15;
    cell.write_proxy = {};
    cell.added[size_t(slot)] = true;
  } else {
    cell.added[0] = true;  // no other record is left
  }
}

/// The cells of a CTA's shared memory.
class SharedShadow {
 public:
  void reset(size_t bytes) {
    rows_.assign((bytes + 15) / 16, {});
    cells_.clear();
    free_.clear();
  }

  /// Calls visit(cell, offset of its first byte, mask of the cell's bytes) for all cells of [begin, begin + bytes).
  /// Either all visits write in the same step, or all of them read.
  template <class Visit>
  void visit(uint32_t begin, uint32_t bytes, bool write, Visit visit_cell) {
    const uint32_t end = begin + bytes;
    for (uint32_t at = begin & ~15u; at < end; at += 16) {
      Row& row = rows_[at / 16];
      const bool all = at >= begin && at + 16 <= end;
      if (all && !row.cells) {
        visit_cell(row.whole, at, uint8_t{15});
        continue;
      }
      if (!row.cells) split(row);
      std::array<SharedCell, 4>& cells = cells_[row.cells - 1];
      for (uint32_t i = 0; i < 4; ++i)
        if (const uint8_t mask = bytes_of(at + 4 * i, begin, end)) visit_cell(cells[i], at + 4 * i, mask);
      if (all && write) join(row);
    }
  }

 private:
  struct Row {
    SharedCell whole;
    uint32_t cells = 0;  // 0: the row is one cell; else 1 + index of its four cells
  };

  // Mask of the bytes of the 4-byte cell at `cell` that are in [begin, end).
  static uint8_t bytes_of(uint32_t cell, uint32_t begin, uint32_t end) {
    const uint32_t first = std::max(cell, begin), last = std::min(cell + 4, end);
    return first < last ? uint8_t((1u << (last - cell)) - (1u << (first - cell))) : uint8_t{0};
  }

  void split(Row& row) {
    if (free_.empty()) {
      cells_.emplace_back();
      free_.push_back(uint32_t(cells_.size()));
    }
    row.cells = free_.back();
    free_.pop_back();
    cells_[row.cells - 1].fill(row.whole);
  }

  // The row was written as a whole, so the four cells are equal again and become one.
  void join(Row& row) {
    row.whole = cells_[row.cells - 1][0];
    free_.push_back(row.cells);
    row.cells = 0;
  }

  std::vector<Row> rows_;
  std::vector<std::array<SharedCell, 4>> cells_;
  std::vector<uint32_t> free_;
};

/// The last accesses to 16 lanes of one 32-bit column of tensor memory.
struct TensorCell {
  Epoch write;
  std::array<Epoch, 2> reads;
};

}  // namespace hopwell::arch::emu
