// lightning_indexer and its backward for Hopper: what runs where.
//
//     lightning_indexer            score_keys                     scores of some queries against all keys        sm90_score.hpp
//                                  select_keys_in_cluster         the best of each; then the next queries        sm90_select.hpp
//                                  select_keys                    … of rows longer than a cluster's registers    sm80_select.hpp
//     lightning_indexer_backward   weigh_entries_by_warpgroups    scores, g and the loss                         sm90_weigh.hpp
//                                  add_gradients_by_warpgroups    dq, dw, and what each query adds to dk         sm90_gradients.hpp
//                                  what comes before and after                                                   sm80_backward.hpp
#include "arch/sm90/make_tensor_map.hpp"
#include "ops/lightning_indexer/sm80_backward_launch.hpp"
#include "ops/lightning_indexer/sm90_gradients.hpp"
#include "ops/lightning_indexer/sm90_score.hpp"
#include "ops/lightning_indexer/sm90_select.hpp"
#include "ops/lightning_indexer/sm90_weigh.hpp"

namespace hopwell::ops {
namespace lightning_indexer {
namespace {

// Whether the copy engine can read it: rows of 16-byte pieces.
bool can_copy(const View& view, std::size_t dims) {
  constexpr std::int64_t kMost = std::int64_t{1} << 38;  // elements
  bool can = reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0;
  for (std::size_t i = 0; i < dims; ++i)
    can &= view.shape[i] <= 1 || (view.stride[i] > 0 && view.stride[i] < kMost && view.stride[i] % 8 == 0);
  return can;
}

runtime::Support supports(const Problem& p) {
  if (p.q.dtype != DType::kBFloat16) return runtime::Support::no("q_index and k_index must be bfloat16");
  if (!can_copy(p.q, 2)) return runtime::Support::no("q_index must have rows of 16-byte pieces");
  if (!can_copy(p.k, 1)) return runtime::Support::no("k_index must have rows of 16-byte pieces");
  return check_sizes(p);
}

// The dimensions of a view in boxes of 64 columns and so many of the others.
arch::TensorMap map_of(const View& view, std::size_t dims, const std::uint32_t (&box)[2]) {
  arch::TensorMapRequest request{.address = view.data,
                                 .element = arch::TensorElement::bf16,
                                 .rank = to_int(static_cast<std::int64_t>(dims)) + 1,
                                 .extent = {static_cast<std::uint64_t>(view.shape[dims])},
                                 .box = {tile::kPanelColumns},
                                 .swizzle = arch::Swizzle::bytes128};
  for (std::size_t i = 1; i <= dims; ++i) {
    const std::size_t dim = dims - i;
    request.extent[i] = static_cast<std::uint64_t>(view.shape[dim]);
    request.stride_bytes[i - 1] = view.shape[dim] > 1 ? 2 * static_cast<std::uint64_t>(view.stride[dim]) : 16;
    request.box[i] = box[i - 1];
  }
  return arch::make_tensor_map(request);
}

HopperScoreParams score_params_of(const Problem& problem) {
  HopperScoreParams p{};
  p.padded_heads = 8;
  while (p.padded_heads < std::min<std::int64_t>(problem.h_index, kHeads)) p.padded_heads *= 2;
  p.queries_of_item = kHeads / p.padded_heads, p.parts = to_int(ceil_div(problem.h_index, kHeads));
  p.q = map_of(problem.q, 2, {to_count(p.padded_heads), to_count(p.queries_of_item)});
  p.k = map_of(problem.k, 1, {HopperConfig::kRows, 1});
  p.weights = problem.weights.data, p.weights_stride = problem.weights.stride[0];
  p.weights_bf16 = problem.weights.dtype == DType::kBFloat16;
  p.causality = problem.causality;
  p.scores = static_cast<float*>(problem.workspace), p.pitch = problem.s_kv;
  p.heads = to_int(problem.h_index), p.s_kv = to_int(problem.s_kv);
  return p;
}

// How many of `groups`, items of whole queries, a CTA has: so that all CTAs, `blocks` for each slice of the groups, take the
// fewest rounds of the multiprocessors by their length. Loading the keys takes a CTA as long as about four items.
std::int64_t groups_of_slice(std::int64_t blocks, std::int64_t groups, std::int64_t parts,
                             std::int64_t multiprocessors) {
  constexpr std::int64_t kItemsToBegin = 4, kRounds = 4, kMostSlices = 65535;
  std::int64_t best = groups, least = INT64_MAX;
  for (std::int64_t slices = 1; slices <= std::min({groups, kRounds * multiprocessors, kMostSlices}); ++slices) {
    const std::int64_t each = ceil_div(groups, slices);
    const std::int64_t time = ceil_div(blocks * slices, multiprocessors) * (each * parts + kItemsToBegin);
    if (time < least) best = each, least = time;
  }
  return best;
}

// Scores of `count` queries from `first` on.
void score(const Problem& problem, std::int64_t first, std::int64_t count, Stream stream) {
  HopperScoreParams p = score_params_of(problem);
  p.first_query = first, p.queries = to_int(count);
  p.items = to_int(ceil_div(count, p.queries_of_item) * p.parts);
  const std::int64_t blocks = ceil_div(problem.s_kv, HopperConfig::kKeys);
  p.items_of_slice = to_int(groups_of_slice(blocks, p.items / p.parts, p.parts, problem.device.sms)) * p.parts;
  runtime::launch(kName, problem.h_index % kHeads == 0 ? score_keys<true> : score_keys<false>,
                  {.grid = {to_count(blocks), to_count(ceil_div(p.items, p.items_of_slice))},
                   .threads = HopperConfig::kThreads,
                   .shared_bytes = sizeof(HopperScoreStorage)},
                  stream, p);
}

// Clusters of CTAs of eight warps; larger CTAs where even the largest cluster would not have room.
void select_in_cluster(const Problem& problem, std::int64_t first, std::int64_t count, Stream stream) {
  using Config = ClusterSelectConfig;
  SelectParams p = select_params_of(problem, first);
  const std::int64_t warps = std::max<std::int64_t>(ceil_div(problem.s_kv, Config::kKeysOfWarp), 1);
  std::uint32_t cluster = 1;
  while (cluster < Config::kMaxCluster && 8 * cluster < warps) cluster *= 2;
  p.warps = to_int(ceil_div(warps, cluster));
  runtime::launch(kName, select_keys_in_cluster,
                  {.grid = {to_count(count) * cluster},
                   .threads = 32 * to_count(p.warps),
                   .cluster = cluster,
                   .shared_bytes = sizeof(ClusterSelectStorage)},
                  stream, p);
}

void launch(const Problem& problem, Stream stream) {
  launch_in_turns(
      problem, [&](std::int64_t first, std::int64_t count) { score(problem, first, count, stream); },
      [&](std::int64_t first, std::int64_t count) {
        problem.s_kv <= ClusterSelectConfig::kMaxKeys ? select_in_cluster(problem, first, count, stream)
                                                      : select(problem, first, count, stream);
      });
}

const runtime::Registration<Problem> backend{{.name = HOPWELL_ON_DEVICE ? "sm90" : "emu:sm90",
                                              .supports = supports,
                                              .workspace_bytes = workspace_bytes,
                                              .launch = launch}};

}  // namespace
}  // namespace lightning_indexer

namespace lightning_indexer_backward {
namespace {

runtime::Support supports(const Problem& p) {
  using runtime::Support;
  if (p.q.dtype != DType::kBFloat16) return Support::no("q_index and k_index must be bfloat16");
  if (!lightning_indexer::rows_of<bf16>(p.q, 2).in_pieces || !lightning_indexer::rows_of<bf16>(p.k, 1).in_pieces)
    return Support::no("q_index and k_index must have rows of whole 16-byte pieces");
  if (reinterpret_cast<std::uintptr_t>(p.d_k.data) % 16 != 0 || (p.s_kv > 1 && p.d_k.stride[0] % 4 != 0))
    return Support::no("d_k_index must have rows of 16-byte pieces");
  if (p.s_q * ceil_div(p.h_index, kHeads) >= kLimit) return Support::no("s_q · h_index / 64 must be below 2^31");
  return check_sizes(p);
}

void launch(const Problem& problem, Stream stream) {
  Params<bf16> p = params_of<bf16>(problem);
  p.weigh_warps = HopperWeighConfig::kWarps;
  launch_passes(problem, p, stream, [&] {
    runtime::launch(kName, weigh_entries_by_warpgroups,
                    {.grid = {to_count(problem.s_q)},
                     .threads = HopperWeighConfig::kThreads,
                     .shared_bytes = sizeof(HopperWeighStorage)},
                    stream, p);
    runtime::launch(kName, add_gradients_by_warpgroups,
                    {.grid = {to_count(problem.s_q * ceil_div(problem.h_index, kHeads))},
                     .threads = HopperGradientConfig::kThreads,
                     .shared_bytes = sizeof(HopperGradientStorage)},
                    stream, p);
  });
}

const runtime::Registration<Problem> backend{{.name = HOPWELL_ON_DEVICE ? "sm90" : "emu:sm90",
                                              .supports = supports,
                                              .workspace_bytes = workspace_bytes,
                                              .launch = launch}};

}  // namespace
}  // namespace lightning_indexer_backward
}  // namespace hopwell::ops
