#include "ops/nvfp4_linear_backward/op.hpp"

#include "ops/common/nvfp4_arguments.hpp"
#include "runtime/c_interface.hpp"

namespace hopwell {
namespace ops::nvfp4_linear_backward {
namespace {

using namespace hopwell::nvfp4;  // NOLINT(google-build-using-namespace): checks of its tensors

Problem check(const Nvfp4LinearBackwardArgs& args) {
  Checker check(kName);
  Problem p;
  p.weight = check.input("weight", args.weight, kCodes, {"N", "K/2"});
  p.k = check_k(check, "weight", p.weight, *args.weight);
  check.bind("K", p.k);
  p.d_out = check.input("d_out", args.d_out, kFloats, {"n", "N"});
  p.weight_scale = check_scales(check, "weight_scale", args.weight_scale, layout_of(check, args), "N");
  p.global = check_global(check, "weight_global", args.weight_global, "weight_global_value", args.weight_global_value,
                          1, args.global_is_reciprocal);
  p.d_x = check.output("d_x", args.d_x, {p.d_out.dtype}, {"n", "K"});
  p.n = check["n"], p.rows = check["N"];
  check.take_workspace(p, args);
  return p;
}

const runtime::Entry entry{kName, check};

}  // namespace
}  // namespace ops::nvfp4_linear_backward

using ops::nvfp4_linear_backward::entry;

void nvfp4_linear_backward(const Nvfp4LinearBackwardArgs& args, Stream stream) { entry.run(args, stream); }
std::size_t nvfp4_linear_backward_workspace_bytes(const Nvfp4LinearBackwardArgs& args) {
  return entry.workspace_bytes(args);
}
std::string explain(const Nvfp4LinearBackwardArgs& args) { return entry.explain(args); }

}  // namespace hopwell

extern "C" hopwell_status hopwell_nvfp4_linear_backward(const hopwell_nvfp4_linear_backward_args* args,
                                                        hopwell_stream stream) {
  return hopwell::entry.run_from_c(args, stream);
}
extern "C" hopwell_status hopwell_nvfp4_linear_backward_workspace_bytes(const hopwell_nvfp4_linear_backward_args* args,
                                                                        size_t* bytes) {
  return hopwell::entry.workspace_bytes_from_c(args, bytes);
}
