// sparse_mla_backward: the checked arguments that its backends take. Meaning and shapes: declaration.py.
#pragma once

#include "runtime/backend.hpp"
#include "runtime/check.hpp"
#include "tile/selection.hpp"
#include "tile/window.hpp"

namespace hopwell {
struct SparseMlaBackwardArgs;
}  // namespace hopwell

namespace hopwell::ops::sparse_mla_backward {

struct Problem {
  View d_out;        // like q [s_q, h_q, d_v]
  View q;            // bf16 or fp32 [s_q, h_q, d_qk]
  View kv;           // like q [s_kv, d_qk]
  View window_kv;    // like q [s_w, d_qk], or absent
  View out;          // like q [s_q, h_q, d_v]
  View lse;          // fp32 [s_q, h_q]
  View attn_sink;    // fp32 [h_q], or absent
  View dq;           // like q [s_q, h_q, d_qk], or absent
  View dkv;          // fp32 or bf16 [s_kv, d_qk], or absent
  View d_window_kv;  // dtype of dkv [s_w, d_qk], or absent; only with window_kv
  View d_sink;       // fp32 [h_q], or absent; only with attn_sink
  View attn;         // fp32 [s_q, topk], or absent
  Selection selection;
  Window window;
  float sm_scale = 0;
  bool deterministic = false;
  bool indices_ascending = false;  // the caller promises it; results hold if it is false
  bool share_keys = false;         // adjacent queries may be grouped
  bool accumulate = false;         // adds to dkv and d_window_kv, which are fp32
  bool attn_with_sink = false;     // attn sums exp(score - lse') instead of exp(score - lse)
  std::int64_t s_q = 0, s_kv = 0, h_q = 0, d_qk = 0, d_v = 0, topk = 0;
  runtime::Device device;
};

Problem check(const SparseMlaBackwardArgs& args);

}  // namespace hopwell::ops::sparse_mla_backward
