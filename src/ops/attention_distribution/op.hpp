// attention_distribution: the problem that its backends run. Meaning and shapes: declaration.py.
#pragma once

#include "runtime/backend.hpp"
#include "runtime/check.hpp"
#include "tile/selection.hpp"

namespace hopwell::ops::attention_distribution {

struct Problem {
  View q;          // bf16 or fp32 [s_q, h_q, d_qk]
  View kv;         // dtype of q, [s_kv, d_qk]
  View lse;        // fp32 [s_q, h_q]
  View attn_sink;  // fp32 [h_q], or absent
  View attn;       // fp32 [s_q, topk]
  Selection selection;
  float sm_scale = 0;
  bool normalize_l1 = false;
  bool indices_ascending = false;  // a hint of the caller, not checked
  std::int64_t s_q = 0, s_kv = 0, h_q = 0, d_qk = 0, topk = 0;
  runtime::Device device;
};

Problem check(const AttentionDistributionArgs& args);

}  // namespace hopwell::ops::attention_distribution
