// paged_attention on GPUs: what a key's position adds to its logits, and which keys a query sees.
#pragma once

#include "ops/paged_attention/gpu/scalars.hpp"

namespace hopwell::ops::paged_attention {

struct Keys {
  int begin, end;
};

// A bias per key, per distance or none; the fused form (q + v)·r, which is there if r is; ALiBi; and the visible keys.
struct PositionBias {
  enum class Index : int { none, key, distance };

  const void *bias, *r, *v;   // or null; v: pos_bias_v
  const float* alibi_slopes;  // or null
  int64_t strides[3];         // of bias: sequence, query, head
  int64_t r_head_stride, r_stride, v_stride, slopes_stride;
  int r_row_bytes;  // from one row of r to the next
  Float type, r_type, v_type;
  Index index;
  int extent;                          // columns of bias or r
  bool clamp;                          // columns past the last one are the last one; else they are zero
  bool aligned, r_aligned, v_aligned;  // rows lie in whole 16-byte chunks
  bool r_direct;                       // r is read from memory as it is used, not copied with the tile
  int head_chunks;                     // 16-byte chunks from a head's bias to the next one's, where rows lie in such
  bool post_scale;                     // the bias is added after the scale
  float scale;
  float log2_scale;     // what the bias is multiplied by
  int window, key_end;  // keys that are `window` or more behind a query are hidden, and keys ≥ key_end

  HOPWELL_DEVICE bool exists() const { return index != Index::none; }
  HOPWELL_DEVICE Keys visible_keys(int position) const {
    return {larger(0, position - window + 1), smaller(position + 1, key_end)};
  }
  // The element of its row that is a key's bias; −1 if there is none.
  HOPWELL_DEVICE int column_of(int position, int key) const {
    return within_extent(index == Index::key ? key : position - key);
  }
  // The row of r that a key has; −1: none, it adds nothing.
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
