// Shadow memory: for every 4 bytes of shared memory, and every 16 lanes of a tensor-memory column, who touched them
// last.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "clock.hpp"

namespace hopwell::arch::emu {

/// How a shared-memory access travels. Generic-proxy data must be fenced before the async proxy looks at it.
enum class Proxy : uint8_t { generic, cp_async, async };

/// The last accesses to 4 bytes. Two writers and two readers are kept, each with the bytes it touched, so that threads
/// that write neighbouring 16-bit elements are both remembered.
struct SharedCell {
  std::array<Epoch, 2> writes, reads;
  std::array<uint8_t, 2> write_bytes{}, read_bytes{};  // bit i: byte i
  std::array<Proxy, 2> write_proxy{};
  uint8_t written = 0;  // bytes that hold data
};

/// Remembers a write, in the place of what it covers.
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
  for (int i = 0; i < 2; ++i) {  // whoever writes has been ordered after these reads, or has been reported
    cell.read_bytes[i] &= uint8_t(~bytes);
    if (!cell.read_bytes[i]) cell.reads[i] = {};
  }
}

/// The last accesses to 16 lanes of one 32-bit column of tensor memory.
struct TensorCell {
  Epoch write;
  std::array<Epoch, 2> reads;
};

/// Keeps a read among two: an old one that the reader knows of is replaced first, else one at random.
template <class Covered, class RandomBit>
int choose_read_slot(const std::array<Epoch, 2>& reads, Epoch epoch, Covered covered, RandomBit random_bit) {
  for (int i = 0; i < 2; ++i)
    if (reads[i].empty() || reads[i].agent == epoch.agent) return i;
  for (int i = 0; i < 2; ++i)
    if (covered(reads[i])) return i;
  return random_bit();
}

}  // namespace hopwell::arch::emu
