// lightning_indexer_backward: what its backends are given. Meaning and shapes: hopwell.h.
#pragma once

#include "ops/common/index_operands.hpp"
#include "runtime/backend.hpp"
#include "tile/selection.hpp"

namespace hopwell::ops::lightning_indexer_backward {

inline constexpr const char* kName = "lightning_indexer_backward";

struct Problem : IndexOperands {
  View target;   // fp32 [s_q, topk]
  View indices;  // int32 [s_q, topk]
  Visibility visibility;
  View loss;       // fp32, one element
  View d_q;        // like q
  View d_k;        // fp32 [s_kv, d_index]
  View d_weights;  // like weights
  float d_loss = 1;
  bool deterministic = false;
  std::int64_t topk = 0;
  runtime::Device device;
  void* workspace = nullptr;
  std::size_t workspace_bytes = 0;
};

}  // namespace hopwell::ops::lightning_indexer_backward
