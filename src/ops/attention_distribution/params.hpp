// attention_distribution on GPUs: kernel parameters of every backend.
#pragma once

#include <cmath>

#include "arch/sm80/convert.hpp"
#include "arch/sm80/threads.hpp"
#include "ops/attention_distribution/plan.hpp"
#include "runtime/launch.hpp"
#include "tile/gpu/entries.hpp"
#include "tile/gpu/numbers.hpp"
#include "tile/gpu/throttle.hpp"
#include "tile/log2_scale.hpp"

namespace hopwell::ops::attention_distribution::HOPWELL_TARGET {

using arch::bf16;
using tile::Entries;

struct Params {
  tile::SelectionParams selection;
  const bf16 *q, *kv;                           // [s_q, h_q, d_qk], [s_kv, d_qk]
  const float* lse;                             // [s_q, h_q]
  const float* sink;                            // [h_q], or null
  float* attn;                                  // [s_q, topk]
  int64_t q_stride_s, q_stride_h, kv_stride_s;  // elements
  int64_t lse_stride_s, lse_stride_h, sink_stride, attn_stride;
  int h_q, d_qk;
  bool aligned;  // rows of q and kv are 16-byte aligned
  bool normalize_l1;
  float scale_log2;  // sm_scale · log2(e)
  Plan plan;
  const uint16_t* sources;  // [s_q, topk]: destination of an entry's sum, if rows are sorted by key
  tile::Throttle throttle;
};

HOPWELL_DEVICE Entries entries_of(const Params& p, const WorkTile& work) {
  return tile::entries_of(p.selection, work.query).slice(work.first, work.size);
}
// Number of times that all keys are read: once per 128 heads.
HOPWELL_DEVICE int head_passes(const Params& p) { return (p.h_q + kHeadsAtATime - 1) / kHeadsAtATime; }

// lse of a head, in units of log 2; with a sink log2(exp(lse) + exp(attn_sink)). Padding heads get +inf, so that their
// exponentials are 0.
HOPWELL_DEVICE float lse_of(const Params& p, int64_t query, int head) {
  if (head >= p.h_q) return INFINITY;
  const float lse = p.lse[query * p.lse_stride_s + head * p.lse_stride_h] * tile::kLog2E;
  const float sink = p.sink ? p.sink[head * p.sink_stride] * tile::kLog2E : -INFINITY;
  if (sink == -INFINITY || lse == INFINITY) return lse;
  const float high = lse > sink ? lse : sink, low = lse > sink ? sink : lse;
  return high == INFINITY ? INFINITY : high + arch::log2_approx(1 + arch::exp2_approx(low - high));
}

// Calls function for each pass over the heads of a CTA's work tiles, if the tile has anything to multiply. All roles
// use it, so that they process the same items in the same order: per pass, items of queries, then of keys.
template <class Function>
HOPWELL_DEVICE void for_each_pass(const Params& p, const Function& function) {
  HOPWELL_NO_UNROLL
  for (int number = arch::block_index(); number < p.plan.work_tiles; number += arch::grid_size()) {
    const WorkTile work = work_tile_of(p.plan, p.selection.topk, number);
    const Entries entries = entries_of(p, work);
    const int tiles = entries.tiles(kTileKeys);
    HOPWELL_NO_UNROLL
    for (int pass = 0; pass < head_passes(p) && tiles > 0; ++pass) function(work.query, entries, tiles, pass);
  }
}

inline bool sizes_fit(const Problem& p) { return runtime::fit_in_ints({p.s_q, p.s_kv, p.topk, p.h_q}); }
constexpr const char* kSizesThatFit = "needs s_q, s_kv, topk and h_q below 2^31 - 1024";

inline Params params_of(const Problem& problem, const Plan& plan) {
  Params p{};
  p.selection = tile::params_of(problem.selection);
  p.q = problem.q.as<const bf16>();
  p.kv = problem.kv.as<const bf16>();
  p.lse = problem.lse.as<const float>();
  p.sink = problem.attn_sink.as<const float>();
  p.attn = problem.attn.as<float>();
  p.q_stride_s = problem.q.stride[0], p.q_stride_h = problem.q.stride[1], p.kv_stride_s = problem.kv.stride[0];
  p.lse_stride_s = problem.lse.stride[0], p.lse_stride_h = problem.lse.stride[1],
  p.sink_stride = problem.attn_sink ? problem.attn_sink.stride[0] : 0, p.attn_stride = problem.attn.stride[0];
  p.h_q = static_cast<int>(problem.h_q), p.d_qk = static_cast<int>(problem.d_qk);
  p.normalize_l1 = problem.normalize_l1;
  p.scale_log2 = tile::log2_scale(problem.sm_scale);
  p.plan = plan;
  return p;
}

}  // namespace hopwell::ops::attention_distribution::HOPWELL_TARGET
