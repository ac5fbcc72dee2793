// lightning_indexer_backward by mma.sync, for any NVIDIA GPU from Ampere on: list of kernels.
//
//     clear_d_k                  passes.hpp
//     score_entries              sm80/score.hpp: scores, g and the loss
//     add_gradients              sm80/gradients.hpp: dq, dw, and each query's contribution to dk
//     finish_d_k, sum_losses     passes.hpp
#include <algorithm>

#include "ops/lightning_indexer_backward/passes.hpp"
#include "ops/lightning_indexer_backward/sm80/gradients.hpp"
#include "ops/lightning_indexer_backward/sm80/score.hpp"

namespace hopwell::ops::lightning_indexer_backward::HOPWELL_TARGET {
namespace {

runtime::Support supports(const Problem& p) {
  const std::size_t shared =
      p.q.dtype == DType::kBFloat16 ? sizeof(GradientStorage<bf16>) : sizeof(GradientStorage<float>);
  if (shared > p.device.shared_bytes)
    return runtime::Support::no("q_index in this dtype needs " + std::to_string(shared) +
                                " bytes of shared memory a CTA");
  const char* refused = refused_on_gpus(p, p.topk);
  return refused == nullptr ? runtime::Support{} : runtime::Support::no(refused);
}

template <class T, bool kRelu>
void launch_as(const Problem& problem, Stream stream) {
  constexpr std::int64_t kEntries = ScoreConfig::kEntries;
  const auto warps =
      std::clamp<std::int64_t>((problem.topk + kEntries - 1) / kEntries, 1, std::int64_t{ScoreConfig::kMaxWarps});
  const Params<T> p = params_of<T>(problem, static_cast<int>(warps));
  launch_passes(problem, p, stream, [&] {
    const auto over_queries = [&](int threads, std::size_t shared_bytes) {
      return arch::LaunchShape{.grid = {static_cast<std::uint32_t>(problem.queries())},
                               .threads = static_cast<std::uint32_t>(threads),
                               .shared_bytes = shared_bytes};
    };
    runtime::launch(kName, score_entries<T, kRelu>, over_queries(32 * p.score_warps, sizeof(ScoreStorage<T>)), stream,
                    p);
    runtime::launch(kName, add_gradients<T, kRelu>, over_queries(GradientConfig::kThreads, sizeof(GradientStorage<T>)),
                    stream, p);
  });
}

void launch(const Problem& problem, Stream stream) {
  const bool is_bf16 = problem.q.dtype == DType::kBFloat16;
  if (problem.relu) return is_bf16 ? launch_as<bf16, true>(problem, stream) : launch_as<float, true>(problem, stream);
  return is_bf16 ? launch_as<bf16, false>(problem, stream) : launch_as<float, false>(problem, stream);
}

const runtime::Registration<Problem> backend{
    {.name = runtime::kBackend, .supports = supports, .workspace_bytes = workspace_bytes, .launch = launch}};

}  // namespace
}  // namespace hopwell::ops::lightning_indexer_backward::HOPWELL_TARGET
