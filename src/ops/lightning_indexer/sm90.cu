// lightning_indexer for Hopper: list of kernels.
//
//     score_keys                scores of some queries and all keys                              sm90/score.hpp
//     select_keys_in_cluster    the best keys of each query, for few queries with long rows;     cluster_select.hpp
//                               then the next queries
//     select_keys_by_guess      … for other rows of at least 4,096 keys                          sampled_select.hpp
//     select_keys               … for shorter rows, and rows too long for the others             select.hpp
#include "ops/lightning_indexer/cluster_select.hpp"
#include "ops/lightning_indexer/sm90/score.hpp"

namespace hopwell::ops::lightning_indexer::HOPWELL_TARGET {
namespace {

runtime::Support supports(const Problem& p) {
  using runtime::Support;
  if (p.q.dtype == DType::kFloat32) return Support::no("q_index and k_index must be bfloat16 or float8_e4m3fn");
  if (!tile::can_map(p.q, {0, 1})) return Support::no("q_index must have rows of 16-byte pieces");
  if (!tile::can_map(p.k, {0})) return Support::no("k_index must have rows of 16-byte pieces");
  const char* refused = refused_on_gpus(p, p.topk);
  return refused == nullptr ? Support{} : Support::no(refused);
}

void launch(const Problem& problem, Stream stream) {
  for_each_pass(problem, [&](std::int64_t first, std::int64_t count) {
    const auto score = problem.q.dtype == DType::kBFloat16 ? launch_score<arch::bf16> : launch_score<arch::e4m3>;
    if (problem.s_kv > 0) score(problem, first, count, stream);
    launch_cluster_select(problem, first, count, stream);
  });
}

const runtime::Registration<Problem> backend{
    {.name = runtime::kBackend, .supports = supports, .workspace_bytes = workspace_bytes, .launch = launch}};

}  // namespace
}  // namespace hopwell::ops::lightning_indexer::HOPWELL_TARGET
