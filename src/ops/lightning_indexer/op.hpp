// lightning_indexer: the problem that its backends run. Meaning and shapes: declaration.py.
#pragma once

#include "ops/common/index_operands.hpp"
#include "runtime/backend.hpp"
#include "tile/selection.hpp"

namespace hopwell {
struct LightningIndexerArgs;
}  // namespace hopwell

namespace hopwell::ops::lightning_indexer {

inline constexpr const char* kName = "lightning_indexer";

struct Problem : IndexOperands {
  View q_scale;  // fp32 [s_q, h_index], or absent; e4m3 only, like k_scale
  View k_scale;  // fp32 [s_kv], any stride, or absent
  View indices;  // int32 [s_q, topk]
  View scores;   // fp32 [s_q, topk], or absent
  Visibility visibility;
  std::int64_t topk = 0;
  bool relu = true;
  runtime::Device device;
};

Problem check(const LightningIndexerArgs& args);

}  // namespace hopwell::ops::lightning_indexer
