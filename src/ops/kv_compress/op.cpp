#include "ops/kv_compress/op.hpp"

#include <hopwell/operators.hpp>

#include <algorithm>
#include <string>

namespace hopwell::ops::kv_compress {
namespace {

const DTypes kFloats = {DType::kBFloat16, DType::kFloat32};

// Checks kv, gate, ratio, position_bias, overlap and the documents. Binds "s", "w", "d" and "ratio".
template <class AnyProblem, class Args>
void check_inputs(Checker& check, const Args& args, AnyProblem& p) {
  p.kv = check.input("kv", args.kv, kFloats, {"s", "w"});
  p.gate = check.input("gate", args.gate, {p.kv.dtype}, {"s", "w"});
  p.w = check["w"];
  check.require(args.ratio >= 1, "ratio", "at least 1", args.ratio);
  check.require(p.w >= 1 && (!args.overlap || p.w % 2 == 0), "kv",
                args.overlap ? "[s, w] with an even w (overlap)" : "[s, w >= 1]", "w = " + std::to_string(p.w));
  p.d = args.overlap ? p.w / 2 : p.w;
  check.bind("d", p.d);
  check.bind("ratio", args.ratio);
  p.position_bias =
      check.optional_input("position_bias", args.position_bias, {DType::kFloat32}, {"ratio", "w"}, Layout::kRows);
  const View tokens =
      check.optional_input("cu_seqlens", args.cu_seqlens, {DType::kInt32}, {"documents + 1"}, Layout::kAny);
  const View keys =
      check.optional_input("cu_compressed", args.cu_compressed, {DType::kInt32}, {"documents + 1"}, Layout::kAny);
  check.together("cu_seqlens", bool(tokens), "cu_compressed", bool(keys));
  const std::int64_t s = check["s"];
  p.blocks.s = s;
  p.blocks.ratio = std::min(args.ratio, s + 1);
  p.blocks.overlap = args.overlap;
  p.blocks.most = s / args.ratio;
  p.blocks.packed = bool(tokens);
  if (!tokens) return;
  check.require(tokens.shape[0] >= 1, "cu_seqlens", "int32 [documents + 1]", "int32 [0]");
  p.blocks.documents = tokens.shape[0] - 1;
  p.blocks.cu_seqlens = {tokens.as<const std::int32_t>(), tokens.stride[0]};
  p.blocks.cu_compressed = {keys.as<const std::int32_t>(), keys.stride[0]};
}

}  // namespace

Problem check(const KvCompressArgs& args) {
  Checker check("kv_compress");
  Problem p;
  check_inputs(check, args, p);
  p.out = check.output("out", args.out, kFloats, {"n", "d"});
  p.blocks.n = check["n"];
  check.take_workspace(p, args);
  return p;
}

BackwardProblem check(const KvCompressBackwardArgs& args) {
  Checker check("kv_compress_backward");
  BackwardProblem p;
  p.d_out = check.input("d_out", args.d_out, kFloats, {"n", "d of d_out"});
  check_inputs(check, args, p);
  check.require(p.d_out.shape[1] == p.d, "d_out", "[n, d = " + std::to_string(p.d) + "]", p.d_out.shape[1]);
  p.blocks.n = check["n"];
  p.d_kv = check.optional_output("d_kv", args.d_kv, {p.kv.dtype}, {"s", "w"});
  p.d_gate = check.optional_output("d_gate", args.d_gate, {p.kv.dtype}, {"s", "w"});
  p.d_position_bias = check.optional_output("d_position_bias", args.d_position_bias, {DType::kFloat32}, {"ratio", "w"});
  check.rule(!p.d_position_bias || p.position_bias, "d_position_bias needs position_bias");
  check.take_workspace(p, args);
  return p;
}

}  // namespace hopwell::ops::kv_compress
