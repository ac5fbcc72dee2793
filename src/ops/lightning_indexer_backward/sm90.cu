// lightning_indexer_backward for Hopper: what runs where.
//
//     clear_d_k                  passes.hpp
//     score_entries              sm90/score.hpp: scores, g and the loss
//     add_gradients              sm90/gradients.hpp: dq, dw, and what each query adds to dk
//     finish_d_k, sum_losses     passes.hpp
#include "ops/lightning_indexer_backward/passes.hpp"
#include "ops/lightning_indexer_backward/sm90/gradients.hpp"
#include "ops/lightning_indexer_backward/sm90/score.hpp"

namespace hopwell::ops::lightning_indexer_backward::HOPWELL_TARGET {
namespace {

runtime::Support supports(const Problem& p) {
  using runtime::Support;
  if (p.q.dtype != DType::kBFloat16) return Support::no("q_index and k_index must be bfloat16");
  if (!tile::row_major<bf16>(p.q, 2).in_chunks || !tile::row_major<bf16>(p.k, 1).in_chunks)
    return Support::no("q_index and k_index must have rows of whole 16-byte pieces");
  if (reinterpret_cast<std::uintptr_t>(p.d_k.data) % 16 != 0 || (p.s_kv > 1 && p.d_k.stride[0] % 4 != 0))
    return Support::no("d_k_index must have rows of 16-byte pieces");
  if (const char* refused = refused_on_gpus(p, p.topk)) return Support::no(refused);
  if (p.s_q * plan_of(p).head_tiles > INT32_MAX) return Support::no("s_q · h_index / 64 must be below 2^31");
  return {};
}

template <bool kRelu>
void launch_as(const Problem& problem, Stream stream) {
  const Params<bf16> p = params_of<bf16>(problem, ScoreConfig::kWarps);
  const auto queries = static_cast<std::uint32_t>(problem.queries());
  launch_passes(problem, p, stream, [&] {
    runtime::launch(kName, score_entries<kRelu>,
                    {.grid = {queries}, .threads = ScoreConfig::kThreads, .shared_bytes = sizeof(ScoreStorage)}, stream,
                    p);
    runtime::launch(kName, add_gradients<kRelu>,
                    {.grid = {queries * static_cast<std::uint32_t>(plan_of(problem).head_tiles)},
                     .threads = GradientConfig::kThreads,
                     .shared_bytes = sizeof(GradientStorage)},
                    stream, p);
  });
}

void launch(const Problem& problem, Stream stream) {
  if (problem.relu) return launch_as<true>(problem, stream);
  launch_as<false>(problem, stream);
}

const runtime::Registration<Problem> backend{{.name = HOPWELL_ON_DEVICE ? "sm90" : "emu:sm90",
                                              .supports = supports,
                                              .workspace_bytes = workspace_bytes,
                                              .launch = launch}};

}  // namespace
}  // namespace hopwell::ops::lightning_indexer_backward::HOPWELL_TARGET
