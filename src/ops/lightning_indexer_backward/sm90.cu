// lightning_indexer_backward for Hopper: list of kernels.
//
//     lightning_indexer_bwd_clear_d_k          passes.hpp
//     lightning_indexer_bwd_score_sm90         sm90/score.hpp: scores, g and the loss; signs of the products
//     lightning_indexer_bwd_gradients_sm90     sm90/gradients.hpp: dq, dw, and each query's contribution to dk
//     lightning_indexer_bwd_postprocess_d_k    passes.hpp
//     lightning_indexer_bwd_sum_losses         passes.hpp
//
// Without indices and with up to 64 heads, lightning_indexer_bwd_score_groups_sm90 and
// lightning_indexer_bwd_group_gradients_sm90 (sm90/group_*.hpp) replace the two kernels of entries.
#include "ops/lightning_indexer_backward/passes.hpp"
#include "ops/lightning_indexer_backward/sm90/group_gradients.hpp"
#include "ops/lightning_indexer_backward/sm90/group_score.hpp"
#include "tile/gpu/gather.hpp"

namespace hopwell::ops::lightning_indexer_backward::HOPWELL_TARGET {
namespace {

int entry_tiles(const Problem& p) { return static_cast<int>((p.topk + kTileEntries - 1) / kTileEntries); }

runtime::PlanOr<Plan> plan_pass(const PassProblem& p) {
  using runtime::Unsupported;
  if (p.q.dtype != DType::kBFloat16) return Unsupported{"needs bfloat16 q_index and k_index"};
  if (!tile::row_major<bf16>(p.q, 2).in_chunks || !tile::row_major<bf16>(p.k, 1).in_chunks)
    return Unsupported{"needs rows of q_index and k_index 16-byte aligned"};
  if (!tile::can_gather(p.k.data, p.s_kv, p.k.stride[0]))
    return Unsupported{"needs rows of k_index within 64 GiB, with a positive stride"};
  if (reinterpret_cast<std::uintptr_t>(p.d_k.data) % 16 != 0 || (p.s_kv > 1 && p.d_k.stride[0] % 4 != 0))
    return Unsupported{"needs rows of d_k_index 16-byte aligned"};
  if (const char* reason = unsupported_on_gpus(p, p.topk)) return Unsupported{reason};
  Plan plan = plan_of(p);
  if (p.s_q * plan.head_tiles > INT32_MAX) return Unsupported{"needs s_q · h_index / 64 below 2^31"};
  const std::int64_t words =
      plan.group_rows > 0 || !p.relu ? 0 : p.pass_queries * plan.head_tiles * entry_tiles(p) * kPositiveWords;
  plan.workspace.positive = plan.workspace_bytes;
  plan.workspace_bytes += static_cast<std::size_t>(words) * sizeof(std::uint32_t);
  return plan;
}

template <bool kRelu, int kRows>
void launch_groups(const PassProblem& problem, const Plan& plan, void* workspace, Stream stream) {
  const auto queries = static_cast<int>(problem.queries()), group = plan.group;
  const auto groups = static_cast<std::uint32_t>((queries + group - 1) / group);
  GroupParams p{params_of<bf16>(problem, plan, workspace, ScoreConfig::kWarps), queries, group, nullptr};
  p.ungrouped = runtime::at_offset<std::uint32_t>(workspace, plan.workspace.ungrouped);
  launch_passes(problem, plan, static_cast<const Params<bf16>&>(p), workspace, stream, [&] {
    runtime::launch(
        kName, lightning_indexer_bwd_score_groups_sm90<kRelu, kRows>,
        {.grid = {groups}, .threads = ScoreConfig::kThreads, .shared_bytes = sizeof(GroupScoreStorage<kRows>)}, stream,
        p);
    runtime::launch(kName, lightning_indexer_bwd_group_gradients_sm90<kRelu, kRows>,
                    {.grid = {groups},
                     .threads = GroupGradientConfig::kThreads,
                     .shared_bytes = sizeof(GroupGradientStorage<kRows>)},
                    stream, p);
  });
}

template <bool kRelu>
void launch_as(const PassProblem& problem, const Plan& plan, void* workspace, Stream stream) {
  if (plan.group_rows > 0)
    return runtime::with_constant<16, 32, 64>(
        plan.group_rows, [&]<int kRows>() { launch_groups<kRelu, kRows>(problem, plan, workspace, stream); });
  EntryParams p{params_of<bf16>(problem, plan, workspace, ScoreConfig::kWarps), nullptr, plan.head_tiles,
                entry_tiles(problem)};
  p.positive = runtime::at_offset<std::uint32_t>(workspace, plan.workspace.positive);
  const auto queries = static_cast<std::uint32_t>(problem.queries());
  launch_passes(problem, plan, static_cast<const Params<bf16>&>(p), workspace, stream, [&] {
    const bool dependent = problem.device.has_dependent_launches();
    runtime::launch(kName, lightning_indexer_bwd_score_sm90<kRelu>,
                    {.grid = {queries},
                     .threads = ScoreConfig::kThreads,
                     .shared_bytes = sizeof(ScoreStorage),
                     .programmatic_dependency = dependent && problem.first_pass() && plan.pass_ctas > 0},
                    stream, p);
    runtime::launch(kName, lightning_indexer_bwd_gradients_sm90<kRelu>,
                    {.grid = {queries * static_cast<std::uint32_t>(p.head_tiles)},
                     .threads = GradientConfig::kThreads,
                     .shared_bytes = sizeof(GradientStorage),
                     .programmatic_dependency = dependent},
                    stream, p);
  });
}

void launch_pass(const PassProblem& problem, const Plan& plan, void* workspace, Stream stream) {
  const auto launch_it = problem.relu ? launch_as<true> : launch_as<false>;
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
