#include "ops/lightning_indexer/op.hpp"

#include "runtime/c_interface.hpp"

namespace hopwell {
namespace ops {
namespace {

// q_index, k_index and weights into `p`, the same for both operators. Binds s_q, h_index, d_index and s_kv.
template <class Problem, class Args>
void check_inputs(Checker& check, const Args& args, Problem& p) {
  p.q = check.input("q_index", args.q_index, {DType::kBFloat16, DType::kFloat32}, {"s_q", "h_index", "d_index"});
  p.k = check.input("k_index", args.k_index, {p.q.dtype}, {"s_kv", "d_index"});
  p.weights = check.input("weights", args.weights, {DType::kFloat32, DType::kBFloat16}, {"s_q", "h_index"});
  p.s_q = check["s_q"], p.s_kv = check["s_kv"], p.h_index = check["h_index"], p.d_index = check["d_index"];
  check.require(p.h_index >= 1, "q_index", "[s_q, h_index >= 1, d_index]", "h_index = " + std::to_string(p.h_index));
  check.require(p.d_index >= 1, "q_index", "[s_q, h_index, d_index >= 1]", "d_index = " + std::to_string(p.d_index));
  check.require(p.s_kv <= INT32_MAX, "k_index", "of at most 2^31 - 1 rows (indices are int32)", p.s_kv);
}

template <class Problem, class Args>
void finish(const Checker& check, const Args& args, Problem& p) {
  p.topk = check["topk"];
  p.device.location = check.device();
  p.workspace = args.workspace;
  p.workspace_bytes = args.workspace_bytes;
}

}  // namespace

namespace lightning_indexer {
namespace {

constexpr const char* kName = "lightning_indexer";
const runtime::Operator<Problem> entry{kName};

Problem check(const LightningIndexerArgs& args) {
  Checker check(kName);
  Problem p;
  check_inputs(check, args, p);
  p.causality = check_causality(check, args);
  p.indices = check.output("indices", args.indices, {DType::kInt32}, {"s_q", "topk"});
  p.scores = check.optional_output("scores", args.scores, {DType::kFloat32}, {"s_q", "topk"});
  finish(check, args, p);
  return p;
}

}  // namespace
}  // namespace lightning_indexer

namespace lightning_indexer_backward {
namespace {

constexpr const char* kName = "lightning_indexer_backward";
const runtime::Operator<Problem> entry{kName};

Problem check(const LightningIndexerBackwardArgs& args) {
  Checker check(kName);
  Problem p;
  check_inputs(check, args, p);
  const bool flat = args.indices == nullptr || args.indices->ndim != 3;
  const Shape shape = flat ? Shape{"s_q", "topk"} : Shape{"s_q", 1, "topk"};
  p.indices = check.input("indices", args.indices, {DType::kInt32}, shape);
  if (!flat) p.indices = p.indices.squeezed(1);
  p.target = check.input("target", args.target, {DType::kFloat32}, {"s_q", "topk"});
  check.finite("d_loss", args.d_loss);
  p.loss = check.any_shape("loss", args.loss, {DType::kFloat32}, Layout::kAny, Access::kWritten);
  check.require(p.loss.size() == 1, "loss", "one element", shape_string(*args.loss));
  p.d_q = check.output("d_q_index", args.d_q_index, {p.q.dtype}, {"s_q", "h_index", "d_index"});
  p.d_k = check.output("d_k_index", args.d_k_index, {DType::kFloat32}, {"s_kv", "d_index"});
  p.d_weights = check.output("d_weights", args.d_weights, {p.weights.dtype}, {"s_q", "h_index"});
  p.d_loss = args.d_loss;
  p.deterministic = args.deterministic;
  finish(check, args, p);
  return p;
}

}  // namespace
}  // namespace lightning_indexer_backward
}  // namespace ops

namespace forward = ops::lightning_indexer;
namespace backward = ops::lightning_indexer_backward;

void lightning_indexer(const LightningIndexerArgs& args, Stream stream) {
  runtime::run(forward::kName, forward::check(args), args.backend, stream);
}

std::size_t lightning_indexer_workspace_bytes(const LightningIndexerArgs& args) {
  return runtime::workspace_bytes(forward::kName, forward::check(args), args.backend);
}

std::string explain(const LightningIndexerArgs& args) { return runtime::explain(forward::check(args)); }

void lightning_indexer_backward(const LightningIndexerBackwardArgs& args, Stream stream) {
  runtime::run(backward::kName, backward::check(args), args.backend, stream);
}

std::size_t lightning_indexer_backward_workspace_bytes(const LightningIndexerBackwardArgs& args) {
  return runtime::workspace_bytes(backward::kName, backward::check(args), args.backend);
}

std::string explain(const LightningIndexerBackwardArgs& args) { return runtime::explain(backward::check(args)); }

}  // namespace hopwell

extern "C" hopwell_status hopwell_lightning_indexer(const hopwell_lightning_indexer_args* args, hopwell_stream stream) {
  return hopwell::runtime::call(hopwell::forward::kName, hopwell::lightning_indexer, args, stream);
}
extern "C" hopwell_status hopwell_lightning_indexer_workspace_bytes(const hopwell_lightning_indexer_args* args,
                                                                    size_t* bytes) {
  return hopwell::runtime::call(hopwell::forward::kName, hopwell::lightning_indexer_workspace_bytes, args, bytes);
}

extern "C" hopwell_status hopwell_lightning_indexer_backward(const hopwell_lightning_indexer_backward_args* args,
                                                             hopwell_stream stream) {
  return hopwell::runtime::call(hopwell::backward::kName, hopwell::lightning_indexer_backward, args, stream);
}
extern "C" hopwell_status hopwell_lightning_indexer_backward_workspace_bytes(
    const hopwell_lightning_indexer_backward_args* args, size_t* bytes) {
  return hopwell::runtime::call(hopwell::backward::kName, hopwell::lightning_indexer_backward_workspace_bytes, args,
                                bytes);
}
