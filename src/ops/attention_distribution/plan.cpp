#include "ops/attention_distribution/plan.hpp"

#include <algorithm>

namespace hopwell::ops::attention_distribution {

// Rows that are normalised stay whole: one warp adds them up.
Plan plan_of(const Problem& problem) {
  const int s_q = static_cast<int>(problem.s_q), topk = static_cast<int>(problem.topk), sms = problem.device.sms;
  const int rest = s_q % sms;
  Plan plan{.whole_queries = s_q - rest,
            .splits = 1,
            .split_entries = topk,
            .work_tiles = s_q,
            .ctas = 0,
            .alternate = problem.h_q <= kTileHeads};
  if (rest > 0 && !problem.normalize_l1) {
    const int tiles = (topk + kTileKeys - 1) / kTileKeys, most = std::min(sms / rest, tiles);
    const int split_tiles = (tiles + most - 1) / most;
    plan.splits = (tiles + split_tiles - 1) / split_tiles;
    plan.split_entries = split_tiles * kTileKeys;
    plan.work_tiles = plan.whole_queries + rest * plan.splits;
  }
  plan.ctas = std::min(plan.work_tiles, sms);
  return plan;
}

}  // namespace hopwell::ops::attention_distribution
