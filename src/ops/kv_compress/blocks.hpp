// Which tokens a compressed key is made of.
//
// A document of tokens is cut into blocks of `ratio` tokens. A whole block makes one compressed key. Its window is the
// block and, with overlap, the block before it in the document.
#pragma once

#include <cstdint>

#include "arch/platform.hpp"

namespace hopwell::ops::kv_compress {

// Offsets of packed documents as int32 [documents + 1] with a stride. Their values may be anything.
struct Offsets {
  const std::int32_t* data = nullptr;
  std::int64_t stride = 1;

  HOPWELL_HOST_DEVICE std::int64_t operator[](std::int64_t i) const { return data[i * stride]; }

  // The document with offset(i) <= x < offset(i + 1), or -1. The binary search finds it if offsets ascend. The loop
  // finds it in any other list.
  [[nodiscard]] HOPWELL_HOST_DEVICE std::int64_t find(std::int64_t x, std::int64_t documents) const {
    std::int64_t low = 0, high = documents;
    while (high - low > 1) {
      const std::int64_t middle = (low + high) / 2;
      ((*this)[middle] <= x ? low : high) = middle;
    }
    if (low < documents && (*this)[low] <= x && x < (*this)[low + 1]) return low;
    for (std::int64_t i = 0; i < documents; ++i)
      if ((*this)[i] <= x && x < (*this)[i + 1]) return i;
    return -1;
  }
};

// The window of one compressed key: tokens start .. start + ratio - 1, and the `ratio` tokens before them.
struct Window {
  std::int64_t start = 0;
  bool made = false;          // false: the row of the compressed key is 0
  bool has_previous = false;  // the previous block belongs to the window
};

struct Blocks {
  std::int64_t s = 0;      // tokens
  std::int64_t n = 0;      // rows of compressed keys
  std::int64_t ratio = 1;  // at most s + 1: a larger one makes no compressed key either
  bool overlap = false;
  std::int64_t most = 0;  // s / ratio: no document has more whole blocks
  bool packed = false;    // several documents; otherwise all tokens are one
  std::int64_t documents = 0;
  Offsets cu_seqlens, cu_compressed;

  struct Document {
    std::int64_t begin, end;    // tokens begin .. end - 1
    std::int64_t key, key_end;  // rows of its compressed keys
  };
  [[nodiscard]] HOPWELL_HOST_DEVICE Document document(std::int64_t i) const {
    if (!packed) return {0, s, 0, n};
    const auto clamped = [this](std::int64_t token) { return token < 0 ? 0 : token > s ? s : token; };
    const std::int64_t key_end = cu_compressed[i + 1];
    return {clamped(cu_seqlens[i]), clamped(cu_seqlens[i + 1]), cu_compressed[i], key_end < n ? key_end : n};
  }

  // Whether block j of a document makes a compressed key.
  [[nodiscard]] HOPWELL_HOST_DEVICE bool makes(const Document& d, std::int64_t j) const {
    return j >= 0 && j < most && d.begin + (j + 1) * ratio <= d.end && d.key + j >= 0 && d.key + j < d.key_end;
  }

  // The window of row `row` of the compressed keys.
  [[nodiscard]] HOPWELL_HOST_DEVICE Window window(std::int64_t row) const {
    const std::int64_t i = !packed ? 0 : cu_compressed.find(row, documents);
    if (i < 0) return {};
    const Document d = document(i);
    const std::int64_t j = row - d.key;
    if (!makes(d, j)) return {};
    return {d.begin + j * ratio, true, overlap && j > 0};
  }

  // Whether a window has columns of token t: the block's own columns, and with overlap those that the next block reads.
  struct Use {
    bool own = false, next = false;
  };
  [[nodiscard]] HOPWELL_HOST_DEVICE Use use(std::int64_t t) const {
    const std::int64_t i = !packed ? 0 : cu_seqlens.find(t, documents);
    if (i < 0) return {};
    const Document d = document(i);
    const std::int64_t j = (t - d.begin) / ratio;
    return {makes(d, j), overlap && makes(d, j + 1)};
  }
};

}  // namespace hopwell::ops::kv_compress
