// lightning_indexer on GPUs: parameters of both score kernels, and the work of a CTA.
//
// A CTA has a block of keys and a slice of the tiles of q. If queries do not see all keys, only the keys from the first
// to the last visible to any of the current queries are distributed, and slices cover only the tiles from the first to
// the last whose queries see any of the block's keys. So the run time follows the number of visible (query, key) pairs.
#pragma once

#include <climits>

#include "arch/sm80/threads.hpp"
#include "ops/common/index_score.hpp"
#include "ops/lightning_indexer/plan.hpp"
#include "tile/ceil_div.hpp"
#include "tile/gpu/warp.hpp"

namespace hopwell::ops::lightning_indexer::HOPWELL_TARGET {

struct ScoreTask : QueryTiles {
  const void* weights;  // fp32 or bf16 [s_q, h_index]
  int64_t weights_stride;
  bool weights_bf16;
  const float *q_scale, *k_scale;  // [s_q, h_index], [s_kv], or null; e4m3 only
  int64_t q_scale_stride, k_scale_stride;
  bool masked;  // some queries may not see all keys
  Visibility visibility;
  float* scores;  // [queries, pitch]
  int64_t first_query, pitch;
  int queries, heads, s_kv;
  int key_blocks, sms;
};

// A head's weight, multiplied by its scale if rows of type T have scales.
template <class T>
HOPWELL_DEVICE float weight_of(const ScoreTask& p, int64_t query, int head) {
  const float weight = tile::load_fp32(p.weights, p.weights_bf16, query * p.weights_stride + head);
  if (sizeof(T) > 1 || p.q_scale == nullptr) return weight;
  return weight * p.q_scale[query * p.q_scale_stride + head];
}
template <class T>
HOPWELL_DEVICE float scale_of_key(const ScoreTask& p, int key) {
  if (sizeof(T) > 1 || p.k_scale == nullptr || key >= p.s_kv) return 1;
  return p.k_scale[key * p.k_scale_stride];
}
// The score of a key that does not exist. It sorts below −inf, and above nothing (0): see sortable_key in select.hpp.
HOPWELL_DEVICE float absent_score() { return arch::bit_cast<float>(0xFFFFFFFEU); }
// Whether a key of 0 … s_kv − 1 exists. In a paged cache some may not; the kernels store absent_score() for them.
HOPWELL_DEVICE bool has_key(const ScoreTask& /*task*/, int /*key*/) { return true; }

// The row of a key.
template <class T>
struct KeyRow {
  const T* data;  // valid if the key exists
  bool exists;
};

// Numbers first … end − 1; empty if first >= end.
struct Span {
  int first = INT_MAX, end = 0;

