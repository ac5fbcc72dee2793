#include "ops/paged_attention/plan.hpp"

#include <algorithm>
#include <cmath>
#include <tuple>

namespace hopwell::ops::paged_attention {
namespace {

constexpr float kLog2E = 1.44269504088896F;
constexpr std::int64_t kMaxKeys = std::int64_t{1} << 30;  // keys of a sequence, so positions stay far from 2^31
constexpr int kMaxHeads = 32;                             // KV heads of a row block: the lanes of a warp
constexpr int kMinTile = 2;                               // keys
constexpr int kTilesOfTwoBlocks = 12;                     // fewest tiles of a warp for which two blocks are faster
constexpr int kMaxInterleavedRows = 32;                   // query vectors of a row block with interleaved heads

// Thresholds for the longest sequence that the block tables allow, in keys:
//
//     up to kLong    the cluster kernel is faster, although some SMs have less work than others, or none
//     up to kShort   kShortWarps warps a CTA are enough
constexpr int kLong = 4096, kShort = 2048, kShortWarps = 6;
constexpr int kMaxClusterHeads = 4;                        // KV heads of a row block of the cluster kernel
constexpr std::int64_t kMaxBytes = std::int64_t{1} << 28;  // K and V; above, the split kernel's equal work is faster
constexpr std::size_t kSmBytes = 228 * 1024, kCtaBytes = 1024;  // shared memory of an SM; of a CTA for the system

int to_int(std::int64_t x) { return static_cast<int>(x); }
std::int64_t width_of(const View& view) { return static_cast<std::int64_t>(size_of(view.dtype)); }

Float type_of(const View& view) {
  return view.dtype == DType::kFloat32 ? Float::fp32 : view.dtype == DType::kFloat16 ? Float::fp16 : Float::bf16;
}

// True if all rows, indexed by the first `dimensions` dimensions, are 16-byte aligned.
bool aligned(const View& view, std::size_t dimensions) {
  bool ok = reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0;
  for (std::size_t i = 0; i < dimensions; ++i) ok &= view.shape[i] <= 1 || view.stride[i] * width_of(view) % 16 == 0;
  return ok;
}

// True if 16-byte copies are impossible: rows are not 16-byte aligned, `block` elements are no multiple of 16 bytes, or
// 16 slots or 32 groups span 2^30 bytes or more.
bool scattered(const Problem& problem) {
  const std::int64_t width = width_of(problem.q);
  const auto near = [&](const CacheStrides& at) {
    return std::max(16 * std::abs(at.slot), 32 * std::abs(at.group_stride)) * width < kMaxKeys;
  };
  const auto rows_aligned = [](const View& cache) { return aligned(cache, static_cast<std::size_t>(cache.ndim - 1)); };
  return problem.block % (16 / width) != 0 || !rows_aligned(problem.k_cache) || !rows_aligned(problem.v_cache) ||
         !near(problem.k) || !near(problem.v);
}
// True if the page stride is not negative and below 4 GiB: tiles of kind mma multiply by 32 bits of it.
bool pages_are_near(const Problem& problem) {
  const auto [least, most] = std::minmax(problem.k.page, problem.v.page);
  return least >= 0 && most * width_of(problem.q) < std::int64_t{1} << 32;
}

// Keys of a tile of kind key_major.
int keys_of(const KeyMajorShape& shape, int heads) { return 32 / shape.lanes / heads * shape.keys; }

// True if the rows of `heads` neighbouring KV heads are contiguous, so that a warp reads them together.
bool can_join(const Problem& problem, int heads) {
  const KeyMajorShape shape = key_major_shape(problem);
  return tile_kind(problem) == TileKind::key_major && problem.h_kv % heads == 0 && problem.k.head == problem.d &&
         problem.v.head == problem.d && heads <= kMaxJoinedHeads && keys_of(shape, heads) >= kMinTile;
}

// Keys of a tile of kind mma. With two blocks of 8 query vectors and a q that is split into two parts, the partial
// results leave room for half as many.
int mma_keys(const Problem& problem, int blocks) {
  const int keys = problem.d <= 64 ? 64 : problem.d <= 128 ? 32 : 16;
  return blocks > 1 && !exact_query(problem) ? keys / 2 : keys;
}

// With mma tiles, the warps of a CTA may read several adjacent KV heads at the same time, one head a warp, so that
// 128-byte lines that heads share are read together. Returns the number of heads for which the fewest lines are read
// twice. At most kMaxInterleavedRows query vectors, because a CTA may publish all of them as a partial result.
int best_interleaved_heads(const Problem& problem, int max_heads, int queries) {
  const std::int64_t row = problem.d * width_of(problem.q);
  // With two blocks and a split q it is slower if heads share half lines (d = 96, measured).
  const bool pays = exact_query(problem) || queries <= 8 || row % 64 != 0;
  const bool rows = problem.layout != HOPWELL_CACHE_VLLM && problem.k.head == problem.d && problem.v.head == problem.d;
  // Most heads for which the CTA has enough warps.
  const int most = exact_query(problem) && problem.device.shared_bytes >= std::size_t{160} * 1024 ? 4 : 2;
  const auto lines_of = [&](std::int64_t heads) {
    std::int64_t lines = 0;
    for (std::int64_t first = 0; first < problem.h_kv; first += heads)
      lines += ((first + heads) * row + 127) / 128 - first * row / 128;
    return lines;
  };
  int best = 1;
  for (int heads = 2; rows && pays && heads <= most && heads <= max_heads && problem.h_kv % heads == 0 &&
                      heads * queries <= kMaxInterleavedRows;
       heads *= 2)
    if (lines_of(heads) < lines_of(best)) best = heads;
  return best;
}

// Divides the heads into row blocks of at most `max_heads` KV heads, and a row block's tile between the lanes of a
// warp.
void plan_row_blocks(const Problem& problem, int max_heads, int mma_blocks, Params& p) {
  const int elements = to_int(16 / width_of(problem.q)), rows = p.query.group * p.query.q_len;
  Schedule& schedule = p.schedule;
  int lanes = 1, heads = 1, queries = 1, tile = 1, interleaved_heads = 1;
  switch (tile_kind(problem)) {
    case TileKind::dimension_major:
      while (lanes * 8 * elements < p.query.d) lanes *= 2;
      tile = 32 / lanes;
      break;
    case TileKind::key_major:
      lanes = key_major_shape(problem).lanes;
      while (2 * heads <= max_heads && can_join(problem, 2 * heads)) heads *= 2;
      tile = keys_of(key_major_shape(problem), heads);
      break;
    case TileKind::mma:
      queries = std::min(8 * mma_blocks, rows);
      tile = mma_keys(problem, mma_blocks);
      heads = interleaved_heads = best_interleaved_heads(problem, max_heads, queries);
  }
  schedule.lanes = lanes, schedule.heads = heads, schedule.queries = queries, schedule.tile = tile;
  schedule.interleaved_heads = interleaved_heads;
  schedule.pairs = heads * queries * p.query.half;
  schedule.pieces = (schedule.pairs.value + 63) / 64;
  schedule.passes = (rows + queries - 1) / queries;
  schedule.row_blocks = to_int(problem.h_kv) / heads * schedule.passes;
}

Query query_of(const Problem& problem) {
  Query query{};
  query.q = problem.q.data, query.u = problem.pos_bias_u.as<const void>();
  std::copy_n(problem.q.stride.begin(), 3, query.strides);
  query.u_stride = problem.pos_bias_u.stride[0], query.u_type = type_of(problem.pos_bias_u);
  query.aligned = aligned(problem.q, 3), query.u_aligned = aligned(problem.pos_bias_u, 1);
  query.b = to_int(problem.b), query.h_q = to_int(problem.h_q), query.group = to_int(problem.h_q / problem.h_kv);
  query.q_len = to_int(problem.q_len), query.d = to_int(problem.d), query.half = to_int(problem.d / 2);
  query.log2_scale = problem.scale * kLog2E;
  return query;
}

Cache cache_of(const Problem& problem) {
  const std::int64_t width = width_of(problem.q);
  Cache cache{};
  cache.k = problem.k_cache.data, cache.v = problem.v_cache.data;
  cache.block_tables = problem.block_tables.as<const int>(), cache.context_lens = problem.context_lens.as<const int>();
  cache.k_at = problem.k, cache.v_at = problem.v;
  cache.k_page = problem.k.page * width, cache.v_page = problem.v.page * width;
  cache.k_slot = to_int(problem.k.slot * width), cache.v_slot = to_int(problem.v.slot * width);
  cache.k_group = to_int(problem.k.group_stride * width), cache.v_group = to_int(problem.v.group_stride * width);
  cache.tables_stride = problem.block_tables.stride[0], cache.lens_stride = problem.context_lens.stride[0];
  cache.blocks = to_int(problem.blocks), cache.block = to_int(problem.block);
  cache.max_context = to_int(problem.max_blocks * problem.block);
  cache.scattered = scattered(problem);
  return cache;
}

PositionBias bias_of(const Problem& problem) {
  PositionBias p{};
  const bool by_key = problem.bias && problem.bias_kind == HOPWELL_BIAS_KEY;
  p.bias = problem.bias.as<const void>(), p.r = problem.r.as<const void>();
  p.v = problem.pos_bias_v.as<const void>(), p.alibi_slopes = problem.alibi_slopes.as<const float>();
  p.strides[0] = problem.bias.stride[0], p.strides[2] = problem.bias.stride[1];
  p.strides[1] = by_key ? problem.bias.stride[2] : 0;
  p.r_head_stride = problem.r.stride[0], p.r_stride = problem.r.stride[1];
  p.v_stride = problem.pos_bias_v.stride[0], p.slopes_stride = problem.alibi_slopes.stride[0];
  p.type = type_of(problem.bias), p.r_type = type_of(problem.r), p.v_type = type_of(problem.pos_bias_v);
  p.index = !problem.bias ? PositionBias::Index::none
            : by_key      ? PositionBias::Index::key
                          : PositionBias::Index::distance;
  p.extent = to_int(std::min(problem.extent, kMaxKeys));
  p.clamp = problem.out_of_range == HOPWELL_OUT_OF_RANGE_CLAMP;
  const std::int64_t head_chunks = problem.bias ? problem.bias.stride[1] * width_of(problem.bias) / 16 : 0;
  p.aligned = by_key && !p.clamp && aligned(problem.bias, 3) && std::abs(head_chunks) < kMaxKeys / 8;
  p.head_chunks = p.aligned ? to_int(head_chunks) : 0;
  p.r_aligned = aligned(problem.r, 2), p.v_aligned = aligned(problem.pos_bias_v, 1);
  const std::int64_t row_bytes = problem.r.stride[1] * width_of(problem.q);
  p.r_row_bytes = to_int(row_bytes);
  p.r_direct =
      problem.r && (problem.r.dtype != problem.q.dtype || !aligned(problem.r, 2) || std::abs(row_bytes) >= kMaxKeys);
  p.post_scale = problem.post_scale, p.scale = problem.scale;
  p.log2_scale = problem.post_scale ? kLog2E : problem.scale * kLog2E;
  p.window = to_int(std::min(problem.window, kMaxKeys)), p.key_end = to_int(kMaxKeys);
  if ((problem.bias || problem.r) && problem.out_of_range == HOPWELL_OUT_OF_RANGE_NEG_INF) {
    // Keys without a column are hidden, like keys outside of the window.
    int& limit = by_key ? p.key_end : p.window;
    limit = std::min(limit, p.extent);
  }
  return p;
}

Output output_of(const Problem& problem) {
  Output output{};
  output.out = problem.out.data, output.lse = problem.lse.as<float>();
  std::copy_n(problem.out.stride.begin(), 3, output.strides);
  if (problem.lse) std::copy_n(problem.lse.stride.begin(), 3, output.lse_strides);
  return output;
}

PrefetchLines prefetch_of(const Problem& problem) {
  const auto lines = [](const View& view) {
    std::int64_t last = 0;
    for (int i = 0; i < view.ndim; ++i) {
      const auto dimension = static_cast<std::size_t>(i);
      last += (view.shape[dimension] - 1) * view.stride[dimension];
    }
    return to_int(std::clamp<std::int64_t>((last * width_of(view) + 127) / 128, 0, kMaxKeys));
  };
  return {.tables = lines(problem.block_tables), .q = lines(problem.q), .lens = lines(problem.context_lens)};
}

// Parameters that both kernels have, with at most `max_heads` KV heads in a row block.
Params params_of(const Problem& problem, int max_heads, int mma_blocks) {
  Params p{.query = query_of(problem),
           .cache = cache_of(problem),
           .bias = bias_of(problem),
           .schedule = {},
           .output = output_of(problem),
           .prefetch = prefetch_of(problem)};
  plan_row_blocks(problem, max_heads, mma_blocks, p);
  return p;
}

// Row blocks of a CTA if all row blocks are equally long. 0 if b > 64, or if the unused places exceed 1/32 of the row
// blocks.
int whole_blocks(const Params& p) {
  const std::int64_t ctas = p.schedule.ctas.value, row_blocks = std::int64_t{p.query.b} * p.schedule.row_blocks,
                     of_cta = (row_blocks + ctas - 1) / ctas;
  return p.schedule.partition_by_warp && 32 * (of_cta * ctas - row_blocks) <= row_blocks ? to_int(of_cta) : 0;
}

}  // namespace

TileKind tile_kind(const Problem& problem) {
  const bool vllm = problem.layout == HOPWELL_CACHE_VLLM, wide = problem.d > 128;
  const std::int64_t queries = problem.h_q / problem.h_kv * problem.q_len;
  const bool fits = width_of(problem.q) == 2 && !(wide && vllm) && problem.block % 16 == 0 && !scattered(problem) &&
                    pages_are_near(problem);
  // A split q with d > 128 leaves room for few warps. Up to two passes of the other tile, whose keys the second pass
  // finds in L2, then take the same time (measured).
  const bool pays = vllm || queries > (wide && !exact_query(problem) ? 2 : 1);
  if (pays && fits && !problem.r) return TileKind::mma;
  return vllm ? TileKind::dimension_major : TileKind::key_major;
}

bool exact_query(const Problem& problem) {
  bool pairs = reinterpret_cast<std::uintptr_t>(problem.q.data) % 4 == 0;
  for (std::size_t i = 0; i < 3; ++i) pairs &= problem.q.shape[i] <= 1 || problem.q.stride[i] % 2 == 0;
  return pairs && !problem.pos_bias_u;
}

// Two blocks of d > 128 leave room for few warps. If warps have few tiles, the beginning and the end of a call
// dominate, and twice the rows make them longer.
int mma_blocks(const Problem& problem) {
  const std::int64_t group = problem.h_q / problem.h_kv;
  if (problem.q_len > 1 || group <= 8 || group > 16 || problem.d > 128) return 1;
  const std::int64_t keys = problem.b * problem.h_kv * problem.max_blocks * problem.block;
  return keys / mma_keys(problem, 1) >= std::int64_t{kTilesOfTwoBlocks} * kMaxWarps * problem.device.sms ? 2 : 1;
}

// Rows that fill a power of two of lanes, an 8-element vector each, are copied by the lanes that read them. Other rows
// are packed in a stage (tiles/key_major.hpp), and a lane has two to five vectors. Order of preference among the shapes
// that hold a row:
//
//     whole lines         with the most heads that a tile can join, a key's data fill whole 128-byte lines. A line that
//                         two row blocks share is read twice; the times of an H100 followed the number of such lines
//     not five vectors    many vectors need many registers for the query, so fewer keys; fp32 has at most four
//     least padding
//
// With r, registers suffice for one vector only.
KeyMajorShape key_major_shape(const Problem& problem) {
  const int d = to_int(problem.d), width = to_int(width_of(problem.q)), most = 16 / width;
  const auto room = [](const KeyMajorShape& shape) { return shape.lanes * shape.vectors * 8; };
  KeyMajorShape best{.lanes = problem.r ? most : 4, .vectors = 1, .keys = 4};
  while (room(best) < d) best.lanes *= 2;
  if (best.lanes >= most) best.keys = most;
  if (problem.r || room(best) == d) return best;
  const auto cost = [&](const KeyMajorShape& shape) {
    const int heads = keys_of(shape, 1) / std::max(shape.keys, kMinTile), line = heads * d * width % 128;
    return std::tuple(line > 0, shape.vectors == 5, room(shape));
  };
  best = {.lanes = 8, .vectors = 4, .keys = most / 4};
  for (const int lanes : {4, 8}) {
    for (int vectors = lanes / 4 + 1; vectors <= (width == 4 ? 4 : 5); ++vectors) {
      const KeyMajorShape shape{.lanes = lanes, .vectors = vectors, .keys = vectors <= 3 ? most / 2 : most / 4};
      if (room(shape) >= d && cost(shape) < cost(best)) best = shape;
    }
  }
  return best;
}

const char* unsupported(const Problem& problem) {
  constexpr std::int64_t kLimit = std::int64_t{1} << 31;
  if (!std::isfinite(problem.scale * kLog2E)) return "needs |scale| below 2^128 / log2(e)";
  if (problem.max_blocks * problem.block > kMaxKeys) return "needs max_blocks * block at most 2^30";
  if (problem.b >= kLimit || problem.blocks >= kLimit || problem.h_q * problem.q_len * problem.d >= kLimit)
    return "needs b, blocks and q_len * h_q * d below 2^31";
  const std::int64_t tiles = problem.max_blocks * problem.block / kMinTile + 1;  // most tiles of a sequence
  if (tiles * problem.b >= kLimit || tiles * problem.h_q * problem.q_len >= kLimit)
    return "needs max_blocks * block * b (or q_len * h_q) below 2^32";
  return nullptr;
}

Params plan_split(const Problem& problem, const SharedBytes& shared) {
  Params p = params_of(problem, kMaxHeads, mma_blocks(problem));
  Schedule& schedule = p.schedule;
  int warps = kMaxWarps;
  while (shared.with(warps) > problem.device.shared_bytes) --warps;
  warps -= warps % schedule.interleaved_heads.value;
  schedule.shares = warps / schedule.interleaved_heads.value;
  schedule.warps = warps, schedule.threads = 32 * warps, schedule.ctas = problem.device.sms;
  schedule.merge_groups = std::max(1, warps / schedule.pieces.value);
  schedule.partition_by_warp = p.query.b <= 64;
  const int adders = schedule.partition_by_warp ? 32 : schedule.threads;
  schedule.sequences_per_thread = (p.query.b + adders - 1) / adders;
  schedule.whole_blocks = whole_blocks(p);
  return p;
}

std::size_t split_workspace_bytes(const Params& params) {
  return static_cast<std::size_t>(params.schedule.ctas.value * params.schedule.pieces) * kPieceBytes;
}

// Chooses the heads of a row block, and the largest cluster size for which all clusters run at the same time. Prefers
// the plan with the most CTAs, and among equal plans the plan with more heads.
ClusterPlan plan_clusters(const Problem& problem, ClustersThatFit clusters_that_fit) {
  const Params single = params_of(problem, 1, 1);
  ClusterPlan best;
  for (int heads = 1; heads <= kMaxClusterHeads && (heads == 1 || can_join(problem, heads)); heads *= 2) {
    ClusterPlan plan{heads, single.query.b * single.schedule.row_blocks / heads};
    for (int size = 2; size <= kMaxCluster; ++size)
      if (clusters_that_fit(size, problem.device) >= plan.clusters) plan.size = size;
    if (plan.ctas() >= best.ctas()) best = plan;
  }
  return best;
}

runtime::PlanOr<ClusterPlan> plan_clusters_if_faster(const Problem& problem, ClustersThatFit clusters_that_fit) {
  using runtime::Unsupported;
  if (const char* reason = unsupported(problem)) return Unsupported{reason};
  if (problem.b == 0) return ClusterPlan{};
  const Unsupported too_many{"needs few sequences and heads, so that a cluster for each runs at the same time"};
  if (problem.b * problem.h_kv > kMaxClusterHeads * clusters_that_fit(2, problem.device)) return too_many;
  const ClusterPlan plan = plan_clusters(problem, clusters_that_fit);
  if (plan.size == 0) return too_many;
  const std::int64_t longest = problem.max_blocks * problem.block;
  if (longest <= kLong && longest * problem.b <= 4 * kLong) return plan;
  if (problem.b > 1)
    return Unsupported{"slower than sm80 for max_blocks * block above 4096 or above 16384 / b, if b > 1"};
  if (problem.q.dtype == DType::kFloat32 || 3 * plan.ctas() < 2 * problem.device.sms)
    return Unsupported{"slower than sm80 for max_blocks * block above 4096 with few heads or float32"};
  if (4 * longest * problem.h_kv * problem.d > kMaxBytes)
    return Unsupported{"slower than sm80 for block tables of more than 256 MiB of keys and values"};
  return plan;
}

ClusterParams cluster_params(const Problem& problem, const ClusterPlan& plan, const SharedBytes& shared,
                             int keys_of_lookup) {
  ClusterParams p{params_of(problem, plan.heads, 1), {}, {}, 0, 0};
  p.cluster = plan.size, p.slice = (p.schedule.pairs.value + plan.size - 1) / plan.size;
  // If two CTAs fit on an SM, CTAs of the next launch can start while this launch runs.
  const bool two_fit = 2 * (shared.with(kShortWarps) + kCtaBytes) <= kSmBytes;
  int warps = two_fit && p.cache.max_context <= kShort ? kShortWarps : kMaxWarps;
  while (shared.with(warps) > problem.device.shared_bytes) --warps;
  p.schedule.warps = warps;
  p.schedule.threads = 32 * p.schedule.warps;
  while (keys_of_lookup << p.lookups_log2 < p.schedule.tile) ++p.lookups_log2;
  const int row_bytes = p.schedule.heads * p.query.d * to_int(width_of(problem.q));
  const bool rows = problem.layout != HOPWELL_CACHE_VLLM && !p.cache.scattered;
  p.row_lines = rows && (row_bytes == 128 || row_bytes == 256) ? row_bytes / 128 : 0;
  return p;
}

}  // namespace hopwell::ops::paged_attention
