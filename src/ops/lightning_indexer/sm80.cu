// lightning_indexer and its backward by mma.sync, for any NVIDIA GPU from Ampere on: what runs where.
//
//     lightning_indexer            score_keys     scores of some queries against all keys, to the workspace   sm80_score.hpp
//                                  select_keys    the best of each query; then the next queries               sm80_select.hpp
//     lightning_indexer_backward   what its five kernels do                                                   sm80_backward.hpp
#include "ops/lightning_indexer/sm80_backward_launch.hpp"
#include "ops/lightning_indexer/sm80_gradients.hpp"
#include "ops/lightning_indexer/sm80_score.hpp"

namespace hopwell::ops {
namespace {

constexpr const char* kBackend = HOPWELL_ON_DEVICE ? "sm80" : "emu:sm80";

}  // namespace

namespace lightning_indexer {
namespace {

runtime::Support supports(const Problem& p) { return check_sizes(p); }

template <class T>
ScoreParams<T> score_params_of(const Problem& problem) {
  ScoreParams<T> p{};
  p.q = rows_of<T>(problem.q, 2), p.k = rows_of<T>(problem.k, 1);
  p.q_stride = problem.q.stride[0];
  p.weights = problem.weights.data, p.weights_stride = problem.weights.stride[0];
  p.weights_bf16 = problem.weights.dtype == DType::kBFloat16;
  p.causality = problem.causality;
  p.scores = static_cast<float*>(problem.workspace), p.pitch = problem.s_kv;
  p.heads = to_int(problem.h_index), p.s_kv = to_int(problem.s_kv);
  p.padded_heads = to_int(std::min<std::int64_t>(ceil_div(problem.h_index, 8) * 8, kHeads));
  p.queries_of_item = kHeads / p.padded_heads, p.parts = to_int(ceil_div(problem.h_index, kHeads));
  p.chunks = to_int(ceil_div(problem.d_index, 32));
  return p;
}

// Scores of `count` queries from `first` on.
template <class T>
void score(const Problem& problem, std::int64_t first, std::int64_t count, Stream stream) {
  ScoreParams<T> p = score_params_of<T>(problem);
  p.first_query = first, p.queries = to_int(count);
  p.items = to_int(ceil_div(count, p.queries_of_item) * p.parts);
  // About four CTAs for each that can run at a time; each with whole queries.
  const std::int64_t blocks = ceil_div(problem.s_kv, kKeysOfCta<T>);
  const std::int64_t wanted = 8 * std::int64_t{problem.device.sms};
  const std::int64_t slices = std::clamp<std::int64_t>(wanted / blocks, 1, std::min(p.items / p.parts, 65535));
  p.items_of_slice = to_int(ceil_div(p.items / p.parts, slices)) * p.parts;
  runtime::launch(kName, p.chunks == kChunks ? score_keys<true, T> : score_keys<false, T>,
                  {.grid = {to_count(blocks), to_count(ceil_div(p.items, p.items_of_slice))},
                   .threads = ScoreConfig::kThreads,
                   .shared_bytes = sizeof(ScoreStorage<T>)},
                  stream, p);
}

void launch(const Problem& problem, Stream stream) {
  launch_in_turns(
      problem,
      [&](std::int64_t first, std::int64_t count) {
        problem.q.dtype == DType::kBFloat16 ? score<bf16>(problem, first, count, stream)
                                            : score<float>(problem, first, count, stream);
      },
      [&](std::int64_t first, std::int64_t count) { select(problem, first, count, stream); });
}

const runtime::Registration<Problem> backend{
    {.name = kBackend, .supports = supports, .workspace_bytes = workspace_bytes, .launch = launch}};

}  // namespace
}  // namespace lightning_indexer

namespace lightning_indexer_backward {
namespace {

runtime::Support supports(const Problem& p) {
  const std::size_t shared =
      p.q.dtype == DType::kBFloat16 ? sizeof(GradientStorage<arch::bf16>) : sizeof(GradientStorage<float>);
  if (shared > p.device.shared_bytes)
    return runtime::Support::no("q_index in this dtype needs " + std::to_string(shared) +
                                " bytes of shared memory a CTA");
  return check_sizes(p);
}

template <class T>
void launch_as(const Problem& problem, Stream stream) {
  const Params<T> p = params_of<T>(problem);
  launch_passes(problem, p, stream, [&] {
    const auto over_queries = [&](int threads, std::size_t shared_bytes) {
      return arch::LaunchShape{
          .grid = {to_count(problem.s_q)}, .threads = to_count(threads), .shared_bytes = shared_bytes};
    };
    runtime::launch(kName, weigh_entries<T>, over_queries(32 * p.weigh_warps, sizeof(WeighStorage<T>)), stream, p);
    runtime::launch(kName, add_gradients<T>, over_queries(GradientConfig::kThreads, sizeof(GradientStorage<T>)), stream,
                    p);
  });
}

void launch(const Problem& problem, Stream stream) {
  if (problem.q.dtype == DType::kBFloat16) return launch_as<arch::bf16>(problem, stream);
  launch_as<float>(problem, stream);
}

const runtime::Registration<Problem> backend{
    {.name = kBackend, .supports = supports, .workspace_bytes = workspace_bytes, .launch = launch}};

}  // namespace
}  // namespace lightning_indexer_backward
}  // namespace hopwell::ops