  [[nodiscard]] HOPWELL_DEVICE bool empty() const { return first >= end; }
  [[nodiscard]] HOPWELL_DEVICE bool overlaps(int from, int count) const { return from < end && from + count > first; }
  // The smallest span that contains both.
  [[nodiscard]] HOPWELL_DEVICE Span with(const Span& other) const {
    return {first < other.first ? first : other.first, end > other.end ? end : other.end};
  }
};

// The keys that a query sees; `query` counts from first_query.
HOPWELL_DEVICE Span visible_to(const ScoreTask& p, int query) {
  const KeyRange keys = p.visibility.keys(p.first_query + query, p.s_kv);
  return keys.count > 0 ? Span{int(keys.first), int(keys.end())} : Span{};
}

// The smallest span that contains the spans of all lanes; of all threads of the CTA.
HOPWELL_DEVICE Span span_of_warp(const Span& own) {
  return {-tile::max_of_warp(-own.first), tile::max_of_warp(own.end)};
}
template <int kWarps>
HOPWELL_DEVICE Span span_of_cta(const Span& own, Span (&of_warp)[kWarps]) {
  const int warp = arch::warp_index();  // executed by all lanes
  const Span span = span_of_warp(own);
  if (arch::lane_index() == 0) of_warp[warp] = span;
  arch::syncthreads();
  Span all;
  HOPWELL_UNROLL
  for (const Span& other : of_warp) all = all.with(other);
  return all;
}

// Work of a CTA: keys from first_key on, and tiles of whole queries.
struct ScorePart {
  int first_key;
  Span tiles;
};

// The keys from the first to the last that any of the current queries sees. Executed by all threads.
template <int kWarps>
HOPWELL_DEVICE Span visible_to_pass(const ScoreTask& p, Span (&of_warp)[kWarps]) {
  Span keys;
  for (int query = arch::thread_index(); query < p.queries; query += 32 * kWarps)
    keys = keys.with(visible_to(p, query));
  return span_of_cta(keys, of_warp);
}

// The groups of tiles from the first to the last with a query that sees any of the keys. Executed by all threads.
template <int kKeys, int kWarps>
HOPWELL_DEVICE Span groups_that_see(const ScoreTask& p, int first_key, Span (&of_warp)[kWarps]) {
  Span queries;
  for (int query = arch::thread_index(); query < p.queries; query += 32 * kWarps)
    if (visible_to(p, query).overlaps(first_key, kKeys)) queries = queries.with({query, query + 1});
  queries = span_of_cta(queries, of_warp);
  if (queries.empty()) return {};
  return {queries.first / p.queries_per_tile, (queries.end - 1) / p.queries_per_tile + 1};
}

// Keys from first_key on, and a slice of `each` tiles.
HOPWELL_DEVICE ScorePart part_of(int first_key, const Span& tiles, int slice, int each) {
  const int first = tiles.first + slice * each, end = first + each;
  return {first_key, {first, end < tiles.end ? end : tiles.end}};
}

// The work of this CTA if every query sees all keys.
template <int kKeys>
HOPWELL_DEVICE ScorePart part_of_grid(const ScoreTask& p) {
  const int number = arch::block_index(), slice = number / p.key_blocks;
  return part_of((number - slice * p.key_blocks) * kKeys, {0, p.tiles}, slice, p.tiles_per_slice);
}

// The work of this CTA if queries may not see all keys; executed by all threads. groups_per_slice(blocks of keys,
// groups of tiles) is the function that the plan of the grid used.
template <int kKeys, int kWarps, class GroupsPerSlice>
HOPWELL_DEVICE ScorePart visible_part_of_grid(const ScoreTask& p, Span (&of_warp)[2][kWarps],
                                              GroupsPerSlice groups_per_slice) {
  constexpr int kSectorScores = 8;
  using tile::ceil_div;
  const int number = arch::block_index(), groups = p.tiles / p.tiles_per_query;
  const Span keys = visible_to_pass(p, of_warp[0]);
  if (keys.empty()) return {};
  const int first = keys.first & -kSectorScores, blocks = ceil_div(keys.end - first, kKeys);
  const int room = arch::grid_size() / blocks, wanted = ceil_div(groups, groups_per_slice(blocks, groups));
  const int slices = wanted < room ? wanted : room, slice = number / blocks;
  if (slice >= slices) return {};
  const int first_key = first + (number - slice * blocks) * kKeys;
  const Span seeing = groups_that_see<kKeys>(p, first_key, of_warp[1]);
  if (seeing.empty()) return {};
  return part_of(first_key, {seeing.first * p.tiles_per_query, seeing.end * p.tiles_per_query}, slice,
                 ceil_div(seeing.end - seeing.first, slices) * p.tiles_per_query);
}

// Parameters for `count` queries from `first` on, whose scores go to the workspace.
inline ScoreTask score_task(const Problem& problem, const ScorePlan& plan, void* workspace, std::int64_t first,
                            std::int64_t count) {
  ScoreTask p{plan.queries};
  p.weights = problem.weights.data, p.weights_stride = problem.weights.stride[0];
  p.weights_bf16 = problem.weights.dtype == DType::kBFloat16;
  p.q_scale = problem.q_scale.as<const float>(), p.k_scale = problem.k_scale.as<const float>();
  p.q_scale_stride = problem.q_scale ? problem.q_scale.stride[0] : 0;
  p.k_scale_stride = problem.k_scale ? problem.k_scale.stride[0] : 0;
  p.masked = masked(problem), p.visibility = problem.visibility;
  p.scores = static_cast<float*>(workspace);
  p.first_query = first, p.pitch = problem.s_kv;
  p.queries = static_cast<int>(count);
  p.heads = static_cast<int>(problem.h_index), p.s_kv = static_cast<int>(problem.s_kv);
  p.key_blocks = plan.key_blocks, p.sms = problem.device.sms;
  return p;
}

}  // namespace hopwell::ops::lightning_indexer::HOPWELL_TARGET
