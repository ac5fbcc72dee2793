// lightning_indexer_backward on GPUs: kernels before and after the kernels of the queries. Preprocess and postprocess
// of d_k, by a grid whose warps iterate over its rows; and the sum of the queries' losses.
#pragma once

#include "ops/lightning_indexer_backward/params.hpp"
#include "tile/gpu/dependency.hpp"

namespace hopwell::ops::lightning_indexer_backward::HOPWELL_TARGET {

// Calls work(key) for every key, one warp per key, in a grid of any size.
template <class T, class Work>
HOPWELL_DEVICE void for_each_key(const Params<T>& p, const Work& work) {
  constexpr int kWarps = kPassThreads / 32;
  for (int64_t key = int64_t{arch::block_index()} * kWarps + arch::warp_index(); key < p.s_kv;
       key += int64_t{arch::grid_size()} * kWarps)
    work(key);
}

// Clears dk, or its deterministic sums and their bounds.
template <class T>
__global__ void __launch_bounds__(kPassThreads) lightning_indexer_bwd_clear_d_k(const __grid_constant__ Params<T> p) {
  tile::launch_dependents();
  if (p.bound_of_all && arch::block_index() == 0 && arch::thread_index() == 0) *p.bound_of_all = 0;
  for_each_key(p, [&](int64_t key) {
    if (p.fixed_d_k && arch::lane_index() == 0) p.bounds.largest[key] = p.bounds.count[key] = 0;
    for (int column = arch::lane_index(); column < p.columns; column += 32) {
      if (p.fixed_d_k)
        p.fixed_d_k[key * p.columns + column] = 0;
      else
        p.d_k[key * p.d_k_stride + column] = 0;
    }
  });
}

template <class T>
__global__ void __launch_bounds__(kPassThreads)
    lightning_indexer_bwd_postprocess_d_k(const __grid_constant__ Params<T> p) {
  for_each_key(p, [&](int64_t key) {
    const float bound = bound_of(p.bounds.largest[key], p.bounds.count[key]);
    const int unit = tile::unit_exponent<tile::kWideBits>(bound);
    for (int column = arch::lane_index(); column < p.columns; column += 32)
      p.d_k[key * p.d_k_stride + column] =
          bound < INFINITY ? tile::from_wide_fixed(p.fixed_d_k[key * p.columns + column], unit) : NAN;
  });
}

// Bound of a query's contribution to any sum: |g| is at most the factor, times kRoom for targets far above 1.
template <class T>
HOPWELL_DEVICE float bound_of_query(const Params<T>& p, int64_t query) {
  constexpr float kRoom = 256;
  float bound = 0;
  for (int head = 0; head < p.heads; ++head) {
    float largest = 0, x[8];
    for (int column = 8 * arch::lane_index(); column < p.columns; column += 8 * 32) {
      tile::sum_split(p.q.chunk(p.q.data + query * p.q_stride + head * p.q.stride, column), x);
      for (const float value : x) largest = fmaxf(largest, fabsf(value));
    }
    bound +=
        fabsf(tile::load_fp32(p.weights, p.weights_bf16, query * p.weights_stride + head)) * tile::max_of_warp(largest);
  }
  const float weight = p.row_weights ? p.row_weights[query * p.row_weights_stride] : 1;
  return kRoom * fabsf((p.d_loss_array ? *p.d_loss_array : p.d_loss) * weight) * bound;
}

// One warp per query, over all passes. A bound that is not finite is skipped here; the sum becomes NaN when the
// contribution is added.
template <class T>
__global__ void __launch_bounds__(kPassThreads)
    lightning_indexer_bwd_bound_queries(const __grid_constant__ Params<T> p, int64_t s_q) {
  constexpr int kWarps = kPassThreads / 32;
  for (int64_t query = int64_t{arch::block_index()} * kWarps + arch::warp_index(); query < s_q;
       query += int64_t{arch::grid_size()} * kWarps) {
    const float bound = bound_of_query(p, query);
    if (arch::lane_index() == 0 && bound < INFINITY) arch::red_max(p.bound_of_all, arch::bit_cast<uint32_t>(bound));
  }
}

template <class T>
__global__ void __launch_bounds__(kPassThreads)
    lightning_indexer_bwd_bound_keys(const __grid_constant__ Params<T> p, int64_t s_q) {
  for (int64_t key = int64_t{arch::block_index()} * kPassThreads + arch::thread_index(); key < p.s_kv;
       key += int64_t{arch::grid_size()} * kPassThreads)
    p.bounds.largest[key] = *p.bound_of_all, p.bounds.count[key] = uint32_t(s_q);
}

// One CTA, in a fixed order: thread t adds the losses of every 1,024th query from t on, lane l of the first warp adds
// the sums of every 32nd thread, and lane 0 adds these.
constexpr int kLossThreads = 1024;
__global__ void __launch_bounds__(kLossThreads)
    lightning_indexer_bwd_sum_losses(const double* losses, int64_t s_q, float* loss) {
  auto& sums = arch::dynamic_smem<double[kLossThreads]>();
  const int thread = arch::thread_index();
  double sum = 0;
  for (int64_t s = thread; s < s_q; s += kLossThreads) sum += losses[s];
  sums[thread] = sum;
  arch::syncthreads();
  if (thread >= 32) return;
  for (int other = thread + 32; other < kLossThreads; other += 32) sum += sums[other];
  sums[thread] = sum;
  arch::syncwarp();
  if (thread != 0) return;
  for (int lane = 1; lane < 32; ++lane) sum += sums[lane];
  *loss = float(sum);
}

// Launches the kernels of a pass. `launch_queries` launches the kernels that depend on the pass's queries; the other
// kernels run only in the first or last pass.
template <class T, class LaunchQueries>
void launch_passes(const PassProblem& problem, const Plan& plan, const Params<T>& p, void* workspace, Stream stream,
                   LaunchQueries launch_queries) {
  const std::uint32_t ctas = plan.pass_ctas;
  const arch::LaunchShape over_d_k{.grid = {ctas}, .threads = kPassThreads};
  if (ctas > 0 && problem.first_pass()) {
    runtime::launch(kName, lightning_indexer_bwd_clear_d_k<T>, over_d_k, stream, p);
    if (p.bound_of_all)
      runtime::launch(kName, lightning_indexer_bwd_bound_queries<T>, over_d_k, stream, p, problem.s_q);
    if (p.bound_of_all) runtime::launch(kName, lightning_indexer_bwd_bound_keys<T>, over_d_k, stream, p, problem.s_q);
  }
  if (problem.queries() > 0) launch_queries();
  if (!problem.last_pass()) return;
  if (ctas > 0 && problem.deterministic)
    runtime::launch(kName, lightning_indexer_bwd_postprocess_d_k<T>, over_d_k, stream, p);
  if (!problem.loss) return;
  runtime::launch(kName, lightning_indexer_bwd_sum_losses,
                  {.grid = {1}, .threads = kLossThreads, .shared_bytes = kLossThreads * sizeof(double)}, stream,
                  static_cast<const double*>(losses_of(problem, plan, workspace)), problem.s_q,
                  problem.loss.as<float>());
}

}  // namespace hopwell::ops::lightning_indexer_backward::HOPWELL_TARGET
