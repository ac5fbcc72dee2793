#include "ops/nvfp4/op.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "runtime/c_interface.hpp"

namespace hopwell {
namespace ops::nvfp4 {
namespace {

constexpr const char* kGemv = "nvfp4_gemv";
constexpr const char* kLinear = "nvfp4_linear";
constexpr const char* kQuantize = "nvfp4_quantize";
constexpr const char* kDequantize = "nvfp4_dequantize";
const runtime::Operator<GemvProblem> gemv{kGemv};
const runtime::Operator<LinearProblem> linear{kLinear};
const runtime::Operator<QuantizeProblem> quantize{kQuantize};
const runtime::Operator<DequantizeProblem> dequantize{kDequantize};

const DTypes kCodes = {DType::kUInt8, DType::kFloat4E2m1x2};
const DTypes kScaleBytes = {DType::kUInt8, DType::kFloat8E4m3};
const DTypes kFloats = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

// [rows, K/2, ...] is contiguous along K, its second dimension.
void check_contiguous_k(const Checker& check, std::string_view name, const View& view) {
  check.require(view.stride[1] == 1 || view.shape[1] <= 1 || view.size() == 0, name, "contiguous along K",
                "a stride of " + std::to_string(view.stride[1]));
}

// Takes K from codes [rows, K/2, ...] and binds "K/16".
std::int64_t check_k(Checker& check, std::string_view name, const View& codes, const DLTensor& tensor) {
  check.require(codes.shape[1] % 8 == 0, name, "codes [rows, K/2, ...] with K a multiple of 16", shape_string(tensor));
  check.bind("K/16", codes.shape[1] / 8);
  return 2 * codes.shape[1];
}

// How many elements there are; -1 where the tensor doesn't say, or says what no memory holds.
std::int64_t elements(const DLTensor& tensor) {
  if (!has_sizes(tensor)) return -1;
  std::int64_t count = 1;
  for (int i = 0; i < tensor.ndim; ++i)
    if (tensor.shape[i] < 0 || __builtin_mul_overflow(count, tensor.shape[i], &count)) return -1;
  return count;
}

// Whether the elements fill one stretch of memory, in whatever order of dimensions.
bool is_dense(const DLTensor& tensor) {
  if (tensor.strides == nullptr) return true;
  std::vector<std::pair<std::int64_t, std::int64_t>> dims;  // stride, size
  for (int i = 0; i < tensor.ndim; ++i)
    if (tensor.shape[i] != 1) dims.emplace_back(tensor.strides[i], tensor.shape[i]);
  std::sort(dims.begin(), dims.end());
  std::int64_t expected = 1;
  return std::all_of(dims.begin(), dims.end(), [&](const auto& dim) {
    const bool fits = dim.first == expected;
    expected *= dim.second;
    return fits;
  });
}

// The blocked layout: any shape, any order of dimensions, as long as it is that many bytes in one stretch.
Scales check_blocked_scales(Checker& check, std::string_view name, const DLTensor* tensor, std::int64_t rows,
                            std::int64_t batch, Access access = Access::kRead) {
  const std::int64_t columns = check["K/16"], matrix = hopwell::nvfp4::blocked_bytes(rows, columns);
  std::int64_t bytes = batch * matrix;
  if (tensor == nullptr) return {.data = check.input(name, nullptr, kScaleBytes, {bytes}).as<std::uint8_t>()};
  check.require(elements(*tensor) == bytes, name, std::to_string(bytes) + " bytes of blocked scales",
                shape_string(*tensor));
  check.require(bytes == 0 || is_dense(*tensor), name, "contiguous", "strides with gaps, or that overlap");
  DLTensor flat = *tensor;
  flat.ndim = 1, flat.shape = &bytes, flat.strides = nullptr;
  const View view = access == Access::kWritten ? check.output(name, &flat, kScaleBytes, {bytes}, Layout::kDense)
                                               : check.input(name, &flat, kScaleBytes, {bytes}, Layout::kDense);
  return {.data = view.as<std::uint8_t>(), .blocked = true, .batch_stride = matrix, .columns = columns};
}

template <class Args>
hopwell_scale_layout layout_of(const Checker& check, const Args& args) {
  return check.choice("scale_layout", args.scale_layout, HOPWELL_SCALES_BLOCKED,
                      "HOPWELL_SCALES_PLAIN or HOPWELL_SCALES_BLOCKED");
}

// Scales of a matrix whose number of rows is bound to the dimension `rows`.
Scales check_scales(Checker& check, std::string_view name, const DLTensor* tensor, hopwell_scale_layout layout,
                    const char* rows, Access access = Access::kRead) {
  if (layout == HOPWELL_SCALES_BLOCKED) return check_blocked_scales(check, name, tensor, check[rows], 1, access);
  const View view = access == Access::kWritten ? check.output(name, tensor, kScaleBytes, {rows, "K/16"})
                                               : check.input(name, tensor, kScaleBytes, {rows, "K/16"});
  return {.data = view.as<std::uint8_t>(), .row_stride = view.stride[0], .columns = view.shape[1]};
}

Scales check_batched_scales(Checker& check, std::string_view name, const DLTensor* tensor, hopwell_scale_layout layout,
                            const char* rows) {
  if (layout == HOPWELL_SCALES_BLOCKED) return check_blocked_scales(check, name, tensor, check[rows], check["L"]);
  const View view = check.input(name, tensor, kScaleBytes, {rows, "K/16", "L"}, Layout::kAny);
  check_contiguous_k(check, name, view);
  return {.data = view.as<std::uint8_t>(),
          .row_stride = view.stride[0],
          .batch_stride = view.stride[2],
          .columns = view.shape[1]};
}

View check_one_float(Checker& check, std::string_view name, const DLTensor* tensor, Access access = Access::kRead) {
  const View view = check.any_shape(name, tensor, {DType::kFloat32}, Layout::kAny, access);
  check.require(view.size() == 1, name, "float32 with one element", shape_string(*tensor));
  return view;
}

// A global in device memory is data, read there; as a number it is an argument.
Global check_global(Checker& check, std::string_view name, const DLTensor* tensor, std::string_view value_name,
                    float value) {
  if (tensor != nullptr) return {.pointer = check_one_float(check, name, tensor).as<float>()};
  check.finite(value_name, value);
  return {.value = value};
}

template <class Problem, class Args>
void take_workspace(Problem& p, const Checker& check, const Args& args) {
  p.device.location = check.device();
  p.workspace = args.workspace;
  p.workspace_bytes = args.workspace_bytes;
}

GemvProblem check(const Nvfp4GemvArgs& args) {
  Checker check(kGemv);
  GemvProblem p;
  p.a = check.input("a", args.a, kCodes, {"M", "K/2", "L"}, Layout::kAny);
  p.k = check_k(check, "a", p.a, *args.a);
  check_contiguous_k(check, "a", p.a);
  p.b = check.input("b", args.b, kCodes, {"N", "K/2", "L"}, Layout::kAny);
  check_contiguous_k(check, "b", p.b);
  check.require(check["N"] == 1 || check["N"] == 128, "b", "of 1 row, or 1 padded to 128", shape_string(*args.b));
  p.sfa = check_batched_scales(check, "sfa", args.sfa, layout_of(check, args), "M");
  p.sfb = check_batched_scales(check, "sfb", args.sfb, layout_of(check, args), "N");
  check.finite("alpha", args.alpha);
  p.alpha = args.alpha;
  p.c = check.output("out", args.out, kFloats, {"M", 1, "L"}, Layout::kAny);
  p.m = check["M"], p.l = check["L"];
  take_workspace(p, check, args);
  return p;
}

LinearProblem check(const Nvfp4LinearArgs& args) {
  Checker check(kLinear);
  LinearProblem p;
  p.weight = check.input("weight", args.weight, kCodes, {"N", "K/2"});
  p.k = check_k(check, "weight", p.weight, *args.weight);
  check.bind("K", p.k);
  p.x = check.input("x", args.x, kFloats, {"n", "K"});
  p.weight_scale = check_scales(check, "weight_scale", args.weight_scale, layout_of(check, args), "N");
  p.global = check_global(check, "weight_global", args.weight_global, "weight_global_value", args.weight_global_value);
  p.global_is_reciprocal = args.global_is_reciprocal;
  p.bias = check.optional_input("bias", args.bias, {p.x.dtype}, {"N"}, Layout::kAny);
  p.y = check.output("out", args.out, {p.x.dtype}, {"n", "N"});
  p.n = check["n"], p.rows = check["N"];
  take_workspace(p, check, args);
  return p;
}

QuantizeProblem check(const Nvfp4QuantizeArgs& args) {
  Checker check(kQuantize);
  QuantizeProblem p;
  p.x = check.input("x", args.x, kFloats, {"rows", "K"});
  p.rows = check["rows"], p.k = check["K"];
  check.require(p.k % hopwell::nvfp4::kBlock == 0, "x", "[rows, K] with K a multiple of 16", shape_string(*args.x));
  check.bind("K/2", p.k / 2);
  check.bind("K/16", p.k / hopwell::nvfp4::kBlock);
  p.has_global = args.global_in != nullptr || args.global_in_value != 0;
  p.global = check_global(check, "global_in", args.global_in, "global_in_value", args.global_in_value);
  // A global on a CUDA device is not read here, for that would wait for the device: there it is data.
  if (p.has_global && (p.global.pointer == nullptr || check.device().device_type == kDLCPU)) {
    const float value = p.global.pointer != nullptr ? *p.global.pointer : p.global.value;
    check.require(std::isfinite(value) && value > 0, args.global_in != nullptr ? "global_in" : "global_in_value",
                  "positive and finite", static_cast<double>(value));
  }
  p.codes = check.output("codes", args.codes, kCodes, {"rows", "K/2"});
  p.scales = check_scales(check, "scales", args.scales, layout_of(check, args), "rows", Access::kWritten);
  p.global_scale = check_one_float(check, "global_scale", args.global_scale, Access::kWritten);
  take_workspace(p, check, args);
  return p;
}

DequantizeProblem check(const Nvfp4DequantizeArgs& args) {
  Checker check(kDequantize);
  DequantizeProblem p;
  p.codes = check.input("codes", args.codes, kCodes, {"rows", "K/2"});
  p.k = check_k(check, "codes", p.codes, *args.codes);
  check.bind("K", p.k);
  p.scales = check_scales(check, "scales", args.scales, layout_of(check, args), "rows");
  p.global = check_global(check, "global_scale", args.global_scale, "global_value", args.global_value);
  p.x = check.output("x", args.x, kFloats, {"rows", "K"});
  p.rows = check["rows"];
  take_workspace(p, check, args);
  return p;
}

}  // namespace
}  // namespace ops::nvfp4

namespace op = ops::nvfp4;

void nvfp4_gemv(const Nvfp4GemvArgs& args, Stream stream) {
  runtime::run(op::kGemv, op::check(args), args.backend, stream);
}
std::size_t nvfp4_gemv_workspace_bytes(const Nvfp4GemvArgs& args) {
  return runtime::workspace_bytes(op::kGemv, op::check(args), args.backend);
}
std::string explain(const Nvfp4GemvArgs& args) { return runtime::explain(op::check(args)); }

void nvfp4_linear(const Nvfp4LinearArgs& args, Stream stream) {
  runtime::run(op::kLinear, op::check(args), args.backend, stream);
}
std::size_t nvfp4_linear_workspace_bytes(const Nvfp4LinearArgs& args) {
  return runtime::workspace_bytes(op::kLinear, op::check(args), args.backend);
}
std::string explain(const Nvfp4LinearArgs& args) { return runtime::explain(op::check(args)); }

void nvfp4_quantize(const Nvfp4QuantizeArgs& args, Stream stream) {
  runtime::run(op::kQuantize, op::check(args), args.backend, stream);
}
std::size_t nvfp4_quantize_workspace_bytes(const Nvfp4QuantizeArgs& args) {
  return runtime::workspace_bytes(op::kQuantize, op::check(args), args.backend);
}
std::string explain(const Nvfp4QuantizeArgs& args) { return runtime::explain(op::check(args)); }

void nvfp4_dequantize(const Nvfp4DequantizeArgs& args, Stream stream) {
  runtime::run(op::kDequantize, op::check(args), args.backend, stream);
}
std::size_t nvfp4_dequantize_workspace_bytes(const Nvfp4DequantizeArgs& args) {
  return runtime::workspace_bytes(op::kDequantize, op::check(args), args.backend);
}
std::string explain(const Nvfp4DequantizeArgs& args) { return runtime::explain(op::check(args)); }

}  // namespace hopwell

