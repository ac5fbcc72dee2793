// Operands of the CPU's inner loops.
#pragma once

#include "ops/paged_attention/op.hpp"

namespace hopwell::ops::paged_attention {

// The vectors that a kernel reads: `tokens` consecutive slots of one page, for `heads` consecutive KV heads. `next` is
// the data of the run that is read after this run: pages are scattered, so the hardware prefetcher cannot predict it.
template <class T>
struct Run {
  const T* data;
  const T* next;
  CacheStrides strides;
  std::int64_t heads, tokens, d;
};

// Rows of a group, `rows_per_head` for each KV head: matrices [heads * rows_per_head, ...] with these row strides.
struct RowGroup {
  std::int64_t rows_per_head, ld_vector, ld_logits;
};

}  // namespace hopwell::ops::paged_attention
