#include "ops/lightning_indexer/op.hpp"

#include "ops/common/arguments.hpp"

namespace hopwell::ops::lightning_indexer {
Problem check(const LightningIndexerArgs& args) {
  Checker check(kName);
  Problem p;
  static_cast<IndexOperands&>(p) =
      check_index_operands(check, args, {DType::kBFloat16, DType::kFloat32, DType::kFloat8E4m3});
  p.q_scale = check.optional_input("q_scale", args.q_scale, {DType::kFloat32}, {"s_q", "h_index"});
  p.k_scale = check.optional_input("k_scale", args.k_scale, {DType::kFloat32}, {"s_kv"}, Layout::kAny);
  check.rule(p.q.dtype == DType::kFloat8E4m3 || !(p.q_scale || p.k_scale),
             "q_scale and k_scale need float8_e4m3fn q_index and k_index; scales of bfloat16 and float32 belong "
             "into weights");
  p.visibility = check_visibility(check, args.selection);
  p.indices = check.output("indices", args.indices, {DType::kInt32}, {"s_q", "topk"});
  p.scores = check.optional_output("scores", args.scores, {DType::kFloat32}, {"s_q", "topk"});
  p.topk = check["topk"];
  p.relu = args.relu;
  check.take_workspace(p, args);
  return p;
}

}  // namespace hopwell::ops::lightning_indexer
