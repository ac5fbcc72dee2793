// sparse_mla_forward for Hopper: what it takes, and the kernels' launch.
#include "ops/sparse_mla_forward/plan.hpp"
#include "ops/sparse_mla_forward/sm90/few_heads.hpp"
#include "ops/sparse_mla_forward/sm90/many_heads.hpp"
#include "runtime/launch.hpp"

namespace hopwell::ops::sparse_mla_forward::HOPWELL_TARGET {
namespace {

runtime::Support supports(const Problem& p) {
  if (p.q.dtype != DType::kBFloat16) return runtime::Support::no("q and kv must be bfloat16");
  if (p.d_qk != 576 && p.d_qk != 512) return runtime::Support::no("d_qk must be 576 or 512");
  if (p.d_v != 512) return runtime::Support::no("d_v must be 512");
  constexpr std::int64_t kLimit = (std::int64_t{1} << 31) - 1024;
  if (p.s_q >= kLimit || p.s_kv >= kLimit || p.topk >= kLimit || p.h_q >= kLimit ||
      p.s_q * ((p.h_q + 63) / 64) >= kLimit)
    return runtime::Support::no("s_q, s_kv, topk, h_q and s_q · h_q / 64 must be below 2^31 - 1024");
  return {};
}

// A warpgroup's role. The two that compute run the same instructions.
enum class Role { math_0, math_1, gather };

template <class Storage>
__global__ void __launch_bounds__(Storage::kThreads, 1) kernel(const __grid_constant__ Params p) {
#if HOPWELL_HAS_SM90A
  auto& s = arch::dynamic_smem<Storage>();
  if (arch::thread_index() == 0) initialise(s);
  arch::syncthreads();
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
void launch_kernel(const Problem& problem, const Plan& plan, Stream stream) {
  Params p = params_of(problem);
  p.work_tiles = plan.work_tiles, p.head_tiles = plan.head_tiles, p.queries_at_once = plan.queries_at_once;
  const arch::LaunchShape shape{.grid = {plan.ctas}, .threads = Storage::kThreads, .shared_bytes = sizeof(Storage)};
  runtime::launch("sparse_mla_forward", kernel<Storage>, shape, stream, p);
}

template <int kDqk>
void launch_with_width(const Problem& problem, Stream stream) {
  const Plan plan = plan_of(problem);
  if (plan.tile_heads == 16)
    launch_kernel<few_heads::SharedStorage<16, kDqk>>(problem, plan, stream);
  else if (plan.tile_heads == 32)
    launch_kernel<few_heads::SharedStorage<32, kDqk>>(problem, plan, stream);
  else
    launch_kernel<many_heads::SharedStorage<kDqk>>(problem, plan, stream);
}

void launch(const Problem& problem, Stream stream) {
  if (problem.s_q == 0) return;
  problem.d_qk == 576 ? launch_with_width<576>(problem, stream) : launch_with_width<512>(problem, stream);
}

const runtime::Registration<Problem> backend{
    {.name = HOPWELL_ON_DEVICE ? "sm90" : "emu:sm90", .supports = supports, .launch = launch}};

}  // namespace
}  // namespace hopwell::ops::sparse_mla_forward::HOPWELL_TARGET
