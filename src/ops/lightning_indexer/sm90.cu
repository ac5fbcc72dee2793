// lightning_indexer for Hopper: list of kernels.
//
//     lightning_indexer_score_sm90        scores of some queries and all keys
//     lightning_indexer_select_cluster    the best keys of each query, for few queries
//     lightning_indexer_select_sampled    … for other rows of at least 4,096 keys
//     lightning_indexer_select            … for shorter rows
//
// The four run again for the next queries. Their files are sm90/score.hpp, cluster_select.hpp, sampled_select.hpp and
// select.hpp. The selection runs twice for very long rows: see long_select.hpp.
#include "ops/lightning_indexer/cluster_select.hpp"
#include "ops/lightning_indexer/long_select.hpp"
#include "ops/lightning_indexer/sm90/score.hpp"

namespace hopwell::ops::lightning_indexer::HOPWELL_TARGET {
namespace {

runtime::PlanOr<Plan> plan(const Problem& p) {
  using runtime::Unsupported;
  if (p.q.dtype == DType::kFloat32) return Unsupported{"needs bfloat16 or float8_e4m3fn q_index and k_index"};
  if (!tile::can_map(p.q, {0, 1})) return Unsupported{"needs rows of q_index 16-byte aligned, with positive strides"};
  if (!tile::can_map(p.k, {0})) return Unsupported{"needs rows of k_index 16-byte aligned, with positive strides"};
  if (const char* reason = unsupported_on_gpus(p, p.topk)) return Unsupported{reason};
  return plan_of(p);
}

void launch(const Problem& problem, const Plan& plan, void* workspace, Stream stream) {
  for_each_pass(problem, plan, [&](std::int64_t first, std::int64_t count) {
    const auto score = problem.q.dtype == DType::kBFloat16 ? launch_score<arch::bf16> : launch_score<arch::e4m3>;
    if (problem.s_kv > 0) score(problem, workspace, first, count, stream);
    select_in_rounds(
        problem, plan, workspace, count,
        [&](const SelectPlan& select) { return select_params(problem, workspace, first, select); },
        [&](const Problem& of, std::int64_t rows, auto params) {
          launch_cluster_select(kName, of, rows, stream, params);
        });
  });
}

const runtime::Registration backend{runtime::kBackend, plan, launch};

}  // namespace
}  // namespace hopwell::ops::lightning_indexer::HOPWELL_TARGET
