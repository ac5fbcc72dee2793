// lightning_indexer_backward on GPUs: what its backend files share on the host.
#pragma once

#include "ops/lightning_indexer/sm80_launch.hpp"
#include "ops/lightning_indexer/sm80_weigh.hpp"

namespace hopwell::ops::lightning_indexer_backward {
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

// What is done before and after the kernels that `gradients` launches.
template <class T, class Gradients>
void launch_passes(const Problem& problem, const Params<T>& p, Stream stream, Gradients gradients) {
  const std::int64_t pieces = ceil_div(problem.s_kv * problem.d_index, kPassThreads);
  const std::int64_t most = 8 * std::int64_t{problem.device.sms};
  const arch::LaunchShape over_keys{.grid = {to_count(std::min(pieces, most))}, .threads = kPassThreads};
  if (pieces > 0) runtime::launch(kName, clear_d_k<T>, over_keys, stream, p);
  if (problem.s_q > 0) gradients();
  if (pieces > 0 && problem.deterministic) runtime::launch(kName, finish_d_k<T>, over_keys, stream, p);
  runtime::launch(kName, sum_losses, {.grid = {1}, .threads = 32, .shared_bytes = 32 * sizeof(double)}, stream,
                  static_cast<const double*>(p.losses), problem.s_q, problem.loss.as<float>());
}

}  // namespace
}  // namespace hopwell::ops::lightning_indexer_backward
