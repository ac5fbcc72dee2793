// Iterates over the elements of a TMA box: shared-memory and global-memory address of each element.
#pragma once

#include <array>
#include <functional>

#include "geometry.hpp"
#include "tensor_map.hpp"

namespace hopwell::arch::emu {

struct BoxWalk {
  TensorMapContents map;
  std::array<int, 5> coordinates;  // start of the box; with `rows`: a column, then four rows
  bool rows;

  /// Calls visit(shared address, global pointer) for every element of the box at `shared`. The pointer is null for
  /// elements outside of the tensor.
  template <class Visit>
  void each_element(uint32_t shared, Visit visit) const {
    uint32_t lines = rows ? 4 : 1;
    for (int i = 1; i < map.rank && !rows; ++i) lines *= map.box[i];
    const uint32_t line_bytes = uint32_t{map.box[0]} * map.element_bytes;
    for (uint32_t line = 0; line < lines; ++line) {
      bool inside = true;
      int64_t offset = 0;
      uint32_t rest = line;
      for (int i = 1; i < map.rank; ++i) {
        const int64_t at = rows ? coordinates[size_t(1 + line)] : int64_t{coordinates[size_t(i)]} + rest % map.box[i];
        rest /= map.box[i];
        inside &= at >= 0 && at < int64_t{map.extent[i]};
        offset += at * int64_t(map.stride_bytes[i - 1]);
      }
      for (uint32_t x = 0; x < map.box[0]; ++x) {
        const int64_t at = int64_t{coordinates[0]} + x;
        const bool valid = inside && at >= 0 && at < int64_t{map.extent[0]};
        visit(swizzled(shared + line * line_bytes + x * map.element_bytes, map.swizzle),
              valid ? map.base + offset + at * map.element_bytes : nullptr);
      }
    }
  }
};

/// Queues a copy out of shared memory in the current thread's bulk group (bulk_copy.cpp). The engine reads the bytes at
/// an arbitrary time and calls `write` with them at that time or later.
void submit_bulk_store(uint32_t source, uint32_t bytes, std::function<void(const std::byte*)> write);

}  // namespace hopwell::arch::emu
