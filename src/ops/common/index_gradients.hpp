// Shared by lightning_indexer_backward and indexer_dense_loss: the loss of the index scores and its gradients.
#pragma once

#include "ops/common/index_operands.hpp"

namespace hopwell {

struct IndexGradients {
  View row_weights;   // fp32 [s_q], or absent
  View d_loss_array;  // fp32, one element, or absent
  View loss;          // fp32, one element; absent: there is no loss
  View row_loss;      // fp32 [s_q], or absent
  View d_q;           // like q_index
  View d_k;           // fp32 [s_kv, d_index]
  View d_weights;     // like weights
  float d_loss = 1;   // used if d_loss_array is absent
  bool relu = true;
  bool deterministic = false;
};

inline View check_one_number(Checker& check, const char* name, const DLTensor* tensor, Access access) {
  const View number = check.any_shape(name, tensor, {DType::kFloat32}, Layout::kAny, access);
  check.require(number.size() == 1, name, "one element", shape_string(*tensor));
  return number;
}

// Checks row_weights and d_loss, then the outputs. The dimensions of the operands are already bound.
template <class Args>
IndexGradients check_index_gradients(Checker& check, const Args& args, const IndexOperands& operands, bool has_loss) {
  IndexGradients p;
  p.row_weights = check.optional_input("row_weights", args.row_weights, {DType::kFloat32}, {"s_q"}, Layout::kAny);
  check.finite("d_loss", args.d_loss);
  if (args.d_loss_array != nullptr)
    p.d_loss_array = check_one_number(check, "d_loss", args.d_loss_array, Access::kRead);
  check.rule(!p.d_loss_array || args.d_loss == 1.0F, "d_loss and d_loss_array exclude each other");
  if (has_loss)
    p.loss = check_one_number(check, "loss", args.loss, Access::kWritten);
  else
    check.rule(args.loss == nullptr && args.row_loss == nullptr, "there is no loss and no row_loss of d_scores");
  p.row_loss = check.optional_output("row_loss", args.row_loss, {DType::kFloat32}, {"s_q"}, Layout::kAny);
  p.d_q = check.output("d_q_index", args.d_q_index, {operands.q.dtype}, {"s_q", "h_index", "d_index"});
  p.d_k = check.output("d_k_index", args.d_k_index, {DType::kFloat32}, {"s_kv", "d_index"});
  p.d_weights = check.output("d_weights", args.d_weights, {operands.weights.dtype}, {"s_q", "h_index"});
  p.d_loss = args.d_loss;
  p.relu = args.relu;
  p.deterministic = args.deterministic;
  return p;
}

}  // namespace hopwell
