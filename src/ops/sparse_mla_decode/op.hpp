// sparse_mla_decode: the problem that its backends run. Meaning and shapes: declaration.py.
#pragma once

#include <optional>

#include "runtime/backend.hpp"
#include "runtime/check.hpp"
#include "tile/mla_cache.hpp"
#include "tile/paged_selection.hpp"

namespace hopwell {
struct SparseMlaDecodeArgs;
}  // namespace hopwell

namespace hopwell::ops::sparse_mla_decode {

// One cache and the entries that queries select in it.
struct Keys {
  mla_cache::Blocks cache;
  PagedSelection selection;
};

struct Problem {
  View q;                                   // bf16 or fp32 [b, q_len, h_q, d_qk]
  View out;                                 // like q or fp32 [b, q_len, h_q, d_v]
  View lse;                                 // fp32 [b, q_len, h_q], or absent
  View attn_sink;                           // fp32 [h_q], or absent
  std::optional<mla_cache::Format> format;  // of both caches; absent: rows of `row_type`
  DType row_type = DType::kOther;
  Keys keys;
  std::optional<Keys> extra;
  std::optional<mla_cache::Blocks> rope_cache;  // the last columns of K, rows of `row_type`
  const float* kv_scale = nullptr;              // on the device, or null:
  float kv_scale_value = 1;
  float sm_scale = 0;
  std::int64_t keys_per_split = 0;
  std::int64_t b = 0, q_len = 0, h_q = 0, d_qk = 0, d_v = 0;
  runtime::Device device;
};

Problem check(const SparseMlaDecodeArgs& args);

}  // namespace hopwell::ops::sparse_mla_decode
