// paged_attention on GPUs: addresses of keys and values.
#pragma once

#include "ops/paged_attention/gpu/scalars.hpp"
#include "ops/paged_attention/op.hpp"

namespace hopwell::ops::paged_attention {

// The paged cache of K and V, its block tables and the lengths of the sequences.
struct Cache {
  const void *k, *v;
  const int *block_tables, *context_lens;
  CacheStrides k_at, v_at;               // elements
  int64_t k_page, v_page;                // bytes, like the strides that follow
  int k_slot, v_slot, k_group, v_group;  // stride between slots of a page, and between groups of a vector's elements
  int64_t tables_stride, lens_stride;    // elements
  int blocks, max_context;               // number of pages; keys that a block table has room for
  Divisor block;                         // keys per page
  bool scattered;                        // true if pages or their elements are not made of whole 16-byte chunks

  HOPWELL_DEVICE int context_of(int sequence) const {
    return larger(0, smaller(context_lens[sequence * lens_stride], max_context));
  }
  // Page of a key; −1 if the block table holds an invalid number.
  HOPWELL_DEVICE int page_of(int sequence, int key) const {
    const int page = block_tables[sequence * tables_stride + key / block];
    return unsigned(page) < unsigned(blocks) ? page : -1;
  }
};

template <class T>
HOPWELL_DEVICE const T* element_of(const void* cache, const CacheStrides& at, int page, int head, int slot, int e) {
  const int groups = e / int(at.group);
  return static_cast<const T*>(cache) + page * at.page + head * at.head + slot * at.slot + groups * at.group_stride +
         (e - groups * int(at.group));
}

}  // namespace hopwell::ops::paged_attention
