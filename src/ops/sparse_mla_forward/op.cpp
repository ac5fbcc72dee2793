#include "ops/sparse_mla_forward/op.hpp"

#include "ops/common/arguments.hpp"

namespace hopwell::ops::sparse_mla_forward {
namespace {

constexpr const char* kName = "sparse_mla_forward";

}  // namespace

Problem check(const SparseMlaForwardArgs& args) {
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
  p.attn_sink = check.optional_input("attn_sink", args.attn_sink, {DType::kFloat32}, {"h_q"}, Layout::kAny);
  p.out = check.output("out", args.out, {q.dtype}, {"s_q", "h_q", "d_v"});
  p.max_logits = check.optional_output("max_logits", args.max_logits, {DType::kFloat32}, {"s_q", "h_q"}, Layout::kAny);
  p.lse = check.optional_output("lse", args.lse, {DType::kFloat32}, {"s_q", "h_q"}, Layout::kAny);
  p.sm_scale = args.sm_scale;
  p.share_keys = args.share_keys && !window;
  p.s_q = check["s_q"], p.s_kv = check["s_kv"], p.h_q = check["h_q"];
  p.d_qk = check["d_qk"], p.d_v = args.d_v, p.topk = check["topk"];
  check.take_workspace(p, args);
  return p;
}

}  // namespace hopwell::ops::sparse_mla_forward
