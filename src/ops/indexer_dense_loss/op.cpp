#include "ops/indexer_dense_loss/op.hpp"

#include "ops/common/arguments.hpp"

namespace hopwell::ops::indexer_dense_loss {
Problem check(const IndexerDenseLossArgs& args) {
  Checker check(kName);
  Problem p;
  const auto [q, kv] = check_q_kv(check, args);
  p.attention_q = q;
  p.attention_kv = kv;
  p.lse = check.input("lse", args.lse, {DType::kFloat32}, {"s_q", "h_q"}, Layout::kAny);
  p.attn_sink = check.optional_input("attn_sink", args.attn_sink, {DType::kFloat32}, {"h_q"}, Layout::kAny);
  p.normalize_l1 = check.choice("normalize", args.normalize, HOPWELL_NORMALIZE_TARGET_L1, "heads or l1") ==
                   HOPWELL_NORMALIZE_TARGET_L1;
  p.sm_scale = args.sm_scale;
  static_cast<IndexOperands&>(p) = check_index_operands(check, args);
  p.visibility = check_visibility(check, args.selection);
  static_cast<IndexGradients&>(p) = check_index_gradients(check, args, p, true);
  check.take_workspace(p, args);
  return p;
}

}  // namespace hopwell::ops::indexer_dense_loss
