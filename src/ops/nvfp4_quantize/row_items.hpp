// Index arithmetic for a matrix whose rows have `per_row` items each: the row of an item, by a multiplication.
#pragma once

#include "arch/platform.hpp"

namespace hopwell::ops::nvfp4_quantize {

struct RowItems {
  int64_t rows, per_row;
  uint32_t multiplier, shift;  // item / per_row = (item + high half of multiplier · item) >> shift, below 2^31

  constexpr int64_t count() const { return rows * per_row; }
  constexpr bool are_few() const { return count() <= 0x7fffffff; }
  HOPWELL_DEVICE uint32_t row(uint32_t item) const {  // if are_few()
    return (item + uint32_t(uint64_t{item} * multiplier >> 32)) >> shift;
  }
  HOPWELL_DEVICE int64_t row(int64_t item) const { return are_few() ? row(uint32_t(item)) : item / per_row; }
};

inline RowItems row_items(int64_t rows, int64_t per_row) {
  uint32_t shift = 0;
  while (shift < 31 && int64_t{1} << shift < per_row) ++shift;
  const auto power = uint64_t{1} << shift, divisor = uint64_t(per_row > 0 ? per_row : 1);
  return {rows, per_row, per_row > 0 ? uint32_t(((power - divisor) << 32) / divisor + 1) : 0, shift};
}

}  // namespace hopwell::ops::nvfp4_quantize
