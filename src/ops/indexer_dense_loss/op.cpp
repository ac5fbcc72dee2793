#include "ops/indexer_dense_loss/op.hpp"

#include "ops/common/arguments.hpp"
#include "runtime/c_interface.hpp"

namespace hopwell {
namespace ops::indexer_dense_loss {
namespace {

Problem check(const IndexerDenseLossArgs& args) {
  Checker check(kName);
  Problem p;
  const auto [q, kv] = check_q_kv(check, args);
  p.attention_q = q;
  p.attention_kv = kv;
  p.lse = check.input("lse", args.lse, {DType::kFloat32}, {"s_q", "h_q"}, Layout::kAny);
  p.sm_scale = args.sm_scale;
  static_cast<IndexOperands&>(p) = check_index_operands(check, args);
  p.visibility = check_visibility(check, args);
  static_cast<IndexGradients&>(p) = check_index_gradients(check, args, p, true);
  check.take_workspace(p, args);
  return p;
}

const runtime::Entry entry{kName, check};

}  // namespace
}  // namespace ops::indexer_dense_loss

using ops::indexer_dense_loss::entry;

void indexer_dense_loss(const IndexerDenseLossArgs& args, Stream stream) { entry.run(args, stream); }
std::size_t indexer_dense_loss_workspace_bytes(const IndexerDenseLossArgs& args) { return entry.workspace_bytes(args); }
std::string explain(const IndexerDenseLossArgs& args) { return entry.explain(args); }

}  // namespace hopwell

extern "C" hopwell_status hopwell_indexer_dense_loss(const hopwell_indexer_dense_loss_args* args,
                                                     hopwell_stream stream) {
  return hopwell::entry.run_from_c(args, stream);
}
extern "C" hopwell_status hopwell_indexer_dense_loss_workspace_bytes(const hopwell_indexer_dense_loss_args* args,
                                                                     size_t* bytes) {
  return hopwell::entry.workspace_bytes_from_c(args, bytes);
}
