#include "ops/paged_attention/op.hpp"

#include <hopwell/operators.hpp>

#include "ops/common/views.hpp"

namespace hopwell::ops::paged_attention {
namespace {

constexpr const char* kName = "paged_attention";
constexpr std::int64_t kMaxQueries = 16, kMinD = 32, kMaxBlock = 256;

// Broadcasts a first dimension of 1 to `size`.
View broadcast(View view, std::int64_t size) {
  if (view.shape[0] == 1) view.stride[0] = 0;
  view.shape[0] = size;
  return view;
}

// Size 1 if the tensor's first dimension is 1, which is broadcast; otherwise `name`.
Dim or_one(const DLTensor* tensor, const char* name) {
  return tensor != nullptr && has_sizes(*tensor) && tensor->ndim > 0 && tensor->shape[0] == 1 ? Dim(1) : Dim(name);
}

void check_q(Checker& check, const PagedAttentionArgs& args, Problem& p) {
  const DTypes dtypes = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
  const bool flat = args.q != nullptr && args.q->ndim == 3;
  p.q = check.input("q", args.q, dtypes, flat ? Shape{"b", "h_q", "d"} : Shape{"b", maybe("q_len"), "h_q", "d"});
  if (flat) {
    p.q = unsqueezed(p.q, 1);
    check.bind("q_len", 1);
  }
  p.b = check["b"], p.q_len = check["q_len"], p.h_q = check["h_q"], p.d = check["d"];
  check.require(p.q_len >= 1 && p.q_len <= kMaxQueries, "q", "[b, q_len 1..16, h_q, d]",
                "q_len = " + std::to_string(p.q_len));
  check.require(p.h_q >= 1, "q", "[b, q_len, h_q >= 1, d]", "h_q = " + std::to_string(p.h_q));
  check.require(p.d >= kMinD && p.d <= kMaxD && p.d % 8 == 0, "q", "[b, q_len, h_q, d a multiple of 8 from 32 to 256]",
                "d = " + std::to_string(p.d));
}

CacheStrides strides(const View& cache, hopwell_cache_layout layout) {
  const auto& s = cache.stride;
  const std::int64_t last = cache.shape[3];
  switch (layout) {
    case HOPWELL_CACHE_NHD:
      return {.page = s[0], .head = s[2], .slot = s[1], .group = last, .group_stride = last};
    case HOPWELL_CACHE_HND:
      return {.page = s[0], .head = s[1], .slot = s[2], .group = last, .group_stride = last};
    case HOPWELL_CACHE_VLLM:
      break;
  }
  if (cache.ndim == 5) return {.page = s[0], .head = s[1], .slot = s[3], .group = cache.shape[4], .group_stride = s[2]};
  return {.page = s[0], .head = s[1], .slot = 1, .group = 1, .group_stride = s[2]};
}

void check_caches(Checker& check, const PagedAttentionArgs& args, Problem& p) {
  p.layout = check.choice("layout", args.layout, HOPWELL_CACHE_VLLM, "nhd, hnd or vllm");
  const DTypes dtype = {p.q.dtype};
  if (p.layout == HOPWELL_CACHE_VLLM) {
    const std::int64_t x = 16 / static_cast<std::int64_t>(size_of(p.q.dtype));
    p.k_cache = check.input("k_cache", args.k_cache, dtype, {"blocks", "h_kv", p.d / x, "block", x});
    p.v_cache = check.input("v_cache", args.v_cache, dtype, {"blocks", "h_kv", "d", "block"});
  } else {
    const Shape shape =
        p.layout == HOPWELL_CACHE_NHD ? Shape{"blocks", "block", "h_kv", "d"} : Shape{"blocks", "h_kv", "block", "d"};
    p.k_cache = check.input("k_cache", args.k_cache, dtype, shape);
    p.v_cache = check.input("v_cache", args.v_cache, dtype, shape);
  }
  p.k = strides(p.k_cache, p.layout);
  p.v = strides(p.v_cache, p.layout);
  p.blocks = check["blocks"], p.block = check["block"], p.h_kv = check["h_kv"];
  check.require(p.block >= 1 && p.block <= kMaxBlock, "k_cache", "of block 1..256",
                "block = " + std::to_string(p.block));
  check.require(p.h_kv >= 1 && p.h_q % p.h_kv == 0, "k_cache", "of an h_kv that divides h_q = " + std::to_string(p.h_q),
                "h_kv = " + std::to_string(p.h_kv));
  p.block_tables = check.input("block_tables", args.block_tables, {DType::kInt32}, {"b", "max_blocks"});
  p.context_lens = check.input("context_lens", args.context_lens, {DType::kInt32}, {"b"}, Layout::kAny);
  p.max_blocks = check["max_blocks"];
}

void check_bias(Checker& check, const PagedAttentionArgs& args, Problem& p) {
  DTypes like_q = {DType::kFloat32};
  if (p.q.dtype != DType::kFloat32) like_q.push_back(p.q.dtype);
  check.rule(args.bias == nullptr || args.r == nullptr, "bias and r exclude each other");
  check.rule(args.pos_bias_v == nullptr || args.r != nullptr, "pos_bias_v needs r");
  p.bias_kind = check.choice("bias_kind", args.bias_kind, HOPWELL_BIAS_DISTANCE, "key or distance");
  p.out_of_range = check.choice("out_of_range", args.out_of_range, HOPWELL_OUT_OF_RANGE_NEG_INF, "zero, clamp or -inf");
  p.post_scale = !args.pre_scale;
  p.pos_bias_u = check.optional_input("pos_bias_u", args.pos_bias_u, like_q, {"h_q", "d"});
  p.pos_bias_v = check.optional_input("pos_bias_v", args.pos_bias_v, like_q, {"h_q", "d"});
  const DTypes floats = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
  const Dim b = or_one(args.bias, "b");
  const Shape shape = p.bias_kind == HOPWELL_BIAS_KEY ? Shape{b, "h_q", "q_len", "keys"} : Shape{b, "h_q", "extent"};
  p.bias = check.optional_input("bias", args.bias, floats, shape);
  p.r = check.optional_input("r", args.r, like_q, {or_one(args.r, "h_q"), "extent", "d"});
  p.extent = p.r ? p.r.shape[1] : p.bias ? p.bias.shape[static_cast<std::size_t>(p.bias.ndim - 1)] : 0;
  if (p.bias || p.r) {
    check.require(p.out_of_range != HOPWELL_OUT_OF_RANGE_CLAMP || p.extent >= 1, p.r ? "r" : "bias",
                  "of extent 1 or more to clamp to", "extent 0");
  }
  if (p.bias) p.bias = broadcast(p.bias, p.b);
  if (p.r) p.r = broadcast(p.r, p.h_q);
  p.alibi_slopes = check.optional_input("alibi_slopes", args.alibi_slopes, {DType::kFloat32}, {"h_q"}, Layout::kAny);
}

}  // namespace

Problem check(const PagedAttentionArgs& args) {
  Checker check(kName);
  Problem p;
  check_q(check, args, p);
  check_caches(check, args, p);
  check_bias(check, args, p);
  check.finite("scale", args.scale);
  p.scale = args.scale;
  const std::int64_t window = args.window.value_or(0);
  check.require(window >= 0, "window", "at least 1, or 0 for every key", window);
  if (window > 0) p.window = window;
  const bool flat = args.q->ndim == 3;
  p.out = check.output("out", args.out, {p.q.dtype}, flat ? Shape{"b", "h_q", "d"} : Shape{"b", "q_len", "h_q", "d"});
  p.lse = check.optional_output("lse", args.lse, {DType::kFloat32},
                                flat ? Shape{"b", "h_q"} : Shape{"b", "q_len", "h_q"}, Layout::kAny);
  if (flat) {
    p.out = unsqueezed(p.out, 1);
    if (p.lse) p.lse = unsqueezed(p.lse, 1);
  }
  check.take_workspace(p, args);
  return p;
}

}  // namespace hopwell::ops::paged_attention
