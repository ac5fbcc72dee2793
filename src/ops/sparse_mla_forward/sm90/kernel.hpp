// sparse_mla_forward for Hopper: the function of all kernels, and its launch.
#pragma once

#include "ops/sparse_mla_forward/plan.hpp"
#include "ops/sparse_mla_forward/sm90/few_heads.hpp"
#include "ops/sparse_mla_forward/sm90/many_heads.hpp"
#include "runtime/launch.hpp"

namespace hopwell::ops::sparse_mla_forward::HOPWELL_TARGET {

inline constexpr const char* kName = "sparse_mla_forward";

// Roles of the warpgroups. The two math warpgroups run the same instructions.
enum class Role { math_0, math_1, gather };

template <class Storage>
__global__ void __launch_bounds__(Storage::kThreads, 1)
    sparse_mla_fwd_sm90(const __grid_constant__ typename Storage::KernelParams p) {
#if HOPWELL_HAS_SM90A
  constexpr bool kAfterMerge = std::is_same_v<typename Storage::KernelParams, GroupedParams>;
  auto& s = arch::dynamic_smem<Storage>();
  if constexpr (kAfterMerge) tile::launch_dependents();
  if (arch::thread_index() == 0) initialise(s);
  arch::syncthreads();
  if constexpr (kAfterMerge) tile::wait_for_prior_kernels();
  const int warpgroup = arch::warpgroup_index();
  if (Role{warpgroup} == Role::gather) {
    arch::setmaxnreg_dec<Storage::kGatherRegisters>();
    gather(p, s);
  } else {
    arch::setmaxnreg_inc<Storage::kMathRegisters>();
    math(p, s, warpgroup);
  }
#endif
}

template <class Storage>
void launch_kernel(const Problem& problem, const LaunchPlan& plan, typename Storage::KernelParams p, Stream stream) {
  arch::LaunchShape shape = runtime::shape_of_ctas(plan.ctas, Storage::kThreads, sizeof(Storage));
  if constexpr (std::is_same_v<decltype(p), GroupedParams>)
    shape.programmatic_dependency = problem.device.has_dependent_launches();
  p.work_tiles = plan.work_tiles, p.head_tiles = plan.head_tiles, p.queries_at_once = plan.queries_at_once;
  runtime::launch(kName, sparse_mla_fwd_sm90<Storage>, shape, stream, p);
}

// Launches the kernel for the number of heads. `problem`: restricted to the heads of the launch.
template <int kDqk, class KernelParams>
void launch_for_few_heads(const Problem& problem, const LaunchPlan& plan, const KernelParams& p, Stream stream) {
  runtime::with_constant<16, 32>(plan.tile_heads, [&]<int kHeads>() {
    launch_kernel<few_heads::SharedStorage<kHeads, kDqk, KernelParams>>(problem, plan, p, stream);
  });
}
template <int kDqk, class KernelParams>
void launch_for_heads(const Problem& problem, const LaunchPlan& plan, const KernelParams& p, Stream stream) {
  if (plan.tile_heads < 64)
    launch_for_few_heads<kDqk>(problem, plan, p, stream);
  else
    launch_kernel<many_heads::SharedStorage<kDqk, KernelParams>>(problem, plan, p, stream);
}

// In sm90/window.cu, so that these kernels compile at the same time as the others.
// The kernel with tensor copies for 64 heads and d_qk 512, with or without window keys. Returns false, and launches
// nothing, if it does not support the call.
bool launch_with_boxes(const Problem& problem, const LaunchPlan& plan, const tile::SelectionParams& selection,
                       Stream stream);
// The other kernels with window keys.
void launch_with_window(const Problem& problem, const LaunchPlan& plan, const tile::SelectionParams& selection,
                        Stream stream);

}  // namespace hopwell::ops::sparse_mla_forward::HOPWELL_TARGET
