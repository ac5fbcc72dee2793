#include "ops/paged_lightning_indexer/op.hpp"

#include <hopwell/operators.hpp>

#include <string>

#include "ops/common/paged_cache.hpp"
#include "ops/common/views.hpp"

namespace hopwell::ops::paged_lightning_indexer {
namespace {

const DTypes kInt32 = {DType::kInt32};

// Whether there are no dimensions q_len: q_index is [b, h_index, d_index].
bool is_flat(const PagedLightningIndexerArgs& args) {
  const DLTensor* q = args.q_index;
  return q != nullptr && has_sizes(*q) && q->ndim == 3;
}

// With q_len as dimension 1.
View with_q_len(const View& view, bool flat) { return flat && view ? unsqueezed(view, 1) : view; }

void check_q(Checker& check, const PagedLightningIndexerArgs& args, Problem& p) {
  const bool flat = is_flat(args);
  const Shape per_head = flat ? Shape{"b", "h_index"} : Shape{"b", "q_len", "h_index"};
  p.q = check.input("q_index", args.q_index, {DType::kBFloat16, DType::kFloat32, DType::kFloat8E4m3},
                    flat ? Shape{"b", "h_index", "d_index"} : Shape{"b", maybe("q_len"), "h_index", "d_index"});
  if (flat) check.bind("q_len", 1);
  p.b = check["b"], p.q_len = check["q_len"], p.h_index = check["h_index"], p.d_index = check["d_index"];
  check.require(p.q_len >= 1 && p.h_index >= 1 && p.d_index >= 1, "q_index",
                "[b, q_len >= 1, h_index >= 1, d_index >= 1]", shape_string(*args.q_index));
  p.weights = check.input("weights", args.weights, {DType::kFloat32, DType::kBFloat16}, per_head);
  p.q_scale = check.optional_input("q_scale", args.q_scale, {DType::kFloat32}, per_head);
  check.rule(p.q.dtype == DType::kFloat8E4m3 || !p.q_scale,
             "q_scale needs float8_e4m3fn q_index; scales of bfloat16 and float32 belong into weights");
  p.q = with_q_len(p.q, flat), p.weights = with_q_len(p.weights, flat), p.q_scale = with_q_len(p.q_scale, flat);
}

void check_cache(Checker& check, const PagedLightningIndexerArgs& args, Problem& p) {
  const PagedCache cache = check_paged_cache(check, "cache", args.cache, p.d_index, CacheUse::index_keys);
  const bool is_fp8 = p.q.dtype == DType::kFloat8E4m3;
  check.require(is_fp8 == cache.format.has_value(), "cache",
                is_fp8 ? "of bytes for a q_index of float8_e4m3fn" : "of the dtype of q_index",
                cache.format ? "a cache of bytes" : dtype_name(cache.row_type));
  check.require(is_fp8 || cache.row_type == p.q.dtype, "cache", "of the dtype of q_index", dtype_name(cache.row_type));
  p.cache = cache.blocks, p.format = cache.format;
}

void check_positions(Checker& check, const PagedLightningIndexerArgs& args, Problem& p) {
  const View tables = check.input("block_tables", args.block_tables, kInt32, {"b", "max_blocks"});
  const DLTensor* lens = args.context_lens;
  const bool per_query = lens == nullptr || !has_sizes(*lens) || lens->ndim != 1;
  const View counts =
      check.input("context_lens", lens, kInt32, per_query ? Shape{"b", maybe("q_len")} : Shape{"b"}, Layout::kAny);
  PagedSelection& positions = p.positions;
  positions.block_tables = tables.as<const std::int32_t>(), positions.tables_stride = tables.stride[0];
  positions.max_blocks = check["max_blocks"], positions.has_tables = true;
  positions.context_lens = {counts.as<const std::int32_t>(), counts.stride[0], per_query ? counts.stride[1] : 0, true};
  positions.lens_per_query = per_query;
  positions.q_len = p.q_len, positions.blocks = p.cache.blocks, positions.block = p.cache.block;
}

void check_outputs(Checker& check, const PagedLightningIndexerArgs& args, Problem& p) {
  const bool flat = is_flat(args);
  const Shape selected = flat ? Shape{"b", "topk"} : Shape{"b", "q_len", "topk"};
  p.indices = check.output("indices", args.indices, kInt32, selected);
  p.scores = check.optional_output("scores", args.scores, {DType::kFloat32}, selected);
  p.lengths =
      check.optional_output("lengths", args.lengths, kInt32, flat ? Shape{"b"} : Shape{"b", "q_len"}, Layout::kAny);
  p.indices = with_q_len(p.indices, flat), p.scores = with_q_len(p.scores, flat);
  p.lengths = with_q_len(p.lengths, flat), p.topk = check["topk"];
}

}  // namespace

Problem check(const PagedLightningIndexerArgs& args) {
  Checker check(kName);
  Problem p;
  check_q(check, args, p);
  check_cache(check, args, p);
  check_positions(check, args, p);
  check_outputs(check, args, p);
  p.relu = args.relu, p.slots = args.as_slots;
  check.take_workspace(p, args);
  return p;
}

}  // namespace hopwell::ops::paged_lightning_indexer
