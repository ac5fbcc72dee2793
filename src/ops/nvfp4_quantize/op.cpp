#include "ops/nvfp4_quantize/op.hpp"

#include <cmath>

#include "ops/common/nvfp4_arguments.hpp"
#include "runtime/c_interface.hpp"

namespace hopwell {
namespace ops::nvfp4_quantize {
namespace {

using namespace hopwell::nvfp4;  // NOLINT(google-build-using-namespace): checks of its tensors

constexpr const char* kQuantize = "nvfp4_quantize";
constexpr const char* kDequantize = "nvfp4_dequantize";

QuantizeProblem check(const Nvfp4QuantizeArgs& args) {
  Checker check(kQuantize);
  QuantizeProblem p;
  p.x = check.input("x", args.x, kFloats, {"rows", "K"});
  p.rows = check["rows"], p.k = check["K"];
  check.require(p.k % kBlock == 0, "x", "[rows, K] with K a multiple of 16", shape_string(*args.x));
  check.bind("K/2", p.k / 2);
  check.bind("K/16", p.k / kBlock);
  p.has_global = args.global_in != nullptr || args.global_in_value != 0;
  p.global = check_global(check, "global_in", args.global_in, "global_in_value", args.global_in_value, 0, false);
  // A global on a CUDA device is not read here, for that would wait for the device: there it is data.
  if (p.has_global && (p.global.pointer == nullptr || check.device().device_type == kDLCPU)) {
    const float value = p.global.pointer != nullptr ? *p.global.pointer : p.global.value;
    check.require(std::isfinite(value) && value > 0, args.global_in != nullptr ? "global_in" : "global_in_value",
                  "positive and finite", static_cast<double>(value));
  }
  p.codes = check.output("codes", args.codes, kCodes, {"rows", "K/2"});
  p.scales = check_scales(check, "scales", args.scales, layout_of(check, args), "rows", Access::kWritten);
  p.global_scale = check_one_float(check, "global_scale", args.global_scale, Access::kWritten);
  check.take_workspace(p, args);
  return p;
}

DequantizeProblem check(const Nvfp4DequantizeArgs& args) {
  Checker check(kDequantize);
  DequantizeProblem p;
  p.codes = check.input("codes", args.codes, kCodes, {"rows", "K/2"});
  p.k = check_k(check, "codes", p.codes, *args.codes);
  check.bind("K", p.k);
  p.scales = check_scales(check, "scales", args.scales, layout_of(check, args), "rows");
  p.global = check_global(check, "global_scale", args.global_scale, "global_value", args.global_value, 1,
                          args.global_is_reciprocal);
  p.x = check.output("x", args.x, kFloats, {"rows", "K"});
  p.rows = check["rows"];
  check.take_workspace(p, args);
  return p;
}

const runtime::Entry<Nvfp4QuantizeArgs, QuantizeProblem> quantize{kQuantize, check};
const runtime::Entry<Nvfp4DequantizeArgs, DequantizeProblem> dequantize{kDequantize, check};

}  // namespace
}  // namespace ops::nvfp4_quantize

using ops::nvfp4_quantize::dequantize;
using ops::nvfp4_quantize::quantize;

void nvfp4_quantize(const Nvfp4QuantizeArgs& args, Stream stream) { quantize.run(args, stream); }
std::size_t nvfp4_quantize_workspace_bytes(const Nvfp4QuantizeArgs& args) { return quantize.workspace_bytes(args); }
std::string explain(const Nvfp4QuantizeArgs& args) { return quantize.explain(args); }

void nvfp4_dequantize(const Nvfp4DequantizeArgs& args, Stream stream) { dequantize.run(args, stream); }
std::size_t nvfp4_dequantize_workspace_bytes(const Nvfp4DequantizeArgs& args) {
  return dequantize.workspace_bytes(args);
}
std::string explain(const Nvfp4DequantizeArgs& args) { return dequantize.explain(args); }

}  // namespace hopwell

extern "C" hopwell_status hopwell_nvfp4_quantize(const hopwell_nvfp4_quantize_args* args, hopwell_stream stream) {
  return hopwell::quantize.run_from_c(args, stream);
}
extern "C" hopwell_status hopwell_nvfp4_quantize_workspace_bytes(const hopwell_nvfp4_quantize_args* args,
                                                                 size_t* bytes) {
  return hopwell::quantize.workspace_bytes_from_c(args, bytes);
}

extern "C" hopwell_status hopwell_nvfp4_dequantize(const hopwell_nvfp4_dequantize_args* args, hopwell_stream stream) {
  return hopwell::dequantize.run_from_c(args, stream);
}
extern "C" hopwell_status hopwell_nvfp4_dequantize_workspace_bytes(const hopwell_nvfp4_dequantize_args* args,
                                                                   size_t* bytes) {
  return hopwell::dequantize.workspace_bytes_from_c(args, bytes);
}
