#include "ops/sparse_mla_backward/op.hpp"

#include "ops/common/arguments.hpp"

namespace hopwell::ops::sparse_mla_backward {
namespace {

constexpr const char* kName = "sparse_mla_backward";

// A gradient of keys has the shape of the argument with the keys. The returned view is [rows, d_qk].
View check_gradient(Checker& check, const char* name, const DLTensor* gradient, const DLTensor* keys, const char* rows,
                    const DTypes& dtypes) {
  const bool flat = keys == nullptr || keys->ndim == 2;
  const View view =
      check.optional_output(name, gradient, dtypes, flat ? Shape{rows, "d_qk"} : Shape{rows, "h_kv", "d_qk"});
  return view && !flat ? view.squeezed(1) : view;
}

}  // namespace

Problem check(const SparseMlaBackwardArgs& args) {
  Checker check(kName);
  Problem p;
  const auto [q, kv] = check_q_kv(check, args);
  p.q = q;
  p.kv = kv;
  p.selection = check_selection(check, args);
  const auto [window_kv, window] = check_window(check, args, q.dtype);
  p.window_kv = window_kv, p.window = window;
  check.require(args.d_v >= 1 && args.d_v <= check["d_qk"], "d_v",
                "between 1 and d_qk = " + std::to_string(check["d_qk"]), args.d_v);
  check.bind("d_v", args.d_v);
  p.d_out = check.input("d_out", args.d_out, {q.dtype}, {"s_q", "h_q", "d_v"});
  p.out = check.input("out", args.out, {q.dtype}, {"s_q", "h_q", "d_v"});
  p.lse = check.input("lse", args.lse, {DType::kFloat32}, {"s_q", "h_q"}, Layout::kAny);
  p.attn_sink = check.optional_input("attn_sink", args.attn_sink, {DType::kFloat32}, {"h_q"}, Layout::kAny);
  p.dq = check.optional_output("dq", args.dq, {q.dtype}, {"s_q", "h_q", "d_qk"});
  p.dkv = check_gradient(check, "dkv", args.dkv, args.kv, "s_kv", {DType::kFloat32, DType::kBFloat16});
  check.rule(args.d_window_kv == nullptr || p.window_kv, "d_window_kv needs window_kv");
  const DTypes dtypes = p.dkv ? DTypes{p.dkv.dtype} : DTypes{DType::kFloat32, DType::kBFloat16};
  p.d_window_kv = check_gradient(check, "d_window_kv", args.d_window_kv, args.window_kv, "s_w", dtypes);
  if (args.accumulate) {
    check.rule(p.window_kv ? p.dkv || p.d_window_kv : bool(p.dkv), "accumulate needs a float32 dkv to add into");
    check.rule(!p.dkv || p.dkv.dtype == DType::kFloat32, "accumulate needs a float32 dkv to add into");
    check.rule(!p.d_window_kv || p.d_window_kv.dtype == DType::kFloat32,
               "accumulate needs a float32 d_window_kv to add into");
  }
  p.d_sink = check.optional_output("d_sink", args.d_sink, {DType::kFloat32}, {"h_q"}, Layout::kAny);
  check.rule(!p.d_sink || p.attn_sink, "d_sink needs an attn_sink");
  p.attn = check.optional_output("attn", args.attn, {DType::kFloat32}, {"s_q", "topk"});
  check.rule(!args.attn_with_sink || (p.attn && p.attn_sink), "attn_with_sink needs attn and attn_sink");
  p.attn_with_sink = args.attn_with_sink;
  p.sm_scale = args.sm_scale;
  p.deterministic = args.deterministic;
  p.indices_ascending = args.indices_ascending || args.indices == nullptr;
  p.share_keys = args.share_keys && !window;
  p.accumulate = args.accumulate;
  p.s_q = check["s_q"], p.s_kv = check["s_kv"], p.h_q = check["h_q"];
  p.d_qk = check["d_qk"], p.d_v = args.d_v, p.topk = check["topk"];
  check.take_workspace(p, args);
  return p;
}

}  // namespace hopwell::ops::sparse_mla_backward
