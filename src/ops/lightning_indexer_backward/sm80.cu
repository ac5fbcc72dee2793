// lightning_indexer_backward by mma.sync, for any NVIDIA GPU from Ampere on: list of kernels.
//
//     lightning_indexer_bwd_clear_d_k          passes.hpp
//     lightning_indexer_bwd_score_sm80         sm80/score.hpp: scores, g and the loss
//     lightning_indexer_bwd_gradients_sm80     sm80/gradients.hpp: dq, dw, and each query's contribution to dk
//     lightning_indexer_bwd_postprocess_d_k    passes.hpp
//     lightning_indexer_bwd_sum_losses         passes.hpp
#include <algorithm>

#include "ops/lightning_indexer_backward/passes.hpp"
#include "ops/lightning_indexer_backward/sm80/gradients.hpp"
#include "ops/lightning_indexer_backward/sm80/score.hpp"

namespace hopwell::ops::lightning_indexer_backward::HOPWELL_TARGET {
namespace {

runtime::PlanOr<Plan> plan_pass(const PassProblem& p) {
  const std::size_t shared =
      p.q.dtype == DType::kBFloat16 ? sizeof(GradientStorage<bf16>) : sizeof(GradientStorage<float>);
  if (shared > p.device.shared_bytes)
    return runtime::Unsupported{"needs " + std::to_string(shared) +
                                " bytes of shared memory per CTA for this q_index dtype"};
  if (const char* reason = unsupported_on_gpus(p, p.topk)) return runtime::Unsupported{reason};
  return plan_of(p);
}

template <class T, bool kRelu>
void launch_as(const PassProblem& problem, const Plan& plan, void* workspace, Stream stream) {
  constexpr std::int64_t kEntries = ScoreConfig::kEntries;
  const auto warps =
      std::clamp<std::int64_t>((problem.topk + kEntries - 1) / kEntries, 1, std::int64_t{ScoreConfig::kMaxWarps});
  const Params<T> p = params_of<T>(problem, plan, workspace, static_cast<int>(warps));
  launch_passes(problem, plan, p, workspace, stream, [&] {
    const auto over_queries = [&](int threads, std::size_t shared_bytes) {
      return arch::LaunchShape{.grid = {static_cast<std::uint32_t>(problem.queries())},
                               .threads = static_cast<std::uint32_t>(threads),
                               .shared_bytes = shared_bytes};
    };
    runtime::launch(kName, lightning_indexer_bwd_score_sm80<T, kRelu>,
                    over_queries(32 * p.score_warps, sizeof(ScoreStorage<T>)), stream, p);
    runtime::launch(kName, lightning_indexer_bwd_gradients_sm80<T, kRelu>,
                    over_queries(GradientConfig::kThreads, sizeof(GradientStorage<T>)), stream, p);
  });
}

void launch_pass(const PassProblem& problem, const Plan& plan, void* workspace, Stream stream) {
  const bool is_bf16 = problem.q.dtype == DType::kBFloat16;
  const auto launch_it = problem.relu ? (is_bf16 ? launch_as<bf16, true> : launch_as<float, true>)
                                      : (is_bf16 ? launch_as<bf16, false> : launch_as<float, false>);
  launch_it(problem, plan, workspace, stream);
}

runtime::PlanOr<Plan> plan(const Problem& p) { return plan_pass(single_pass(p)); }
void launch(const Problem& p, const Plan& plan, void* workspace, Stream stream) {
  launch_pass(single_pass(p), plan, workspace, stream);
}

const runtime::Registration passes{runtime::kBackend, plan_pass, launch_pass};
const runtime::Registration backend{runtime::kBackend, plan, launch};

}  // namespace
}  // namespace hopwell::ops::lightning_indexer_backward::HOPWELL_TARGET
