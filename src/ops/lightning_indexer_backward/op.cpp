#include "ops/lightning_indexer_backward/op.hpp"

#include "ops/common/arguments.hpp"
#include "runtime/c_interface.hpp"

namespace hopwell {
namespace ops::lightning_indexer_backward {
namespace {

View check_one_number(Checker& check, const char* name, const DLTensor* tensor, Access access) {
  const View number = check.any_shape(name, tensor, {DType::kFloat32}, Layout::kAny, access);
  check.require(number.size() == 1, name, "one element", shape_string(*tensor));
  return number;
}

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
  p.row_weights = check.optional_input("row_weights", args.row_weights, {DType::kFloat32}, {"s_q"}, Layout::kAny);
  check.finite("d_loss", args.d_loss);
  if (args.d_loss_array != nullptr)
    p.d_loss_array = check_one_number(check, "d_loss", args.d_loss_array, Access::kRead);
  check.rule(!p.d_loss_array || args.d_loss == 1.0F, "d_loss and d_loss_array exclude each other");
  if (p.d_scores) {
    check.rule(args.loss == nullptr && args.row_loss == nullptr, "there is no loss and no row_loss of d_scores");
  } else {
    p.loss = check_one_number(check, "loss", args.loss, Access::kWritten);
  }
  p.row_loss = check.optional_output("row_loss", args.row_loss, {DType::kFloat32}, {"s_q"}, Layout::kAny);
  p.d_q = check.output("d_q_index", args.d_q_index, {p.q.dtype}, {"s_q", "h_index", "d_index"});
  p.d_k = check.output("d_k_index", args.d_k_index, {DType::kFloat32}, {"s_kv", "d_index"});
  p.d_weights = check.output("d_weights", args.d_weights, {p.weights.dtype}, {"s_q", "h_index"});
  p.d_loss = args.d_loss;
  p.relu = !args.no_relu;
  p.deterministic = args.deterministic;
  p.topk = check["topk"];
  p.device.location = check.device();
  p.workspace = args.workspace;
  p.workspace_bytes = args.workspace_bytes;
  return p;
}

const runtime::Entry entry{kName, check};

}  // namespace
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
