// indexer_dense_loss: the problem that its backends run. Meaning and shapes: declaration.py.
#pragma once

#include "ops/common/index_gradients.hpp"
#include "runtime/backend.hpp"
#include "tile/selection.hpp"

namespace hopwell::ops::indexer_dense_loss {

inline constexpr const char* kName = "indexer_dense_loss";

struct Problem : IndexOperands, IndexGradients {  // of the indexer; the attention has the same s_q and s_kv
  View attention_q;                               // bf16 or fp32 [s_q, h_q, d_qk]
  View attention_kv;                              // dtype of attention_q, [s_kv, d_qk]
  View lse;                                       // fp32 [s_q, h_q]
  View attn_sink;                                 // fp32 [h_q], or absent
  float sm_scale = 0;
  bool normalize_l1 = false;  // targets are divided by their sums, not by h_q
  Visibility visibility;
  runtime::Device device;
};

Problem check(const IndexerDenseLossArgs& args);

}  // namespace hopwell::ops::indexer_dense_loss
