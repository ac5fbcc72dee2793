// The elements of a box: where each lies in shared and in global memory.
#pragma once

#include <array>
#include <functional>

#include "geometry.hpp"
#include "tensor_map.hpp"

namespace hopwell::arch::emu {

struct BoxWalk {
  TensorMapContents map;
  std::array<int, 5> coordinates;  // of the box; with `rows`: column, then four rows
  bool rows;

  /// visit(shared address, global pointer or null where the box leaves the tensor), for every element of the box at
  /// `shared`.
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

/// Queues a copy out of shared memory in the current thread's bulk group (bulk_copy.cpp): the bytes are read at some
/// moment, and `write` is called with them then or later.
void submit_bulk_store(uint32_t source, uint32_t bytes, std::function<void(const std::byte*)> write);

}  // namespace hopwell::arch::emu
