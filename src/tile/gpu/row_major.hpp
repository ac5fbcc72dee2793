// Matrices of e4m3, bf16 or fp32 in global memory with rows of any alignment.
#pragma once

#include "tile/gpu/bf16_split.hpp"
#include "tile/gpu/views.hpp"

namespace hopwell::tile {

/// A matrix, or rows of one.
template <class T>
struct RowMajor {
  const T* data;
  int64_t stride;  // elements
  int columns;
  bool in_chunks;  // every row is a multiple of eight columns, aligned to 16 bytes (e4m3: 8)

  /// bf16 split of columns `column` to `column` + 7 of a row; zeros past the last column.
  HOPWELL_DEVICE Chunk<kSplitTerms<T>> chunk(const T* row, int column) const {
    Chunk<kSplitTerms<T>> chunk{};
    if (column >= columns) return chunk;
    if constexpr (sizeof(T) == 1) {
      uint64_t codes = 0;
      if (in_chunks) {
        codes = *reinterpret_cast<const uint64_t*>(row + column);
      } else {
        HOPWELL_UNROLL
        for (int i = 0; i < 8; ++i)
          if (column + i < columns) codes |= uint64_t{row[column + i].bits} << 8 * i;
      }
      return e4m3x8_to_bf16(codes);
    } else if constexpr (sizeof(T) == 2) {
      if (in_chunks) return {{arch::load_vector<arch::Words4>(row + column)}};
      HOPWELL_UNROLL
      for (int i = 0; i < 8; ++i)
        if (column + i < columns) chunk.split_term[0].w[i / 2] |= uint32_t{row[column + i].bits} << 16 * (i % 2);
      return chunk;
    } else {
      float x[8];
      HOPWELL_UNROLL
      for (int i = 0; i < 8; ++i) x[i] = column + i < columns ? row[column + i] : 0;
      return split<kSplitTerms<T>>(x);
    }
  }
};

/// The last dimension of a view as columns, the dimension before it as rows; `dims` other dimensions precede them.
template <class T>
RowMajor<T> row_major(const View& view, std::size_t dims) {
  const bool in_chunks = view.shape[dims] % 8 == 0 && rows_aligned(view, dims, sizeof(T) == 1 ? 8 : 16);
  return {view.as<const T>(), view.stride[dims - 1], static_cast<int>(view.shape[dims]), in_chunks};
}

}  // namespace hopwell::tile
