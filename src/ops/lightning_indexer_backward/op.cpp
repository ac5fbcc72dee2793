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
  p.target = check.input("target", args.target, {DType::kFloat32}, {"s_q", "topk"});
  p.visibility = check_key_ranges(check, args);
  check.finite("d_loss", args.d_loss);
  p.loss = check.any_shape("loss", args.loss, {DType::kFloat32}, Layout::kAny, Access::kWritten);
  check.require(p.loss.size() == 1, "loss", "one element", shape_string(*args.loss));
  p.d_q = check.output("d_q_index", args.d_q_index, {p.q.dtype}, {"s_q", "h_index", "d_index"});
  p.d_k = check.output("d_k_index", args.d_k_index, {DType::kFloat32}, {"s_kv", "d_index"});
  p.d_weights = check.output("d_weights", args.d_weights, {p.weights.dtype}, {"s_q", "h_index"});
  p.d_loss = args.d_loss;
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
