// What the CPU's inner loops work on.
#pragma once

#include "ops/paged_attention/op.hpp"

namespace hopwell::ops::paged_attention {

// The vectors that a kernel reads: `tokens` consecutive slots of one page, for `heads` consecutive KV heads. `next` is
// the data of the run that will be read after this one: a page may be anywhere, so the hardware cannot foresee it.
template <class T>
struct Run {
  const T* data;
  const T* next;
  CacheStrides strides;
  std::int64_t heads, tokens, d;
};

// RowGroup of a group, `rows_per_head` to a KV head: matrices [heads * rows_per_head, ...] with these distances between
// rows.
struct RowGroup {
  std::int64_t rows_per_head, ld_vector, ld_logits;
};

}  // namespace hopwell::ops::paged_attention
