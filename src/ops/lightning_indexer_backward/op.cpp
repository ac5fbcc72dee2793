#include "ops/lightning_indexer_backward/op.hpp"

#include "ops/common/arguments.hpp"

namespace hopwell::ops::lightning_indexer_backward {
Problem check(const LightningIndexerBackwardArgs& args) {
  Checker check(kName);
  Problem p;
  static_cast<IndexOperands&>(p) = check_index_operands(check, args);
  const bool flat = args.indices != nullptr && args.indices->ndim == 2;
  const Shape shape = flat ? Shape{"s_q", "topk"} : Shape{"s_q", maybe(1), "topk"};
  p.indices = check.input("indices", args.indices, {DType::kInt32}, shape);
  if (!flat) p.indices = p.indices.squeezed(1);
  check.rule(args.target == nullptr || args.d_scores == nullptr, "target and d_scores exclude each other");
  if (args.d_scores == nullptr) p.target = check.input("target", args.target, {DType::kFloat32}, {"s_q", "topk"});
  p.d_scores = check.optional_input("d_scores", args.d_scores, {DType::kFloat32}, {"s_q", "topk"});
  p.visibility = check_key_ranges(check, args.selection);
  static_cast<IndexGradients&>(p) = check_index_gradients(check, args, p, !p.d_scores);
  p.topk = check["topk"];
  check.take_workspace(p, args);
  return p;
}

PassProblem queries_of_pass(const PassProblem& problem) {
  PassProblem p = problem;
  const auto skip = [&p](View& view) {
    if (view) view.data = view.as<std::byte>() + p.first_query * view.stride[0] * size_of(view.dtype);
  };
  for (View* view : {&p.q, &p.weights, &p.d_scores, &p.indices, &p.row_weights, &p.row_loss, &p.d_q, &p.d_weights})
    skip(*view);
  p.visibility = p.visibility.from(p.first_query);
  p.s_q = p.queries();
  return p;
}

}  // namespace hopwell::ops::lightning_indexer_backward
