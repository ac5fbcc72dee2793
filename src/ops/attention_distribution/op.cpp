#include "ops/attention_distribution/op.hpp"

#include "ops/common/arguments.hpp"

namespace hopwell::ops::attention_distribution {
namespace {

constexpr const char* kName = "attention_distribution";

}  // namespace

Problem check(const AttentionDistributionArgs& args) {
  Checker check(kName);
  Problem p;
  const auto [q, kv] = check_q_kv(check, args);
  p.q = q;
  p.kv = kv;
  p.selection = check_selection(check, args);
  p.lse = check.input("lse", args.lse, {DType::kFloat32}, {"s_q", "h_q"}, Layout::kAny);
  p.attn_sink = check.optional_input("attn_sink", args.attn_sink, {DType::kFloat32}, {"h_q"}, Layout::kAny);
  p.attn = check.output("out", args.out, {DType::kFloat32}, {"s_q", "topk"});
  p.normalize_l1 =
      check.choice("normalize", args.normalize, HOPWELL_NORMALIZE_L1, "none or l1") == HOPWELL_NORMALIZE_L1;
  p.indices_ascending = args.indices_ascending;
  p.sm_scale = args.sm_scale;
  p.s_q = check["s_q"], p.s_kv = check["s_kv"], p.h_q = check["h_q"], p.d_qk = check["d_qk"], p.topk = check["topk"];
  check.take_workspace(p, args);
  return p;
}

}  // namespace hopwell::ops::attention_distribution
