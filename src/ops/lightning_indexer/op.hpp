// lightning_indexer and its backward: what their backends are given. Meaning and shapes: hopwell.h.
#pragma once

#include "runtime/backend.hpp"
#include "tile/selection.hpp"

namespace hopwell::ops {

namespace lightning_indexer {

struct Problem {
  View q;        // bf16 or fp32 [s_q, h_index, d_index]
  View k;        // like q [s_kv, d_index]
  View weights;  // fp32 or bf16 [s_q, h_index]
  View indices;  // int32 [s_q, topk]
  View scores;   // fp32 [s_q, topk], or absent
  Causality causality;
  std::int64_t s_q = 0, s_kv = 0, h_index = 0, d_index = 0, topk = 0;
  runtime::Device device;
  void* workspace = nullptr;
  std::size_t workspace_bytes = 0;
};

}  // namespace lightning_indexer

namespace lightning_indexer_backward {

struct Problem {
  View target;     // fp32 [s_q, topk]
  View q;          // bf16 or fp32 [s_q, h_index, d_index]
  View k;          // like q [s_kv, d_index]
  View weights;    // fp32 or bf16 [s_q, h_index]
  View indices;    // int32 [s_q, topk]
  View loss;       // fp32, one element
  View d_q;        // like q
  View d_k;        // fp32 [s_kv, d_index]
  View d_weights;  // like weights
  float d_loss = 1;
  bool deterministic = false;
  std::int64_t s_q = 0, s_kv = 0, h_index = 0, d_index = 0, topk = 0;
  runtime::Device device;
  void* workspace = nullptr;
  std::size_t workspace_bytes = 0;
};

}  // namespace lightning_indexer_backward

}  // namespace hopwell::ops
