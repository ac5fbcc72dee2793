// paged_attention on GPUs: a problem as its kernels are given it. What is found out here, on the host, once a call, the
// kernels need not find out.
#pragma once

#include "ops/paged_attention/sm80_work.hpp"

namespace hopwell::ops::paged_attention {
namespace {

constexpr const char* kName = "paged_attention";
constexpr std::int64_t kMaxKeys = std::int64_t{1} << 30;  // of a sequence: positions stay far from 2^31

Float type_of(const View& view) {
  return view.dtype == DType::kFloat32 ? Float::fp32 : view.dtype == DType::kFloat16 ? Float::fp16 : Float::bf16;
}
int to_int(std::int64_t x) { return static_cast<int>(x); }

bool aligned(const View& view, std::size_t rows) {
  const auto width = static_cast<std::int64_t>(size_of(view.dtype));
  bool ok = reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0;
  for (std::size_t i = 0; i < rows; ++i) ok &= view.shape[i] <= 1 || view.stride[i] * width % 16 == 0;
  return ok;
}

enum class Kind { rows, columns, fragments };

// Whether pages do not lie in whole pieces of 16 bytes at distances below 2^31 bytes.
bool scattered(const Problem& problem) {
  const auto width = static_cast<std::int64_t>(size_of(problem.q.dtype));
  const auto near = [&](const CacheStrides& at) { return std::max(at.slot, 32 * at.group_stride) * width < kMaxKeys; };
  return problem.block % (16 / width) != 0 || !aligned(problem.k_cache, 3) || !aligned(problem.v_cache, 3) ||
         !near(problem.k) || !near(problem.v);
}

Kind kind_of(const Problem& problem) {
  const bool vllm = problem.layout == HOPWELL_CACHE_VLLM, several = problem.h_q / problem.h_kv * problem.q_len > 1;
  const bool fits = size_of(problem.q.dtype) == 2 && problem.d <= 128 && problem.block % 16 == 0 && !scattered(problem);
  if ((several || vllm) && fits && !problem.r) return Kind::fragments;
  return vllm ? Kind::columns : Kind::rows;
}

// Whether rows of `heads` neighbouring KV heads follow one another, so that `lanes` lanes for each read them together.
bool can_join(const Problem& problem, int lanes, int heads) {
  return kind_of(problem) == Kind::rows && lanes * heads <= 32 && problem.h_kv % heads == 0 &&
         problem.k.head == problem.d && problem.v.head == problem.d;
}

// How the strips lie over the heads, at most `most_heads` in one, and the lanes over a strip.
void choose_strips(const Problem& problem, int most_heads, Params& p) {
  const int elements = 16 / to_int(static_cast<std::int64_t>(size_of(problem.q.dtype)));
  p.queries = 1, p.heads = 1;
  int lanes = 1;
  switch (kind_of(problem)) {
    case Kind::columns:
      while (lanes * 8 * elements < p.d) lanes *= 2;
      p.tile = 32 / lanes;
      break;
    case Kind::rows:
      lanes = 8;
      while (lanes * 8 < p.d) lanes *= 2;
      while (2 * p.heads <= most_heads && can_join(problem, lanes, 2 * p.heads)) p.heads = 2 * p.heads;
      p.tile = 32 / lanes / p.heads.value * elements;
      break;
    case Kind::fragments:
      p.queries = std::min(8, p.group * p.q_len);
      p.tile = p.d <= 64 ? 64 : 32;
  }
  p.lanes = lanes, p.unit = p.tile, p.pairs = p.heads * p.queries * p.half;
  p.passes = to_int((p.group * p.q_len + p.queries - 1) / p.queries);
  p.strips = to_int(problem.h_kv) / p.heads * p.passes;
  p.scattered = scattered(problem);
}

void describe_bias(const Problem& problem, Params& p) {
  p.window = to_int(std::min(problem.window, kMaxKeys)), p.key_end = to_int(kMaxKeys);
  p.extent = to_int(std::min(problem.extent, kMaxKeys));
  p.clamp = problem.out_of_range == HOPWELL_OUT_OF_RANGE_CLAMP;
  const bool by_key = problem.bias && problem.bias_kind == HOPWELL_BIAS_KEY;
  if ((problem.bias || problem.r) && problem.out_of_range == HOPWELL_OUT_OF_RANGE_NEG_INF) {
    // What no column reaches is as invisible as what lies outside of a window.
    int& limit = by_key ? p.key_end : p.window;
    limit = std::min(limit, p.extent);
  }
  p.bias = problem.bias.as<const void>(), p.r = problem.r.as<const void>();
  p.bias_type = type_of(problem.bias), p.r_type = type_of(problem.r);
  p.bias_kind = !problem.bias ? Relative::none : by_key ? Relative::key : Relative::distance;
  p.bias_stride[0] = problem.bias.stride[0], p.bias_stride[2] = problem.bias.stride[1];
  p.bias_stride[1] = by_key ? problem.bias.stride[2] : 0;
  p.bias_in_pieces = by_key && !p.clamp && aligned(problem.bias, 3);
  p.r_stride_h = problem.r.stride[0], p.r_stride = problem.r.stride[1];
  const std::int64_t row_bytes = problem.r.stride[1] * static_cast<std::int64_t>(size_of(problem.q.dtype));
  p.r_row = to_int(row_bytes);
  p.r_direct = problem.r && (problem.r.dtype != problem.q.dtype || !aligned(problem.r, 2) || row_bytes >= kMaxKeys);
}

Params params_of(const Problem& problem, int most_heads) {
  Params p{};
  p.q = problem.q.data, p.k = problem.k_cache.data, p.v = problem.v_cache.data;
  p.block_tables = problem.block_tables.as<const int>(), p.context_lens = problem.context_lens.as<const int>();
  p.pos_bias_u = problem.pos_bias_u.as<const void>(), p.pos_bias_v = problem.pos_bias_v.as<const void>();
  p.alibi_slopes = problem.alibi_slopes.as<const float>();
  p.out = problem.out.data, p.lse = problem.lse.as<float>();
  p.k_at = problem.k, p.v_at = problem.v;
  const auto width = static_cast<std::int64_t>(size_of(problem.q.dtype));
  p.k_page = problem.k.page * width, p.v_page = problem.v.page * width;
  p.k_slot = to_int(problem.k.slot * width), p.v_slot = to_int(problem.v.slot * width);
  p.k_group = to_int(problem.k.group_stride * width), p.v_group = to_int(problem.v.group_stride * width);
  for (std::size_t i = 0; i < 3; ++i) {
    p.q_stride[i] = problem.q.stride[i], p.out_stride[i] = problem.out.stride[i];
    p.lse_stride[i] = problem.lse ? problem.lse.stride[i] : 0;
  }
  p.tables_stride = problem.block_tables.stride[0], p.lens_stride = problem.context_lens.stride[0];
  p.u_stride = problem.pos_bias_u.stride[0], p.v_stride = problem.pos_bias_v.stride[0];
  p.slopes_stride = problem.alibi_slopes.stride[0];
  p.u_type = type_of(problem.pos_bias_u), p.v_type = type_of(problem.pos_bias_v);
  p.b = to_int(problem.b), p.q_len = to_int(problem.q_len), p.h_q = to_int(problem.h_q), p.d = to_int(problem.d);
  p.group = to_int(problem.h_q / problem.h_kv), p.blocks = to_int(problem.blocks), p.block = to_int(problem.block);
  p.max_context = to_int(problem.max_blocks * problem.block);
  p.q_in_pieces = aligned(problem.q, 3), p.u_in_pieces = aligned(problem.pos_bias_u, 1);
  p.v_in_pieces = aligned(problem.pos_bias_v, 1), p.r_in_pieces = aligned(problem.r, 2);
  p.scale_log2 = problem.scale * kLog2E, p.bias_log2 = problem.post_scale ? kLog2E : p.scale_log2;
  p.half = p.d / 2;
  describe_bias(problem, p);
  choose_strips(problem, most_heads, p);
  return p;
}

// What is asked for at the start, in pieces of 128 bytes.
void describe_prefetch(const Problem& problem, Params& p) {
  const auto lines = [](const View& view) {
    std::int64_t last = 0;
    for (int i = 0; i < view.ndim; ++i) last += (view.shape[i] - 1) * view.stride[i];
    const std::int64_t pieces = (last * static_cast<std::int64_t>(size_of(view.dtype)) + 127) / 128;
    return to_int(std::clamp<std::int64_t>(pieces, 0, kMaxKeys));
  };
  p.lens_lines = lines(problem.context_lens), p.table_lines = lines(problem.block_tables), p.q_lines = lines(problem.q);
}

// What the kernels can count.
runtime::Support supports(const Problem& problem) {
  constexpr std::int64_t kLimit = std::int64_t{1} << 31;
  if (problem.max_blocks * problem.block > kMaxKeys)
    return runtime::Support::no("max_blocks * block must be at most 2^30");
  if (problem.b >= kLimit || problem.blocks >= kLimit || problem.h_q * problem.q_len * problem.d >= kLimit)
    return runtime::Support::no("b, blocks and q_len * h_q * d must be below 2^31");
  const std::int64_t units = problem.max_blocks * problem.block / 4 + 1;  // of a sequence, at most
  if (units * problem.b >= kLimit || units * problem.h_q * problem.q_len >= kLimit)
    return runtime::Support::no("max_blocks * block * b (or q_len * h_q) must be below 2^33");
  return {};
}

}  // namespace
}  // namespace hopwell::ops::paged_attention
