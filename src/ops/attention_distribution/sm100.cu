// attention_distribution for Blackwell: supported problems, and the kernel's launch.
#include "ops/attention_distribution/sm100/head_sums.hpp"

namespace hopwell::ops::attention_distribution::HOPWELL_TARGET {
namespace {

runtime::Support supports(const Problem& p) {
  using runtime::Support;
  if (p.q.dtype != DType::kBFloat16) return Support::no("q and kv must be bfloat16");
  if (p.d_qk != 576 && p.d_qk != 512) return Support::no("d_qk must be 576 or 512");
  if (!sizes_fit(p)) return Support::no(kSizesDoNotFit);
  if (!tile::can_map(p.q, {0, 1}) || !tile::can_map(p.kv, {0}))
    return Support::no("rows of q and kv must be 16-byte aligned, in ascending order");
  if (!tile::can_gather(p.kv.data, p.s_kv, p.kv.stride[0])) return Support::no("rows of kv must lie within 64 GiB");
  return {};
}

template <int kDqk>
void launch_with_width(const Problem& problem, Stream stream) {
  constexpr auto kSwizzle = arch::Swizzle::bytes128;
  const GatherParams p{params_of(problem), tile::map_of_rows(problem.kv, problem.q, 64, kSwizzle),
                       tile::map_of(problem.q, {{2, 64}, {1, kHeadsAtATime}, {0, 1}}, kSwizzle)};
  runtime::launch("attention_distribution", kernel<kDqk>,
                  runtime::shape_of_ctas(p.plan.ctas, Config::kThreads, sizeof(SharedStorage<kDqk>)), stream, p);
}

void launch(const Problem& problem, Stream stream) {
  if (problem.s_q == 0 || problem.topk == 0) return;
  problem.d_qk == 576 ? launch_with_width<576>(problem, stream) : launch_with_width<512>(problem, stream);
}

const runtime::Registration<Problem> backend{{.name = runtime::kBackend, .supports = supports, .launch = launch}};

}  // namespace
}  // namespace hopwell::ops::attention_distribution::HOPWELL_TARGET
