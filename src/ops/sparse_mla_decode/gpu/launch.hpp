// sparse_mla_decode on GPUs by splits: supported problems, plan and launches.
//
// A CTA of the split kernel has a tile of a query's heads, and one split of the query or several. The CTAs of a split's
// head tiles run at about the same time, and share its rows in L2. A CTA without a valid entry stores its statistics
// alone, so that a query without entries costs little, and one long row is spread over the GPU. For a tile of heads:
//
//     one CTA has all splits   it merges them and writes the output
//     several CTAs             the first merges its splits, and stores the result as split 0, and statistics without
//                              keys for its others; each other CTA stores a partial result of each of its splits. The
//                              merge kernel follows
//     a cluster                one split a CTA, on Hopper and for few queries: the CTAs merge their results
//
// A kernel that does not merge (SplitKernel::merges) stores a partial result of each split, unless the query has one.
// Splits merge in the same order whatever CTAs have them, with the same bits. Partial results are stored for a limited
// number of queries at a time, so that the workspace does not grow with b.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "ops/sparse_mla_decode/gpu/kernels.hpp"
#include "ops/sparse_mla_decode/gpu/merge.hpp"
#include "runtime/launch.hpp"
#include "runtime/workspace.hpp"
#include "tile/ceil_div.hpp"
#include "tile/gpu/e4m3.hpp"
#include "tile/gpu/views.hpp"
#include "tile/log2_scale.hpp"

namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET {

struct SplitPlan {
  SplitKernel kernel;
  int heads = 0;                    // of a tile
  std::int64_t head_tiles = 0;      // of a query
  std::int64_t splits_of_keys = 0;  // of a query in the first cache
  std::int64_t splits = 0;          // of a query
  SplitsOfCtas distribution;
  std::int64_t ctas_of_query = 0;    // for a tile of heads
  std::int64_t queries_at_once = 0;  // of a launch
  std::size_t stats = 0, out = 0;    // offsets in the workspace
  std::size_t workspace_bytes = 0;

  [[nodiscard]] bool needs_merge_kernel() const {
    return splits > 1 && !(kernel.merges && ctas_of_query == 1) && !distribution.in_cluster;
  }
};

// Why the split kernel does not support a problem, or null.
inline const char* unsupported_by_splits(const Problem& p) {
  if (p.q.dtype != DType::kBFloat16) return "needs q of bfloat16";
  if (!p.format && p.row_type != DType::kBFloat16) return "needs a cache of bfloat16 or of bytes";
  if (p.d_qk != 576 && p.d_qk != 512) return "needs d_qk 576 or 512";
  if (p.d_v != kDv) return "needs d_v 512";
  if (!tile::rows_aligned(p.q, 3, 4)) return "needs rows of q 4-byte aligned";
  if (!tile::rows_aligned(p.out, 3, 4)) return "needs rows of out 4-byte aligned";
  if (!p.keys.cache.aligned(16) || (p.extra && !p.extra->cache.aligned(16)) ||
      (p.rope_cache && !p.rope_cache->aligned(16)))
    return "needs base and block stride of cache in multiples of 16 bytes";
  return nullptr;
}

// The kernel that a backend has for a problem, and the heads of its tile.
struct HeadsOfTile {
  int heads;
  SplitKernel kernel;
};

// kernel_for: the backend's choice.
inline runtime::PlanOr<SplitPlan> plan_splits(const Problem& p, HeadsOfTile (*kernel_for)(const Problem&)) {
  using runtime::Unsupported;
  if (const char* reason = unsupported_by_splits(p)) return Unsupported{reason};
  SplitPlan plan;
  const auto splits_of = [&](const Keys& keys) {  // not by ceil_div, because keys_per_split may be almost 2^63
    const std::int64_t topk = keys.selection.topk;
    return topk / p.keys_per_split + (topk % p.keys_per_split != 0 ? 1 : 0);
  };
  plan.splits_of_keys = std::max<std::int64_t>(splits_of(p.keys), 1);
  plan.splits = plan.splits_of_keys + (p.extra ? splits_of(*p.extra) : 0);
  const HeadsOfTile tile = kernel_for(p);
  plan.heads = tile.heads, plan.kernel = tile.kernel;
  plan.head_tiles = tile::ceil_div(p.h_q, plan.heads);
  const std::int64_t queries = p.b * p.q_len;
  if (!runtime::fit_in_ints({queries, p.h_q, plan.splits * plan.head_tiles, plan.splits * p.h_q}))
    return Unsupported{"needs b · q_len, h_q and h_q times the number of splits below 2^31 - 1024"};
  if (plan.kernel.clocks) {
    const std::int64_t topk = std::max(p.keys.selection.topk, p.extra ? p.extra->selection.topk : 0);
    const bool can_merge = plan.kernel.clusters_that_fit != nullptr && plan.splits > 1 && plan.splits <= kMostOfCluster;
    plan.distribution =
        distribute_splits({.queries = queries,
                           .h_q = p.h_q,
                           .head_tiles = plan.head_tiles,
                           .splits = plan.splits,
                           .keys_of_split = std::min(p.keys_per_split, topk),
                           .sms = p.device.sms,
                           .clusters = can_merge ? plan.kernel.clusters_that_fit(p.device, plan.splits) : 0,
                           .merges = plan.kernel.merges},
                          *plan.kernel.clocks);
  }
  plan.ctas_of_query = tile::ceil_div(plan.splits, plan.distribution.splits_of_cta);
  const std::int64_t ctas_of_query = plan.ctas_of_query * plan.head_tiles;
  constexpr std::int64_t kMostCtas = (std::int64_t{1} << 31) - 1;
  plan.queries_at_once = std::min({queries, kMostCtas / std::max(ctas_of_query, p.h_q)});
  if (!plan.needs_merge_kernel()) return plan;
  const std::int64_t of_workspace = p.device.sms * std::min<std::int64_t>(p.h_q, 64) / p.h_q;
  plan.queries_at_once = std::min(plan.queries_at_once, std::max<std::int64_t>(of_workspace, 1));
  const std::int64_t partials = plan.queries_at_once * plan.splits * p.h_q;
  runtime::WorkspaceLayout layout;
  plan.stats = layout.reserve(partials * static_cast<std::int64_t>(sizeof(Stats)));
  plan.out = layout.reserve(partials * kDv * static_cast<std::int64_t>(sizeof(float)));
  plan.workspace_bytes = layout.bytes;
  return plan;
}

inline SplitParams split_params(const Problem& problem, const SplitPlan& plan, void* workspace) {
  SplitParams p{};
  p.keys = problem.keys, p.extra = problem.extra.value_or(problem.keys);
  if (problem.rope_cache) p.rope_cache = *problem.rope_cache;
  p.q = problem.q.as<const bf16>();
  p.out = problem.out.data;
  p.lse = problem.lse.as<float>();
  p.attn_sink = problem.attn_sink.as<const float>(), p.sink_stride = problem.attn_sink.stride[0];
  p.kv_scale = problem.kv_scale, p.kv_scale_value = problem.kv_scale_value;
  for (std::size_t i = 0; i < 3; ++i) {
    p.q_stride[i] = problem.q.stride[i], p.out_stride[i] = problem.out.stride[i];
    p.lse_stride[i] = problem.lse ? problem.lse.stride[i] : 0;
  }
  p.scale_log2 = tile::log2_scale(problem.sm_scale);
  p.out_is_fp32 = problem.out.dtype == DType::kFloat32;
  p.h_q = static_cast<int>(problem.h_q), p.head_tiles = static_cast<int>(plan.head_tiles);
  p.q_len = static_cast<int>(problem.q_len);
  p.block = static_cast<int>(p.keys.cache.block), p.extra_block = static_cast<int>(p.extra.cache.block);
  p.splits = static_cast<int>(plan.splits), p.splits_of_keys = static_cast<int>(plan.splits_of_keys);
  p.ctas_of_query = static_cast<int>(plan.ctas_of_query);
  p.splits_of_cta = static_cast<int>(plan.distribution.splits_of_cta);
  p.merges_in_cluster = plan.distribution.in_cluster;
  p.keys_per_split = problem.keys_per_split;
  p.partial_stats = runtime::at_offset<arch::Words2>(workspace, plan.stats);
  p.partial_out = runtime::at_offset<float>(workspace, plan.out);
  return p;
}

inline void launch_splits(const Problem& problem, const SplitPlan& plan, void* workspace, Stream stream) {
  constexpr const char* kName = "sparse_mla_decode";
  const std::int64_t queries = problem.b * problem.q_len;
  SplitParams p = split_params(problem, plan, workspace);
  for (std::int64_t first = 0; first < queries; first += plan.queries_at_once) {
    const std::int64_t count = std::min(plan.queries_at_once, queries - first);
    p.first_query = static_cast<int>(first);
    arch::LaunchShape shape = runtime::shape_of_ctas(count * plan.ctas_of_query * plan.head_tiles, plan.kernel.threads,
                                                     plan.kernel.shared_bytes);
    if (plan.distribution.in_cluster) shape.cluster = static_cast<std::uint32_t>(plan.ctas_of_query);
    runtime::launch(kName, plan.kernel.kernel, shape, stream, p);
    if (!plan.needs_merge_kernel()) continue;
    arch::LaunchShape merge = runtime::shape_of_ctas(count * problem.h_q, MergeConfig::kThreads);
    merge.programmatic_dependency = problem.device.has_dependent_launches();
    runtime::launch(kName, sparse_mla_decode_merge, merge, stream, p);
  }
}

}  // namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET
