// lightning_indexer and its backward by mma.sync, for any NVIDIA GPU from Ampere on: what runs where.
//
//     lightning_indexer            score_keys     scores of some queries against all keys, to the workspace   sm80_score.hpp
//                                  select_keys    the best of each query; then the next queries               sm80_select.hpp
//     lightning_indexer_backward   what its five kernels do                                                   sm80_backward.hpp
#include "ops/lightning_indexer/sm80_gradients.hpp"
#include "ops/lightning_indexer/sm80_score.hpp"
#include "ops/lightning_indexer/sm80_select.hpp"
#include "ops/lightning_indexer/sm80_weigh.hpp"
#include "runtime/launch.hpp"

namespace hopwell::ops {
namespace {

constexpr const char* kBackend = HOPWELL_ON_DEVICE ? "sm80" : "emu:sm80";
constexpr std::int64_t kLimit = std::int64_t{1} << 31;

std::uint32_t to_count(std::int64_t x) { return static_cast<std::uint32_t>(x); }
int to_int(std::int64_t x) { return static_cast<int>(x); }
std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// What holds for both operators.
template <class Problem>
runtime::Support check_sizes(const Problem& p) {
  using runtime::Support;
  if (p.d_index > lightning_indexer::kColumns) return Support::no("d_index must be at most 128");
  if (p.s_q >= kLimit || p.topk >= kLimit) return Support::no("s_q and topk must be below 2^31");
  if (p.s_kv >= kLimit / 2) return Support::no("s_kv must be below 2^30");  // so that keys past the last are ints
  if (p.h_index >= kLimit / 64) return Support::no("h_index must be below 2^25");
  return {};
}

}  // namespace

namespace lightning_indexer {
namespace {

constexpr const char* kName = "lightning_indexer";

// Queries whose scores the workspace holds: 64 MiB of scores, but at least those of 32 queries.
std::int64_t queries_at_a_time(const Problem& p) {
  constexpr std::int64_t kFloats = 1 << 24, kLeast = 32;
  return std::min(p.s_q, std::max(kLeast, kFloats / std::max<std::int64_t>(p.s_kv, 1)));
}

std::size_t workspace_bytes(const Problem& p) {
  return p.topk == 0 ? 0 : sizeof(float) * static_cast<std::size_t>(queries_at_a_time(p) * p.s_kv);
}

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
  const std::int64_t wanted = 8 * std::int64_t{runtime::multiprocessors(problem.device.device_id)};
  const std::int64_t slices = std::clamp<std::int64_t>(wanted / blocks, 1, std::min(p.items / p.parts, 65535));
  p.items_of_slice = to_int(ceil_div(p.items / p.parts, slices)) * p.parts;
  runtime::launch(kName, p.chunks == kChunks ? score_keys<true, T> : score_keys<false, T>,
                  {.grid = {to_count(blocks), to_count(ceil_div(p.items, p.items_of_slice))},
                   .threads = ScoreConfig::kThreads,
                   .shared_bytes = sizeof(ScoreStorage<T>)},
                  stream, p);
}

void select(const Problem& problem, std::int64_t first, std::int64_t count, Stream stream) {
  SelectParams p{};
  p.causality = problem.causality;
  p.scores = static_cast<const float*>(problem.workspace), p.first_query = first, p.pitch = problem.s_kv;
  p.indices = problem.indices.as<int>(), p.indices_stride = problem.indices.stride[0];
  p.kept_scores = problem.scores.as<float>(), p.kept_stride = problem.scores.stride[0];
  p.s_kv = to_int(problem.s_kv), p.topk = to_int(problem.topk);
  // Few queries: as many warps as there can be. Many: several CTAs a multiprocessor hide each other's barriers.
  const bool few = count <= 2 * std::int64_t{runtime::multiprocessors(problem.device.device_id)};
  p.warps = to_int(std::clamp<std::int64_t>(problem.s_kv / 256, 1, few ? SelectConfig::kMaxWarps : 8));
  runtime::launch(kName, select_keys,
                  {.grid = {to_count(count)}, .threads = 32 * to_count(p.warps), .shared_bytes = sizeof(SelectStorage)},
                  stream, p);
}

void launch(const Problem& problem, Stream stream) {
  if (problem.topk == 0) return;
  const std::int64_t together = queries_at_a_time(problem);
  for (std::int64_t first = 0; first < problem.s_q; first += together) {
    const std::int64_t count = std::min(together, problem.s_q - first);
    if (problem.s_kv > 0)
      problem.q.dtype == DType::kBFloat16 ? score<bf16>(problem, first, count, stream)
                                          : score<float>(problem, first, count, stream);
    select(problem, first, count, stream);
  }
}

const runtime::Registration<Problem> backend{
    {.name = kBackend, .supports = supports, .workspace_bytes = workspace_bytes, .launch = launch}};

}  // namespace
}  // namespace lightning_indexer

