#include "ops/nvfp4_linear_backward/op.hpp"

#include "ops/common/nvfp4_arguments.hpp"

namespace hopwell::ops::nvfp4_linear_backward {
namespace {

using namespace hopwell::nvfp4;  // NOLINT(google-build-using-namespace): checks of its tensors

}  // namespace

Problem check(const Nvfp4LinearBackwardArgs& args) {
  Checker check(kName);
  Problem p;
  p.weight = check.input("weight", args.weight, kCodes, {"N", "K/2"});
  p.k = check_k(check, "weight", p.weight, *args.weight);
  check.bind("K", p.k);
  p.d_out = check.input("d_out", args.d_out, kFloats, {"n", "N"});
  p.weight_scale = check_scales(check, "weight_scale", args.weight_scale, layout_of(check, args), "N");
  p.global = check_global(check, "weight_global", args.weight_global, "weight_global_value", args.weight_global_value,
                          args.weight_global_value != 1, args.global_is_reciprocal);
  p.d_x = check.output("d_x", args.d_x, {p.d_out.dtype}, {"n", "K"});
  p.n = check["n"], p.rows = check["N"];
  check.take_workspace(p, args);
  return p;
}

}  // namespace hopwell::ops::nvfp4_linear_backward
