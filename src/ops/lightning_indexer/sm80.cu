// lightning_indexer by mma.sync, for any NVIDIA GPU from Ampere on: list of kernels.
//
//     score_keys     scores of some queries and all keys, to the workspace     sm80/score.hpp
//     select_keys    the best keys of each query; then the next queries        select.hpp
#include "ops/lightning_indexer/select.hpp"
#include "ops/lightning_indexer/sm80/score.hpp"

namespace hopwell::ops::lightning_indexer::HOPWELL_TARGET {
namespace {

runtime::Support supports(const Problem& p) {
  const char* refused = refused_on_gpus(p, p.topk);
  return refused == nullptr ? runtime::Support{} : runtime::Support::no(refused);
}

void launch(const Problem& problem, Stream stream) {
  for_each_pass(problem, [&](std::int64_t first, std::int64_t count) {
    if (problem.s_kv > 0) {
      const auto score = problem.q.dtype == DType::kBFloat16     ? launch_score<arch::bf16>
                         : problem.q.dtype == DType::kFloat8E4m3 ? launch_score<arch::e4m3>
                                                                 : launch_score<float>;
      score(problem, first, count, stream);
    }
    launch_select(problem, first, count, stream);
  });
}

const runtime::Registration<Problem> backend{
    {.name = runtime::kBackend, .supports = supports, .workspace_bytes = workspace_bytes, .launch = launch}};

}  // namespace
}  // namespace hopwell::ops::lightning_indexer::HOPWELL_TARGET
