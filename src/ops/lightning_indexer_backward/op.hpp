// lightning_indexer_backward: what its backends are given. Meaning and shapes: hopwell.h.
#pragma once

#include "ops/common/index_operands.hpp"
#include "runtime/backend.hpp"
#include "tile/selection.hpp"

namespace hopwell::ops::lightning_indexer_backward {

inline constexpr const char* kName = "lightning_indexer_backward";

struct Problem : IndexOperands {
  View target;    // fp32 [s_q, topk]; absent where d_scores is given
  View d_scores;  // fp32 [s_q, topk]; absent where target is given
  View indices;   // int32 [s_q, topk]
  Visibility visibility;
  View row_weights;   // fp32 [s_q], or absent
  View d_loss_array;  // fp32, one element, or absent
  View loss;          // fp32, one element; absent where d_scores is given
  View row_loss;      // fp32 [s_q], or absent
  View d_q;           // like q
  View d_k;           // fp32 [s_kv, d_index]
  View d_weights;     // like weights
  float d_loss = 1;   // where d_loss_array is absent
  bool relu = true;
  bool deterministic = false;
  std::int64_t topk = 0;
  runtime::Device device;
  void* workspace = nullptr;
  std::size_t workspace_bytes = 0;
};

}  // namespace hopwell::ops::lightning_indexer_backward
