// paged_attention on GPUs: position-dependent terms of a logit, and the range of keys that a query sees.
#pragma once

#include "ops/paged_attention/gpu/scalars.hpp"

namespace hopwell::ops::paged_attention {

struct Keys {
  int begin, end;
};

// Bias per key, per distance or absent; the fused form (q + v)·r, used if r is not null; ALiBi; and the visible keys.
struct PositionBias {
  enum class Index : int { none, key, distance };

  const void *bias, *r, *v;   // or null; v: pos_bias_v
  const float* alibi_slopes;  // or null
  int64_t strides[3];         // of bias: sequence, query, head
  int64_t r_head_stride, r_stride, v_stride, slopes_stride;
  int r_row_bytes;  // stride between rows of r, bytes
  Float type, r_type, v_type;
  Index index;
  int extent;                          // columns of bias or r
  bool clamp;                          // columns past the last one read the last one; otherwise they read zero
  bool aligned, r_aligned, v_aligned;  // rows consist of whole 16-byte chunks
  bool r_direct;                       // r is read from global memory on use, not copied with the tile
  int head_chunks;                     // stride between heads of the bias in 16-byte chunks, if rows are aligned
  bool post_scale;                     // the bias is added after the scale
  float scale;
  float log2_scale;     // factor of the bias
  int window, key_end;  // keys at distance >= `window` from a query are hidden, and keys ≥ key_end

  HOPWELL_DEVICE bool exists() const { return index != Index::none; }
  HOPWELL_DEVICE Keys visible_keys(int position) const {
    return {larger(0, position - window + 1), smaller(position + 1, key_end)};
  }
  // Column of a key's bias in its row; −1 if the key has no bias.
  HOPWELL_DEVICE int column_of(int position, int key) const {
    return within_extent(index == Index::key ? key : position - key);
  }
  // Row of r for a key; −1 if the key has no row, which adds 0.
  HOPWELL_DEVICE int r_row_of(int position, int key) const { return within_extent(position - key); }
  HOPWELL_DEVICE int64_t row_offset(int sequence, int query, int head) const {
    return sequence * strides[0] + query * strides[1] + head * strides[2];
  }

 private:
  HOPWELL_DEVICE int within_extent(int column) const {
    if (clamp) column = smaller(column, extent - 1);
    return column < extent ? column : -1;
  }
};

}  // namespace hopwell::ops::paged_attention
