// nvfp4_quantize and nvfp4_dequantize: the checked problems that backends solve. declaration.py documents the
// arguments.
#pragma once

#include "runtime/backend.hpp"
#include "runtime/check.hpp"
#include "tile/nvfp4.hpp"

namespace hopwell {
struct Nvfp4DequantizeArgs;
struct Nvfp4QuantizeArgs;
}  // namespace hopwell

namespace hopwell::ops::nvfp4_quantize {

using hopwell::nvfp4::Global, hopwell::nvfp4::Scales;

struct QuantizeProblem {
  View x;             // fp32, fp16 or bf16 [rows, K]
  View codes;         // [rows, K/2]
  View global_scale;  // fp32, one element
  Scales scales;
  bool has_global = false;  // false: computed from x
  Global global;
  std::int64_t rows = 0, k = 0;
  runtime::Device device;
};

struct DequantizeProblem {
  View codes;  // [rows, K/2]
  View x;      // fp32, fp16 or bf16 [rows, K]
  Scales scales;
  Global global;
  std::int64_t rows = 0, k = 0;
  runtime::Device device;
};

QuantizeProblem check(const Nvfp4QuantizeArgs& args);
DequantizeProblem check(const Nvfp4DequantizeArgs& args);

}  // namespace hopwell::ops::nvfp4_quantize
