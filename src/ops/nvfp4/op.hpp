// nvfp4_gemv, nvfp4_linear and nvfp4_matmul: the checked problems that backends solve. declaration.py documents the
// arguments.
#pragma once

#include "runtime/backend.hpp"
#include "runtime/check.hpp"
#include "tile/nvfp4.hpp"

namespace hopwell {
struct Nvfp4GemvArgs;
struct Nvfp4LinearArgs;
struct Nvfp4MatmulArgs;
}  // namespace hopwell

namespace hopwell::ops::nvfp4 {

using hopwell::nvfp4::Global, hopwell::nvfp4::Scales;

struct GemvProblem {
  View a;  // codes [M, K/2, L], contiguous along K
  View b;  // codes [1 or more, K/2, L], contiguous along K; only row 0 counts
  View c;  // fp16, bf16 or fp32 [M, 1, L], any strides
  Scales sfa, sfb;
  Global alpha;
  std::int64_t m = 0, k = 0, l = 0;
  runtime::Device device;
};

struct LinearProblem {
  const char* op = "nvfp4_linear";  // operator that launches the kernels
  View x;                           // bf16, fp16 or fp32 [n, K]
  View weight;                      // codes [rows, K/2]
  View bias;                        // like x [n, rows], broadcast along n (nvfp4_matmul: or along rows), or absent
  View y;                           // like x [n, rows]
  Scales weight_scale;
  Global global;
  std::int64_t n = 0, rows = 0, k = 0;
  runtime::Device device;
};

struct MatmulProblem {
  View a;     // codes [M, K/2]
  View b;     // codes [N, K/2]
  View bias;  // like c [N], or absent
  View c;     // fp16, bf16 or fp32 [M, N]
  Scales sfa, sfb;
  Global alpha;
  std::int64_t m = 0, n = 0, k = 0;
  runtime::Device device;
};

// nvfp4_matmul as nvfp4_linear: one side is decoded and becomes x, the other side is the weights. A code times its
// scale is exact in each type that c can have.
struct DecodedProduct {
  View codes;  // of x
  Scales scales;
  LinearProblem linear;  // x has no memory yet
};
DecodedProduct as_linear(const MatmulProblem& p, bool b_is_x);

GemvProblem check(const Nvfp4GemvArgs& args);
LinearProblem check(const Nvfp4LinearArgs& args);
MatmulProblem check(const Nvfp4MatmulArgs& args);

}  // namespace hopwell::ops::nvfp4
