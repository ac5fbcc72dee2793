// paged_attention: the checked problem that backends solve. declaration.py documents the arguments.
#pragma once

#include <hopwell/enums.h>

#include "runtime/backend.hpp"
#include "runtime/check.hpp"

namespace hopwell {
struct PagedAttentionArgs;
}  // namespace hopwell

namespace hopwell::ops::paged_attention {

constexpr std::int64_t kMaxD = 256;

// Strides of a cache, in elements, for all layouts. Element e of (page, KV head, slot) is at
//   page * .page + head * .head + slot * .slot + e / group * group_stride + e % group.
struct CacheStrides {
  std::int64_t page = 0, head = 0, slot = 0;
  std::int64_t group = 0;         // contiguous elements: d; layout vllm: x of a key, 1 of a value
  std::int64_t group_stride = 0;  // from one group to the next
};

struct Problem {
  View q;             // fp32, fp16 or bf16 [b, q_len, h_q, d]
  View k_cache;       // like q, in the layout of the caller
  View v_cache;       // like q, in the layout of the caller
  View block_tables;  // int32 [b, max_blocks]
  View context_lens;  // int32 [b]
  View pos_bias_u;    // q's dtype or fp32 [h_q, d], or absent
  View bias;          // any float, key-indexed [b, h_q, q_len, extent] or distance-indexed [b, h_q, extent], or absent;
                      // a first dimension of 1 has become b with stride 0
  View pos_bias_v;    // q's dtype or fp32 [h_q, d], or absent
  View r;  // q's dtype or fp32 [h_q, extent, d], or absent; a first dimension of 1 has become h_q with stride 0
  View alibi_slopes;  // fp32 [h_q], or absent
  View out;           // like q
  View lse;           // fp32 [b, q_len, h_q], or absent
  CacheStrides k, v;
  hopwell_cache_layout layout = HOPWELL_CACHE_NHD;
  hopwell_bias_kind bias_kind = HOPWELL_BIAS_KEY;
  hopwell_out_of_range out_of_range = HOPWELL_OUT_OF_RANGE_ZERO;
  bool post_scale = false;
  float scale = 0;
  std::int64_t window = INT64_MAX;  // keys with delta >= window are hidden
  std::int64_t extent = 0;          // columns of bias or r
  std::int64_t b = 0, q_len = 0, h_q = 0, h_kv = 0, d = 0, blocks = 0, block = 0, max_blocks = 0;
  runtime::Device device;
};

Problem check(const PagedAttentionArgs& args);

}  // namespace hopwell::ops::paged_attention
