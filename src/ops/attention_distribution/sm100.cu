// attention_distribution for Blackwell: supported problems, and the kernel's launch.
#include "ops/attention_distribution/sm100/head_sums.hpp"

namespace hopwell::ops::attention_distribution::HOPWELL_TARGET {
namespace {

runtime::PlanOr<Plan> plan(const Problem& p) {
  using runtime::Unsupported;
  if (p.q.dtype != DType::kBFloat16) return Unsupported{"needs bfloat16 q and kv"};
  if (p.d_qk != 576 && p.d_qk != 512) return Unsupported{"needs d_qk 576 or 512"};
  if (!sizes_fit(p)) return Unsupported{kSizesThatFit};
  if (!tile::can_map(p.q, {0, 1}) || !tile::can_map(p.kv, {0}))
    return Unsupported{"needs rows of q and kv 16-byte aligned, with positive strides"};
  if (!tile::can_gather(p.kv.data, p.s_kv, p.kv.stride[0])) return Unsupported{"needs rows of kv within 64 GiB"};
  return plan_of(p);
}

void launch(const Problem& problem, const Plan& plan, void* /*workspace*/, Stream stream) {
  if (problem.s_q == 0 || problem.topk == 0) return;
  constexpr auto kSwizzle = arch::Swizzle::bytes128;
  const GatherParams p{params_of(problem, plan), tile::map_of_rows(problem.kv, problem.q, 64, kSwizzle),
                       tile::map_of(problem.q, {{2, 64}, {1, kHeadsAtATime}, {0, 1}}, kSwizzle)};
  runtime::with_constant<576, 512>(problem.d_qk, [&]<int kDqk>() {
    runtime::launch("attention_distribution", attention_distribution_sm100<kDqk>,
                    runtime::shape_of_ctas(p.plan.ctas, Config::kThreads, sizeof(SharedStorage<kDqk>)), stream, p);
  });
}

const runtime::Registration backend{runtime::kBackend, plan, launch};

}  // namespace
}  // namespace hopwell::ops::attention_distribution::HOPWELL_TARGET
