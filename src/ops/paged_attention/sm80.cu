// paged_attention for any NVIDIA GPU from Ampere on: what runs where. The kernels are in the headers beside this file; how
// the work is shared out is told in sm80_work.hpp.
//
//     layout     type, d           queries a KV head   a warp's lanes have         in
//     nhd, hnd   16 bit, d ≤ 128   2 and more          fragments of mma            sm80_fragments.hpp
//     vllm       16 bit, d ≤ 128   any                 fragments of mma            sm80_fragments.hpp
//     nhd, hnd   any other         any, one a pass     rows of keys and values     sm80_lanes.hpp
//     vllm       any other, or r   any, one a pass     columns of keys and values  sm80_lanes.hpp
//
// They share one kernel, which walks along the keys (sm80_ring.hpp) and joins what several warps and CTAs have of one
// result (sm80_merge.hpp).
#include <atomic>
#include <random>

#include "ops/paged_attention/sm80_fragments.hpp"
#include "ops/paged_attention/sm80_lanes.hpp"
#include "runtime/launch.hpp"

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

// How the strips lie over the heads, and the lanes over a strip.
void choose_strips(const Problem& problem, Params& p) {
  const int elements = 16 / to_int(static_cast<std::int64_t>(size_of(problem.q.dtype)));
  // Heads whose rows follow one another are read together, up to 512 bytes.
  const bool together = problem.k.head == p.d && problem.v.head == p.d;
  const auto join_heads = [&](int limit) {
    while (together && p.heads < limit && problem.h_kv % (2 * p.heads) == 0) p.heads = 2 * p.heads;
  };
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
      join_heads(32 / lanes);
      p.tile = 32 / lanes / p.heads.value * elements;
      break;
    case Kind::fragments:
      p.queries = std::min(8, p.group * p.q_len);
      p.tile = p.d <= 64 ? 32 : 16;
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

Params params_of(const Problem& problem) {
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
  choose_strips(problem, p);
  return p;
}

// One an SM; so many that what they pass on has room.
int ctas_of(const Problem& problem, const Params& p) {
  return std::min(runtime::multiprocessors(problem.device.device_id), kMaxParts / (p.heads * p.queries));
}

std::size_t workspace_bytes(const Problem& problem) {
  const Params p = params_of(problem);
  return static_cast<std::size_t>(ctas_of(problem, p) * p.heads * p.queries) * static_cast<std::size_t>(p.half + 1) *
         sizeof(arch::Words4);
}

// The mark of a launch's parts: 64 random bits, other ones for each launch.
void choose_mark(Params& p) {
  static std::atomic<std::uint64_t> state = std::uint64_t{std::random_device{}()} << 32 | std::random_device{}();
  std::uint64_t x = state.fetch_add(0x9e3779b97f4a7c15);
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  x ^= x >> 31;
  p.mark[0] = static_cast<std::uint32_t>(x) | 1, p.mark[1] = static_cast<std::uint32_t>(x >> 32);  // not zero
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

// Hopper gives a CTA 227 KiB; a GPU that gives less gets fewer warps.
static_assert(ring_bytes<Rows<bf16, false>>(kMaxWarps) == 157184 && ring_bytes<Columns<bf16>>(kMaxWarps) == 157184);
static_assert(ring_bytes<Rows<bf16, true>>(kMaxWarps) <= 227 * 1024);
static_assert(ring_bytes<Fragments<bf16, 128, false>>(kMaxWarps) <= 227 * 1024);
static_assert(ring_bytes<Fragments<bf16, 64, true>>(kMaxWarps) <= 227 * 1024);

template <class Lanes>
void start(const Problem& problem, Stream stream) {
  const int device = problem.device.device_id;
  Params p = params_of(problem);
  p.parts = static_cast<arch::Words4*>(problem.workspace);
  choose_mark(p);
  describe_prefetch(problem, p);
  int warps = kMaxWarps;
  while (ring_bytes<Lanes>(warps) > runtime::max_shared_bytes(device)) warps /= 2;
  p.warps = warps, p.threads = 32 * warps, p.ctas = ctas_of(problem, p);
  p.groups = std::max(1, p.threads / p.pairs.value);
  p.alone = p.b <= 64, p.part = (p.b + (p.alone ? 31 : p.threads - 1)) / (p.alone ? 32 : p.threads);
  runtime::launch(kName, ring_kernel<Lanes>,
                  {.grid = {static_cast<std::uint32_t>(p.ctas.value)},
                   .threads = static_cast<std::uint32_t>(32 * warps),
                   .shared_bytes = ring_bytes<Lanes>(warps),
                   .programmatic_dependency = runtime::has_dependent_launches(device)},
                  stream, p);
}

template <class T>
void launch_as(const Problem& problem, Stream stream) {
  const Kind kind = kind_of(problem);
  if (kind == Kind::columns) return start<Columns<T>>(problem, stream);
  if constexpr (sizeof(T) == 2) {
    const bool small = problem.d <= 64, vllm = problem.layout == HOPWELL_CACHE_VLLM;
    if (kind == Kind::fragments && vllm)
      return small ? start<Fragments<T, 64, true>>(problem, stream) : start<Fragments<T, 128, true>>(problem, stream);
    if (kind == Kind::fragments)
      return small ? start<Fragments<T, 64, false>>(problem, stream) : start<Fragments<T, 128, false>>(problem, stream);
  }
  if (problem.r) return start<Rows<T, true>>(problem, stream);
  start<Rows<T, false>>(problem, stream);
}

void launch(const Problem& problem, Stream stream) {
  if (problem.b == 0) return;
  if (problem.q.dtype == DType::kFloat32) return launch_as<float>(problem, stream);
  if (problem.q.dtype == DType::kFloat16) return launch_as<fp16>(problem, stream);
  launch_as<bf16>(problem, stream);
}

const runtime::Registration<Problem> backend{{.name = HOPWELL_ON_DEVICE ? "sm80" : "emu:sm80",
                                              .supports = supports,
                                              .workspace_bytes = workspace_bytes,
                                              .launch = launch}};

}  // namespace
}  // namespace hopwell::ops::paged_attention
