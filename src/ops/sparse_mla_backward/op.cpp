#include "ops/sparse_mla_backward/op.hpp"

#include "ops/common/arguments.hpp"

namespace hopwell::ops::sparse_mla_backward {
namespace {

constexpr const char* kName = "sparse_mla_backward";

// dkv has the shape that kv was given in; it comes back as [s_kv, d_qk].
View check_dkv(Checker& check, const SparseMlaBackwardArgs& args) {
  const bool flat = args.kv->ndim == 2;
  const DTypes dtypes = {DType::kFloat32, DType::kBFloat16};
  const View dkv =
      check.optional_output("dkv", args.dkv, dtypes, flat ? Shape{"s_kv", "d_qk"} : Shape{"s_kv", "h_kv", "d_qk"});
  check.rule(!args.accumulate || (dkv && dkv.dtype == DType::kFloat32), "accumulate needs a float32 dkv to add into");
  return dkv && !flat ? dkv.squeezed(1) : dkv;
}

}  // namespace

Problem check(const SparseMlaBackwardArgs& args) {
  Checker check(kName);
  Problem p;
  const auto [q, kv] = check_q_kv(check, args);
  p.q = q;
  p.kv = kv;
  p.selection = check_selection(check, args);
  check.require(args.d_v >= 1 && args.d_v <= check["d_qk"], "d_v",
                "between 1 and d_qk = " + std::to_string(check["d_qk"]), args.d_v);
  check.bind("d_v", args.d_v);
  p.d_out = check.input("d_out", args.d_out, {q.dtype}, {"s_q", "h_q", "d_v"});
  p.out = check.input("out", args.out, {q.dtype}, {"s_q", "h_q", "d_v"});
  p.lse = check.input("lse", args.lse, {DType::kFloat32}, {"s_q", "h_q"}, Layout::kAny);
  p.attn_sink = check.optional_input("attn_sink", args.attn_sink, {DType::kFloat32}, {"h_q"}, Layout::kAny);
  p.dq = check.optional_output("dq", args.dq, {q.dtype}, {"s_q", "h_q", "d_qk"});
  p.dkv = check_dkv(check, args);
  p.d_sink = check.optional_output("d_sink", args.d_sink, {DType::kFloat32}, {"h_q"}, Layout::kAny);
  check.rule(!p.d_sink || p.attn_sink, "d_sink needs an attn_sink");
  p.attn = check.optional_output("attn", args.attn, {DType::kFloat32}, {"s_q", "topk"});
  p.sm_scale = args.sm_scale;
  p.deterministic = args.deterministic;
  p.indices_ascending = args.indices_ascending || args.indices == nullptr;
  p.share_keys = args.share_keys;
  p.accumulate = args.accumulate;
  p.s_q = check["s_q"], p.s_kv = check["s_kv"], p.h_q = check["h_q"];
  p.d_qk = check["d_qk"], p.d_v = args.d_v, p.topk = check["topk"];
  check.take_workspace(p, args);
  return p;
}

}  // namespace hopwell::ops::sparse_mla_backward
