// sparse_mla_forward: the problem that its backends run. Meaning and shapes: declaration.py.
#pragma once

#include "runtime/backend.hpp"
#include "runtime/check.hpp"
#include "tile/selection.hpp"
#include "tile/window.hpp"

namespace hopwell {
struct SparseMlaForwardArgs;
}  // namespace hopwell

namespace hopwell::ops::sparse_mla_forward {

struct Problem {
  View q;           // bf16 or fp32 [s_q, h_q, d_qk]
  View kv;          // dtype of q, [s_kv, d_qk]
  View window_kv;   // dtype of q, [s_w, d_qk], or absent
  View attn_sink;   // fp32 [h_q], or absent
  View out;         // dtype of q, [s_q, h_q, d_v]
  View max_logits;  // fp32 [s_q, h_q], or absent
  View lse;         // fp32 [s_q, h_q], or absent
  Selection selection;
  Window window;
  float sm_scale = 0;
  bool share_keys = false;  // adjacent queries may be grouped
  std::int64_t s_q = 0, s_kv = 0, h_q = 0, d_qk = 0, d_v = 0, topk = 0;
  runtime::Device device;
};

Problem check(const SparseMlaForwardArgs& args);

}  // namespace hopwell::ops::sparse_mla_forward
