#include "ops/nvfp4/op.hpp"

#include <utility>

#include "ops/common/nvfp4_arguments.hpp"

namespace hopwell::ops::nvfp4 {
namespace {

using namespace hopwell::nvfp4;  // NOLINT(google-build-using-namespace): checks of its tensors

constexpr const char* kGemv = "nvfp4_gemv";
constexpr const char* kLinear = "nvfp4_linear";
constexpr const char* kMatmul = "nvfp4_matmul";

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

// The vector, which lies along dimension `dim`, broadcast to the matrix's shape.
View broadcast(View vector, const View& matrix, std::size_t dim) {
  const std::int64_t stride = vector.stride[0];
  vector.ndim = matrix.ndim, vector.shape = matrix.shape, vector.stride = {};
  vector.stride.at(dim) = stride;
  return vector;
}

View transposed(View matrix) {
  std::swap(matrix.shape[0], matrix.shape[1]), std::swap(matrix.stride[0], matrix.stride[1]);
  return matrix;
}

}  // namespace

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
  p.alpha = check_factor(check, "alpha", args.alpha, args.global_is_reciprocal);
  p.c = check.output("out", args.out, kFloats, {"M", 1, "L"}, Layout::kAny);
  p.m = check["M"], p.l = check["L"];
  check.take_workspace(p, args);
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
  p.global = check_global(check, "weight_global", args.weight_global, "weight_global_value", args.weight_global_value,
                          args.weight_global_value != 1, args.global_is_reciprocal);
  const View bias = check.optional_input("bias", args.bias, {p.x.dtype}, {"N"}, Layout::kAny);
  p.y = check.output("out", args.out, {p.x.dtype}, {"n", "N"});
  p.n = check["n"], p.rows = check["N"];
  p.bias = broadcast(bias, p.y, 1);
  check.take_workspace(p, args);
  return p;
}

MatmulProblem check(const Nvfp4MatmulArgs& args) {
  Checker check(kMatmul);
  MatmulProblem p;
  p.a = check.input("a", args.a, kCodes, {"M", "K/2"});
  p.k = check_k(check, "a", p.a, *args.a);
  p.b = check.input("b", args.b, kCodes, {"N", "K/2"});
  p.sfa = check_scales(check, "sfa", args.sfa, layout_of(check, args), "M");
  p.sfb = check_scales(check, "sfb", args.sfb, layout_of(check, args), "N");
  p.alpha = check_factor(check, "alpha", args.alpha, args.global_is_reciprocal);
  p.c = check.output("out", args.out, kFloats, {"M", "N"});
  p.bias = check.optional_input("bias", args.bias, {p.c.dtype}, {"N"}, Layout::kAny);
  p.m = check["M"], p.n = check["N"];
  check.take_workspace(p, args);
  return p;
}

DecodedProduct as_linear(const MatmulProblem& p, bool b_is_x) {
  struct Side {
    View codes;
    Scales scales;
  };
  Side x{p.a, p.sfa}, weight{p.b, p.sfb};
  View c = p.c;
  if (b_is_x) std::swap(x, weight), c = transposed(c);
  const std::int64_t n = x.codes.shape[0], rows = weight.codes.shape[0];
  return {.codes = x.codes,
          .scales = x.scales,
          .linear = {.op = kMatmul,
                     .x = {.dtype = c.dtype, .ndim = 2, .shape = {n, p.k}, .stride = {p.k, 1}, .present = true},
                     .weight = weight.codes,
                     .bias = broadcast(p.bias, c, b_is_x ? 0 : 1),
                     .y = c,
                     .weight_scale = weight.scales,
                     .global = p.alpha,
                     .n = n,
                     .rows = rows,
                     .k = p.k,
                     .device = p.device}};
}

}  // namespace hopwell::ops::nvfp4
