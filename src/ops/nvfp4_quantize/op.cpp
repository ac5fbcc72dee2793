#include "ops/nvfp4_quantize/op.hpp"

#include <cmath>

#include "ops/common/nvfp4_arguments.hpp"

namespace hopwell::ops::nvfp4_quantize {
namespace {

using namespace hopwell::nvfp4;  // NOLINT(google-build-using-namespace): checks of its tensors

constexpr const char* kQuantize = "nvfp4_quantize";
constexpr const char* kDequantize = "nvfp4_dequantize";

}  // namespace

QuantizeProblem check(const Nvfp4QuantizeArgs& args) {
  Checker check(kQuantize);
  QuantizeProblem p;
  p.x = check.input("x", args.x, kFloats, {"rows", "K"});
  p.rows = check["rows"], p.k = check["K"];
  check.require(p.k % kBlock == 0, "x", "[rows, K] with K a multiple of 16", shape_string(*args.x));
  check.bind("K/2", p.k / 2);
  check.bind("K/16", p.k / kBlock);
  p.has_global = args.global_in != nullptr || args.global_in_value;
  p.global = check_global(check, "global_in", args.global_in, "global_in_value", args.global_in_value.value_or(0),
                          args.global_in_value.has_value(), false);
  // A global scale in device memory is not checked, because reading it would wait for the device.
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
  p.global = check_global(check, "global_scale", args.global_scale, "global_value", args.global_value,
                          args.global_value != 1, args.global_is_reciprocal);
  p.x = check.output("x", args.x, kFloats, {"rows", "K"});
  p.rows = check["rows"];
  check.take_workspace(p, args);
  return p;
}

}  // namespace hopwell::ops::nvfp4_quantize
