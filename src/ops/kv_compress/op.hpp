// kv_compress and kv_compress_backward: the problems that their backends run.
#pragma once

#include "ops/kv_compress/blocks.hpp"
#include "runtime/backend.hpp"
#include "runtime/check.hpp"

namespace hopwell {
struct KvCompressArgs;
struct KvCompressBackwardArgs;
}  // namespace hopwell

namespace hopwell::ops::kv_compress {

struct Problem {
  View kv, gate;       // bf16 or fp32 [s, w]
  View position_bias;  // fp32 [ratio, w], or absent
  View out;            // bf16 or fp32 [n, d]
  Blocks blocks;
  std::int64_t d = 0, w = 0;
  runtime::Device device;
};

struct BackwardProblem {
  View d_out;            // bf16 or fp32 [n, d]
  View kv, gate;         // bf16 or fp32 [s, w]
  View position_bias;    // fp32 [ratio, w], or absent
  View d_kv, d_gate;     // like kv, or absent
  View d_position_bias;  // fp32 [ratio, w], or absent
  Blocks blocks;
  std::int64_t d = 0, w = 0;
  runtime::Device device;
};

Problem check(const KvCompressArgs& args);
BackwardProblem check(const KvCompressBackwardArgs& args);

}  // namespace hopwell::ops::kv_compress
