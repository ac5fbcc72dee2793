#include "ops/lightning_indexer_backward/op.hpp"

#include "ops/common/arguments.hpp"
#include "runtime/c_interface.hpp"

namespace hopwell {
namespace ops::lightning_indexer_backward {
namespace {

Problem check(const LightningIndexerBackwardArgs& args) {
  Checker check(kName);
  Problem p;
  static_cast<IndexOperands&>(p) = check_index_operands(check, args);
  const bool flat = args.indices == nullptr || args.indices->ndim != 3;
  const Shape shape = flat ? Shape{"s_q", "topk"} : Shape{"s_q", 1, "topk"};
  p.indices = check.input("indices", args.indices, {DType::kInt32}, shape);
  if (!flat) p.indices = p.indices.squeezed(1);
  check.rule(args.target == nullptr || args.d_scores == nullptr, "target and d_scores exclude each other");
  if (args.d_scores == nullptr) p.target = check.input("target", args.target, {DType::kFloat32}, {"s_q", "topk"});
  p.d_scores = check.optional_input("d_scores", args.d_scores, {DType::kFloat32}, {"s_q", "topk"});
  p.visibility = check_key_ranges(check, args);
  static_cast<IndexGradients&>(p) = check_index_gradients(check, args, p, !p.d_scores);
  p.topk = check["topk"];
  check.take_workspace(p, args);
  return p;
}

const runtime::Entry entry{kName, check};

}  // namespace

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

}  // namespace ops::lightning_indexer_backward

using ops::lightning_indexer_backward::entry;

void lightning_indexer_backward(const LightningIndexerBackwardArgs& args, Stream stream) { entry.run(args, stream); }
std::size_t lightning_indexer_backward_workspace_bytes(const LightningIndexerBackwardArgs& args) {
  return entry.workspace_bytes(args);
}
std::string explain(const LightningIndexerBackwardArgs& args) { return entry.explain(args); }

}  // namespace hopwell

extern "C" hopwell_status hopwell_lightning_indexer_backward(const hopwell_lightning_indexer_backward_args* args,
                                                             hopwell_stream stream) {
  return hopwell::entry.run_from_c(args, stream);
}
extern "C" hopwell_status hopwell_lightning_indexer_backward_workspace_bytes(
    const hopwell_lightning_indexer_backward_args* args, size_t* bytes) {
  return hopwell::entry.workspace_bytes_from_c(args, bytes);
}