extern "C" hopwell_status hopwell_nvfp4_gemv(const hopwell_nvfp4_gemv_args* args, hopwell_stream stream) {
  return hopwell::runtime::call(hopwell::op::kGemv, hopwell::nvfp4_gemv, args, stream);
}
extern "C" hopwell_status hopwell_nvfp4_gemv_workspace_bytes(const hopwell_nvfp4_gemv_args* args, size_t* bytes) {
  return hopwell::runtime::call(hopwell::op::kGemv, hopwell::nvfp4_gemv_workspace_bytes, args, bytes);
}

extern "C" hopwell_status hopwell_nvfp4_linear(const hopwell_nvfp4_linear_args* args, hopwell_stream stream) {
  return hopwell::runtime::call(hopwell::op::kLinear, hopwell::nvfp4_linear, args, stream);
}
extern "C" hopwell_status hopwell_nvfp4_linear_workspace_bytes(const hopwell_nvfp4_linear_args* args, size_t* bytes) {
  return hopwell::runtime::call(hopwell::op::kLinear, hopwell::nvfp4_linear_workspace_bytes, args, bytes);
}

extern "C" hopwell_status hopwell_nvfp4_quantize(const hopwell_nvfp4_quantize_args* args, hopwell_stream stream) {
  return hopwell::runtime::call(hopwell::op::kQuantize, hopwell::nvfp4_quantize, args, stream);
}
extern "C" hopwell_status hopwell_nvfp4_quantize_workspace_bytes(const hopwell_nvfp4_quantize_args* args,
                                                                 size_t* bytes) {
  return hopwell::runtime::call(hopwell::op::kQuantize, hopwell::nvfp4_quantize_workspace_bytes, args, bytes);
}

extern "C" hopwell_status hopwell_nvfp4_dequantize(const hopwell_nvfp4_dequantize_args* args, hopwell_stream stream) {
  return hopwell::runtime::call(hopwell::op::kDequantize, hopwell::nvfp4_dequantize, args, stream);
}
extern "C" hopwell_status hopwell_nvfp4_dequantize_workspace_bytes(const hopwell_nvfp4_dequantize_args* args,
                                                                   size_t* bytes) {
  return hopwell::runtime::call(hopwell::op::kDequantize, hopwell::nvfp4_dequantize_workspace_bytes, args, bytes);
}
