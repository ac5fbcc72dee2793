// lightning_indexer by mma.sync, for any NVIDIA GPU from Ampere on: list of kernels.
//
//     lightning_indexer_score_sm80    scores of some queries and all keys, to the workspace    sm80/score.hpp
//     lightning_indexer_select        the best keys of each query; then the next queries       select.hpp
//
// The selection runs twice for very long rows: see long_select.hpp.
#include "ops/lightning_indexer/long_select.hpp"
#include "ops/lightning_indexer/sm80/score.hpp"

namespace hopwell::ops::lightning_indexer::HOPWELL_TARGET {
namespace {

runtime::PlanOr<Plan> plan(const Problem& p) {
  if (const char* reason = unsupported_on_gpus(p, p.topk)) return runtime::Unsupported{reason};
  return plan_of(p);
}

void launch(const Problem& problem, const Plan& plan, void* workspace, Stream stream) {
  for_each_pass(problem, plan, [&](std::int64_t first, std::int64_t count) {
    if (problem.s_kv > 0) {
      const auto score = problem.q.dtype == DType::kBFloat16     ? launch_score<arch::bf16>
                         : problem.q.dtype == DType::kFloat8E4m3 ? launch_score<arch::e4m3>
                                                                 : launch_score<float>;
      score(problem, workspace, first, count, stream);
    }
    select_in_rounds(
        problem, plan, workspace, count,
        [&](const SelectPlan& select) { return select_params(problem, workspace, first, select); },
        [&](const Problem& of, std::int64_t rows, auto params) { launch_select(kName, of, rows, stream, params); });
  });
}

const runtime::Registration backend{runtime::kBackend, plan, launch};

}  // namespace
}  // namespace hopwell::ops::lightning_indexer::HOPWELL_TARGET
