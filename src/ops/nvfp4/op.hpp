// nvfp4_gemv and nvfp4_linear: what their backends are given. Meaning and shapes: hopwell.h.
#pragma once

#include "runtime/backend.hpp"
#include "runtime/check.hpp"
#include "tile/nvfp4.hpp"

namespace hopwell::ops::nvfp4 {

using hopwell::nvfp4::Global, hopwell::nvfp4::Scales;

struct GemvProblem {
  View a;  // codes [M, K/2, L], contiguous along K
  View b;  // codes [1 or more, K/2, L], contiguous along K; only row 0 counts
  View c;  // fp16, bf16 or fp32 [M, 1, L], any strides
  Scales sfa, sfb;
  float alpha = 1;
  std::int64_t m = 0, k = 0, l = 0;
  runtime::Device device;
  void* workspace = nullptr;
  std::size_t workspace_bytes = 0;
};

struct LinearProblem {
  View x;       // bf16, fp16 or fp32 [n, K]
  View weight;  // codes [rows, K/2]
  View bias;    // like x [rows], or absent
  View y;       // like x [n, rows]
  Scales weight_scale;
  Global global;
  bool global_is_reciprocal = false;
  std::int64_t n = 0, rows = 0, k = 0;
  runtime::Device device;
  void* workspace = nullptr;
  std::size_t workspace_bytes = 0;
};

}  // namespace hopwell::ops::nvfp4