namespace lightning_indexer_backward {
namespace {

constexpr const char* kName = "lightning_indexer_backward";

// What lies in the workspace, by offsets in bytes.
struct Workspace {
  std::size_t g = 0, losses = 0, fixed = 0, most = 0, count = 0, bytes = 0;

  explicit Workspace(const Problem& p) {
    const auto place = [this](std::int64_t size) {
      const std::size_t at = bytes;
      bytes += (static_cast<std::size_t>(size) + 255) / 256 * 256;
      return at;
    };
    g = place(4 * p.s_q * p.topk);
    losses = place(8 * p.s_q);
    if (!p.deterministic) return;
    fixed = place(8 * p.s_kv * p.d_index);
    most = place(4 * p.s_kv);
    count = place(4 * p.s_kv);
  }
  template <class T>
  static T* at(const Problem& p, std::size_t offset) {
    return reinterpret_cast<T*>(static_cast<std::byte*>(p.workspace) + offset);
  }
};

std::size_t workspace_bytes(const Problem& p) { return Workspace(p).bytes; }

runtime::Support supports(const Problem& p) {
  const std::size_t shared =
      p.q.dtype == DType::kBFloat16 ? sizeof(GradientStorage<arch::bf16>) : sizeof(GradientStorage<float>);
  if (shared > runtime::max_shared_bytes(p.device.device_id))
    return runtime::Support::no("q_index in this dtype needs " + std::to_string(shared) +
                                " bytes of shared memory a CTA");
  return check_sizes(p);
}

template <class T>
Params<T> params_of(const Problem& problem) {
  const Workspace workspace(problem);
  Params<T> p{};
  p.q = lightning_indexer::rows_of<T>(problem.q, 2), p.k = lightning_indexer::rows_of<T>(problem.k, 1);
  p.q_stride = problem.q.stride[0];
  p.weights = problem.weights.data, p.weights_stride = problem.weights.stride[0];
  p.weights_bf16 = problem.weights.dtype == DType::kBFloat16;
  p.indices = problem.indices.as<const int>(), p.target = problem.target.as<const float>();
  p.indices_stride = problem.indices.stride[0], p.target_stride = problem.target.stride[0];
  p.g = Workspace::at<float>(problem, workspace.g), p.losses = Workspace::at<double>(problem, workspace.losses);
  p.d_loss = problem.d_loss;
  p.d_q = problem.d_q.as<T>(), p.d_weights = problem.d_weights.data, p.d_k = problem.d_k.as<float>();
  if (problem.deterministic) {
    p.fixed_d_k = Workspace::at<std::int64_t>(problem, workspace.fixed);
    p.bounds = {Workspace::at<std::uint32_t>(problem, workspace.most),
                Workspace::at<std::uint32_t>(problem, workspace.count)};
  }
  p.d_q_stride_s = problem.d_q.stride[0], p.d_q_stride_h = problem.d_q.stride[1];
  p.d_k_stride = problem.d_k.stride[0], p.d_weights_stride = problem.d_weights.stride[0];
  p.s_kv = to_int(problem.s_kv), p.topk = to_int(problem.topk), p.heads = to_int(problem.h_index);
  p.columns = to_int(problem.d_index), p.chunks = to_int(ceil_div(problem.d_index, 32));
  p.weigh_warps = to_int(std::clamp<std::int64_t>(ceil_div(problem.topk, 16), 1, WeighConfig::kMaxWarps));
  p.d_k_in_pairs = reinterpret_cast<std::uintptr_t>(p.d_k) % 8 == 0 && (problem.s_kv <= 1 || p.d_k_stride % 2 == 0);
  return p;
}

template <class T>
void launch_as(const Problem& problem, Stream stream) {
  const Params<T> p = params_of<T>(problem);
  const std::int64_t pieces = ceil_div(problem.s_kv * problem.d_index, kPassThreads);
  const std::int64_t most = 8 * std::int64_t{runtime::multiprocessors(problem.device.device_id)};
  const arch::LaunchShape over_keys{.grid = {to_count(std::min(pieces, most))}, .threads = kPassThreads};
  const auto over_queries = [&](int threads, std::size_t shared_bytes) {
    return arch::LaunchShape{
        .grid = {to_count(problem.s_q)}, .threads = to_count(threads), .shared_bytes = shared_bytes};
  };
  if (pieces > 0) runtime::launch(kName, clear_d_k<T>, over_keys, stream, p);
  if (problem.s_q > 0) {
    runtime::launch(kName, weigh_entries<T>, over_queries(32 * p.weigh_warps, sizeof(WeighStorage<T>)), stream, p);
    runtime::launch(kName, add_gradients<T>, over_queries(GradientConfig::kThreads, sizeof(GradientStorage<T>)), stream,
                    p);
  }
  if (pieces > 0 && problem.deterministic) runtime::launch(kName, finish_d_k<T>, over_keys, stream, p);
  runtime::launch(kName, sum_losses, {.grid = {1}, .threads = 32, .shared_bytes = 32 * sizeof(double)}, stream,
                  static_cast<const double*>(p.losses), problem.s_q, problem.loss.as<float>());
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
