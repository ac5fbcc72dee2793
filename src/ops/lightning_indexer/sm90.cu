// lightning_indexer for Hopper: what runs where.
//
//     score_keys                scores of some queries against all keys                     sm90/score.hpp
//     select_keys_in_cluster    the best of each, of few queries of long rows; then the     cluster_select.hpp
//                               next queries
//     select_keys_by_guess      … of other rows from 4,096 keys on                          sampled_select.hpp
//     select_keys               … of shorter rows, and of those too long for the others     select.hpp
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
