// nvfp4_linear_backward: the checked problem that backends solve. declaration.py documents the arguments.
#pragma once

#include "runtime/backend.hpp"
#include "runtime/check.hpp"
#include "tile/nvfp4.hpp"

namespace hopwell {
struct Nvfp4LinearBackwardArgs;
}  // namespace hopwell

namespace hopwell::ops::nvfp4_linear_backward {

using hopwell::nvfp4::Global, hopwell::nvfp4::Scales;

inline constexpr const char* kName = "nvfp4_linear_backward";

struct Problem {
  View d_out;   // bf16, fp16 or fp32 [n, rows]
  View weight;  // codes [rows, K/2]
  View d_x;     // like d_out [n, K]
  Scales weight_scale;
  Global global;
  std::int64_t n = 0, rows = 0, k = 0;
  runtime::Device device;
};

Problem check(const Nvfp4LinearBackwardArgs& args);

}  // namespace hopwell::ops::nvfp4_linear_backward
