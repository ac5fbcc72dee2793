// Operands shared by the lightning indexer and its backward.
#pragma once

#include "runtime/check.hpp"

namespace hopwell {

struct IndexOperands {
  View q;        // bf16 or fp32, or e4m3 if the operator supports it, [s_q, h_index, d_index]
  View k;        // type of q, [s_kv, d_index]
  View weights;  // fp32 or bf16 [s_q, h_index]
  std::int64_t s_q = 0, s_kv = 0, h_index = 0, d_index = 0;
};

// Checks q_index, k_index and weights. Binds s_q, h_index, d_index and s_kv.
template <class Args>
IndexOperands check_index_operands(Checker& check, const Args& args,
                                   const DTypes& dtypes = {DType::kBFloat16, DType::kFloat32}) {
  IndexOperands p;
  p.q = check.input("q_index", args.q_index, dtypes, {"s_q", "h_index", "d_index"});
  p.k = check.input("k_index", args.k_index, {p.q.dtype}, {"s_kv", "d_index"});
  p.weights = check.input("weights", args.weights, {DType::kFloat32, DType::kBFloat16}, {"s_q", "h_index"});
  p.s_q = check["s_q"], p.s_kv = check["s_kv"], p.h_index = check["h_index"], p.d_index = check["d_index"];
  check.require(p.h_index >= 1, "q_index", "[s_q, h_index >= 1, d_index]", "h_index = " + std::to_string(p.h_index));
  check.require(p.d_index >= 1, "q_index", "[s_q, h_index, d_index >= 1]", "d_index = " + std::to_string(p.d_index));
  check.require(p.s_kv <= INT32_MAX, "k_index", "of at most 2^31 - 1 rows (indices are int32)", p.s_kv);
  return p;
}

// The reason why the GPU kernels of both operators do not support these sizes, or null.
inline const char* unsupported_on_gpus(const IndexOperands& p, std::int64_t topk) {
  constexpr std::int64_t kLimit = std::int64_t{1} << 31;
  if (p.d_index > 128) return "needs d_index at most 128";
  if (p.s_q >= kLimit || topk >= kLimit) return "needs s_q and topk below 2^31";
  if (p.s_kv >= kLimit / 2) return "needs s_kv below 2^30";  // so that keys past the last one fit in an int
  if (p.h_index >= kLimit / 64) return "needs h_index below 2^25";
  return nullptr;
}

}  // namespace hopwell
