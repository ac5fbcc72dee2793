#include "ops/lightning_indexer/op.hpp"

#include "ops/common/arguments.hpp"
#include "runtime/c_interface.hpp"

namespace hopwell {
namespace ops::lightning_indexer {
namespace {

Problem check(const LightningIndexerArgs& args) {
  Checker check(kName);
  Problem p;
  static_cast<IndexOperands&>(p) =
      check_index_operands(check, args, {DType::kBFloat16, DType::kFloat32, DType::kFloat8E4m3});
  p.q_scale = check.optional_input("q_scale", args.q_scale, {DType::kFloat32}, {"s_q", "h_index"});
  p.k_scale = check.optional_input("k_scale", args.k_scale, {DType::kFloat32}, {"s_kv"}, Layout::kAny);
  check.rule(
      p.q.dtype == DType::kFloat8E4m3 || !(p.q_scale || p.k_scale),
      "q_scale and k_scale are those of float8_e4m3fn q_index and k_index; scales of bfloat16 and float32 belong "
      "into weights");
  p.visibility = check_visibility(check, args);
  p.indices = check.output("indices", args.indices, {DType::kInt32}, {"s_q", "topk"});
  p.scores = check.optional_output("scores", args.scores, {DType::kFloat32}, {"s_q", "topk"});
  p.topk = check["topk"];
  p.relu = !args.no_relu;
  check.take_workspace(p, args);
  return p;
}

const runtime::Entry entry{kName, check};

}  // namespace
}  // namespace ops::lightning_indexer

using ops::lightning_indexer::entry;

void lightning_indexer(const LightningIndexerArgs& args, Stream stream) { entry.run(args, stream); }
std::size_t lightning_indexer_workspace_bytes(const LightningIndexerArgs& args) { return entry.workspace_bytes(args); }
std::string explain(const LightningIndexerArgs& args) { return entry.explain(args); }

}  // namespace hopwell

extern "C" hopwell_status hopwell_lightning_indexer(const hopwell_lightning_indexer_args* args, hopwell_stream stream) {
  return hopwell::entry.run_from_c(args, stream);
}
extern "C" hopwell_status hopwell_lightning_indexer_workspace_bytes(const hopwell_lightning_indexer_args* args,
                                                                    size_t* bytes) {
  return hopwell::entry.workspace_bytes_from_c(args, bytes);
}
