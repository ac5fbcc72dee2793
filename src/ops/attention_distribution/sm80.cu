// attention_distribution for any NVIDIA GPU from Ampere on: supported problems, and the kernel's launch.
#include "ops/attention_distribution/sm80/head_sums.hpp"

namespace hopwell::ops::attention_distribution::HOPWELL_TARGET {
namespace {

runtime::PlanOr<Plan> plan(const Problem& p) {
  using runtime::Unsupported;
  if (p.q.dtype != DType::kBFloat16) return Unsupported{"needs bfloat16 q and kv"};
  if (p.d_qk % 16 != 0 || p.d_qk > Config::kMaxColumns) return Unsupported{"needs d_qk a multiple of 16, at most 576"};
  if (!tile::row_major<bf16>(p.q, 2).in_chunks || !tile::row_major<bf16>(p.kv, 1).in_chunks)
    return Unsupported{"needs rows of q and kv 16-byte aligned"};
  if (!sizes_fit(p)) return Unsupported{kSizesThatFit};
  return plan_of(p);
}

void launch(const Problem& problem, const Plan& plan, void* /*workspace*/, Stream stream) {
  if (problem.s_q == 0 || problem.topk == 0) return;
  const Params p = params_of(problem, plan);
  const int head_warps = p.h_q > 64 ? 8 : p.h_q > 32 ? 4 : p.h_q > 16 ? 2 : 1;
  runtime::with_constant<8, 4, 2, 1>(head_warps, [&]<int kHeadWarps>() {
    runtime::launch(
        "attention_distribution",
        p.d_qk > 512 ? attention_distribution_sm80<576, kHeadWarps> : attention_distribution_sm80<512, kHeadWarps>,
        runtime::shape_of_ctas(p.plan.ctas, Config::kThreads, sizeof(SharedStorage)), stream, p);
  });
}

const runtime::Registration backend{runtime::kBackend, plan, launch};

}  // namespace
}  // namespace hopwell::ops::attention_distribution::HOPWELL_TARGET
