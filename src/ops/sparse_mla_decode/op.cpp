#include "ops/sparse_mla_decode/op.hpp"

#include <hopwell/operators.hpp>

#include <string>

#include "ops/common/paged_cache.hpp"
#include "ops/common/views.hpp"

namespace hopwell::ops::sparse_mla_decode {
namespace {

constexpr const char* kName = "sparse_mla_decode";
const DTypes kInt32 = {DType::kInt32};

int dimensions(const DLTensor* tensor) { return tensor != nullptr && has_sizes(*tensor) ? tensor->ndim : 0; }

// q [b, q_len, h_q, d_qk] or [b, h_q, d_qk].
void check_q(Checker& check, const SparseMlaDecodeArgs& args, Problem& p) {
  const bool flat = dimensions(args.q) == 3;
  p.q = check.input("q", args.q, {DType::kBFloat16, DType::kFloat32},
                    flat ? Shape{"b", "h_q", "d_qk"} : Shape{"b", maybe("q_len"), "h_q", "d_qk"});
  if (flat) {
    p.q = unsqueezed(p.q, 1);
    check.bind("q_len", 1);
  }
  p.b = check["b"], p.q_len = check["q_len"], p.h_q = check["h_q"], p.d_qk = check["d_qk"];
  check.require(p.q_len >= 1 && p.h_q >= 1 && p.d_qk >= 1, "q", "[b, q_len >= 1, h_q >= 1, d_qk >= 1]",
                shape_string(*args.q));
  check.require(args.d_v >= 1 && args.d_v <= p.d_qk, "d_v", "between 1 and d_qk = " + std::to_string(p.d_qk), args.d_v);
  check.bind("d_v", args.d_v);
  p.d_v = args.d_v;
}

// [b] or [b, q_len].
PerQuery check_per_query(Checker& check, const char* name, const DLTensor* tensor) {
  if (tensor == nullptr) return {};
  const bool flat = dimensions(tensor) == 1;
  const View view = check.input(name, tensor, kInt32, flat ? Shape{"b"} : Shape{"b", maybe("q_len")}, Layout::kAny);
  return {view.as<const std::int32_t>(), view.stride[0], flat ? 0 : view.stride[1], true};
}

// The names and tensors of one cache.
struct Arguments {
  const char *cache, *indices, *topk, *topk_length, *block_tables, *max_blocks;
  const DLTensor *cache_tensor, *indices_tensor, *topk_length_tensor, *block_tables_tensor;
};

PagedSelection check_selection(Checker& check, const Arguments& args, const PagedCache& cache, std::int64_t q_len) {
  PagedSelection selection;
  const bool flat = dimensions(args.indices_tensor) == 2 && q_len == 1;
  View indices = check.input(args.indices, args.indices_tensor, kInt32,
                             flat ? Shape{"b", args.topk} : Shape{"b", "q_len", args.topk});
  if (flat) indices = unsqueezed(indices, 1);
  check.require(check[args.topk] < std::int64_t{1} << 31, args.indices, "of less than 2^31 entries a row",
                check[args.topk]);
  selection.indices = indices.as<const std::int32_t>();
  selection.indices_stride_b = indices.stride[0], selection.indices_stride_i = indices.stride[1];
  selection.topk = check[args.topk];
  selection.topk_length = check_per_query(check, args.topk_length, args.topk_length_tensor);
  const View tables = check.optional_input(args.block_tables, args.block_tables_tensor, kInt32, {"b", args.max_blocks});
  if (tables) {
    selection.block_tables = tables.as<const std::int32_t>(), selection.tables_stride = tables.stride[0];
    selection.max_blocks = check[args.max_blocks], selection.has_tables = true;
  }
  selection.q_len = q_len;
  selection.blocks = cache.blocks.blocks, selection.block = cache.blocks.block;
  return selection;
}

void check_extra(Checker& check, const SparseMlaDecodeArgs& args, Problem& p) {
  const bool given = args.extra_cache != nullptr;
  check.together("extra_cache", given, "extra_indices", args.extra_indices != nullptr);
  check.rule(given || args.extra_topk_length == nullptr, "extra_topk_length needs extra_cache");
  check.rule(given || args.extra_block_tables == nullptr, "extra_block_tables needs extra_cache");
  if (!given) return;
  check.together("block_tables", args.block_tables != nullptr, "extra_block_tables",
                 args.extra_block_tables != nullptr);
  check.rule(args.rope_cache == nullptr, "rope_cache and extra_cache exclude each other");
  const PagedCache cache = check_paged_cache(check, "extra_cache", args.extra_cache, p.d_qk, CacheUse::latents);
  const bool same = cache.format == p.format && (p.format || cache.row_type == p.row_type);
  check.require(same, "extra_cache", "of the row format of cache", "another format");
  p.extra = Keys{cache.blocks, check_selection(check,
                                               {"extra_cache", "extra_indices", "extra_topk", "extra_topk_length",
                                                "extra_block_tables", "extra_max_blocks", args.extra_cache,
                                                args.extra_indices, args.extra_topk_length, args.extra_block_tables},
                                               cache, p.q_len)};
}

void check_rope_cache(Checker& check, const SparseMlaDecodeArgs& args, Problem& p) {
  if (args.rope_cache == nullptr) return;
  check.rule(!p.format, "rope_cache needs a cache that is not quantised");
  const PagedCache cache = check_paged_cache(check, "rope_cache", args.rope_cache, p.d_qk - p.d_v, CacheUse::latents);
  const bool same = !cache.format && cache.row_type == p.row_type && cache.blocks.blocks == p.keys.cache.blocks &&
                    cache.blocks.block == p.keys.cache.block;
  check.require(same, "rope_cache", "of the dtype, the blocks and the block of cache", shape_string(*args.rope_cache));
  p.rope_cache = cache.blocks;
}

void check_outputs(Checker& check, const SparseMlaDecodeArgs& args, Problem& p) {
  const bool flat = dimensions(args.q) == 3;
  p.out = check.output("out", args.out, {p.q.dtype, DType::kFloat32},
                       flat ? Shape{"b", "h_q", "d_v"} : Shape{"b", "q_len", "h_q", "d_v"});
  p.lse = check.optional_output("lse", args.lse, {DType::kFloat32},
                                flat ? Shape{"b", "h_q"} : Shape{"b", "q_len", "h_q"}, Layout::kAny);
  if (!flat) return;
  p.out = unsqueezed(p.out, 1);
  if (p.lse) p.lse = unsqueezed(p.lse, 1);
}

}  // namespace

Problem check(const SparseMlaDecodeArgs& args) {
  Checker check(kName);
  Problem p;
  check_q(check, args, p);
  const std::int64_t width = args.rope_cache != nullptr ? p.d_v : p.d_qk;
  const PagedCache cache = check_paged_cache(check, "cache", args.cache, width, CacheUse::latents);
  p.format = cache.format, p.row_type = cache.row_type;
  p.keys = {cache.blocks, check_selection(check,
                                          {"cache", "indices", "topk", "topk_length", "block_tables", "max_blocks",
                                           args.cache, args.indices, args.topk_length, args.block_tables},
                                          cache, p.q_len)};
  check.finite("sm_scale", args.sm_scale);
  p.sm_scale = args.sm_scale;
  check.rule(args.context_lens == nullptr || args.block_tables != nullptr, "context_lens needs block_tables");
  p.keys.selection.context_lens = check_per_query(check, "context_lens", args.context_lens);
  p.keys.selection.lens_per_query = dimensions(args.context_lens) == 2;
  check_extra(check, args, p);
  check_rope_cache(check, args, p);
  p.attn_sink = check.optional_input("attn_sink", args.attn_sink, {DType::kFloat32}, {"h_q"}, Layout::kAny);
  const KvScale scale = check_kv_scale(check, args, p.format);
  p.kv_scale = scale.pointer, p.kv_scale_value = scale.value;
  check.require(args.keys_per_split >= 64 && args.keys_per_split % 64 == 0, "keys_per_split",
                "a positive multiple of 64", args.keys_per_split);
  p.keys_per_split = args.keys_per_split;
  check_outputs(check, args, p);
  check.take_workspace(p, args);
  return p;
}

}  // namespace hopwell::ops::sparse_mla_decode
