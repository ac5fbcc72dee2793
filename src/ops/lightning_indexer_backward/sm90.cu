// lightning_indexer_backward for Hopper: list of kernels.
//
//     clear_d_k                  passes.hpp
//     score_entries              sm90/score.hpp: scores, g and the loss; signs of the products
//     add_gradients              sm90/gradients.hpp: dq, dw, and each query's contribution to dk
//     finish_d_k, sum_losses     passes.hpp
//
// Without indices and with up to 64 heads: score_groups and add_group_gradients, sm90/group_*.hpp, replace the two
// kernels of entries.
#include "ops/lightning_indexer_backward/passes.hpp"
#include "ops/lightning_indexer_backward/sm90/group_gradients.hpp"
#include "ops/lightning_indexer_backward/sm90/group_score.hpp"
#include "tile/gpu/gather.hpp"

namespace hopwell::ops::lightning_indexer_backward::HOPWELL_TARGET {
namespace {

runtime::Support supports(const Problem& p) {
  using runtime::Support;
  if (p.q.dtype != DType::kBFloat16) return Support::no("q_index and k_index must be bfloat16");
  if (!tile::row_major<bf16>(p.q, 2).in_chunks || !tile::row_major<bf16>(p.k, 1).in_chunks)
    return Support::no("q_index and k_index must have rows of whole 16-byte pieces");
  if (!tile::can_gather(p.k.data, p.s_kv, p.k.stride[0])) return Support::no("k_index must ascend within 64 GiB");
  if (reinterpret_cast<std::uintptr_t>(p.d_k.data) % 16 != 0 || (p.s_kv > 1 && p.d_k.stride[0] % 4 != 0))
    return Support::no("d_k_index must have rows of 16-byte pieces");
  if (const char* refused = refused_on_gpus(p, p.topk)) return Support::no(refused);
  if (p.s_q * plan_of(p).head_tiles > INT32_MAX) return Support::no("s_q · h_index / 64 must be below 2^31");
  return {};
}

int entry_tiles(const Problem& p) { return static_cast<int>((p.topk + kTileEntries - 1) / kTileEntries); }

// The workspace of all GPUs, followed by the signs of the products for ungrouped queries.
std::size_t workspace_bytes_with_positive(const Problem& p) {
  const Plan plan = plan_of(p);
  const std::int64_t words =
      plan.group_rows > 0 || !p.relu ? 0 : p.pass_queries * plan.head_tiles * entry_tiles(p) * kPositiveWords;
  return workspace_bytes(p) + static_cast<std::size_t>(words) * sizeof(std::uint32_t);
}

template <bool kRelu, int kRows>
void launch_groups(const Problem& problem, Stream stream) {
  const auto queries = static_cast<int>(problem.queries()), group = plan_of(problem).group;
  const auto groups = static_cast<std::uint32_t>((queries + group - 1) / group);
  GroupParams p{params_of<bf16>(problem, ScoreConfig::kWarps), queries, group, nullptr};
  p.apart = reinterpret_cast<std::uint32_t*>(static_cast<std::byte*>(problem.workspace) + workspace_of(problem).apart);
  launch_passes(problem, static_cast<const Params<bf16>&>(p), stream, [&] {
    runtime::launch(
        kName, score_groups<kRelu, kRows>,
        {.grid = {groups}, .threads = ScoreConfig::kThreads, .shared_bytes = sizeof(GroupScoreStorage<kRows>)}, stream,
        p);
    runtime::launch(kName, add_group_gradients<kRelu, kRows>,
                    {.grid = {groups},
                     .threads = GroupGradientConfig::kThreads,
                     .shared_bytes = sizeof(GroupGradientStorage<kRows>)},
                    stream, p);
  });
}

template <bool kRelu>
void launch_as(const Problem& problem, Stream stream) {
  switch (plan_of(problem).group_rows) {
    case 16:
      return launch_groups<kRelu, 16>(problem, stream);
    case 32:
      return launch_groups<kRelu, 32>(problem, stream);
    case 64:
      return launch_groups<kRelu, 64>(problem, stream);
    default:
      break;
  }
  EntryParams p{params_of<bf16>(problem, ScoreConfig::kWarps), nullptr, plan_of(problem).head_tiles,
                entry_tiles(problem)};
  p.positive = reinterpret_cast<std::uint32_t*>(static_cast<std::byte*>(problem.workspace) + workspace_bytes(problem));
  const auto queries = static_cast<std::uint32_t>(problem.queries());
  launch_passes(problem, static_cast<const Params<bf16>&>(p), stream, [&] {
    const bool dependent = problem.device.has_dependent_launches();
    runtime::launch(kName, score_entries<kRelu>,
                    {.grid = {queries},
                     .threads = ScoreConfig::kThreads,
                     .shared_bytes = sizeof(ScoreStorage),
                     .programmatic_dependency = dependent && problem.first_pass() && plan_of(problem).pass_ctas > 0},
                    stream, p);
    runtime::launch(kName, add_gradients<kRelu>,
                    {.grid = {queries * static_cast<std::uint32_t>(p.head_tiles)},
                     .threads = GradientConfig::kThreads,
                     .shared_bytes = sizeof(GradientStorage),
                     .programmatic_dependency = dependent},
                    stream, p);
  });
}

void launch(const Problem& problem, Stream stream) {
  if (problem.relu) return launch_as<true>(problem, stream);
  launch_as<false>(problem, stream);
}

const runtime::Registration<Problem> backend{{.name = runtime::kBackend,
                                              .supports = supports,
                                              .workspace_bytes = workspace_bytes_with_positive,
                                              .launch = launch}};

}  // namespace
}  // namespace hopwell::ops::lightning_indexer_backward::HOPWELL_TARGET
