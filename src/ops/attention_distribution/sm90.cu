// attention_distribution for Hopper: what it takes, and its kernel's launch.
#include "ops/attention_distribution/sm90/head_sums.hpp"

namespace hopwell::ops::attention_distribution::HOPWELL_TARGET {
namespace {

runtime::Support supports(const Problem& p) {
  if (p.q.dtype != DType::kBFloat16) return runtime::Support::no("q and kv must be bfloat16");
  if (p.d_qk != 576 && p.d_qk != 512) return runtime::Support::no("d_qk must be 576 or 512");
  if (!sizes_fit(p)) return runtime::Support::no(kSizesDoNotFit);
  return {};
}

// Whether rows of q and kv can be copied by 16 bytes.
bool is_aligned(const Params& p, const Problem& problem) {
  return tile::can_gather(p.q, problem.h_q, p.q_stride_h) && tile::can_gather(p.kv, problem.s_kv, p.kv_stride) &&
         (problem.s_q <= 1 || p.q_stride_s % 8 == 0);
}

template <int kDqk>
void launch_with_width(const Problem& problem, Stream stream) {
  Params p = params_of(problem);
  p.aligned = is_aligned(p, problem);
  runtime::launch("attention_distribution", p.plan.alternate ? kernel<kDqk, true> : kernel<kDqk, false>,
                  runtime::shape_of_ctas(p.plan.ctas, Config::kThreads, sizeof(SharedStorage<kDqk>)), stream, p);
}

void launch(const Problem& problem, Stream stream) {
  if (problem.s_q == 0 || problem.topk == 0) return;
  problem.d_qk == 576 ? launch_with_width<576>(problem, stream) : launch_with_width<512>(problem, stream);
}

const runtime::Registration<Problem> backend{{.name = runtime::kBackend, .supports = supports, .launch = launch}};

}  // namespace
}  // namespace hopwell::ops::attention_distribution::HOPWELL_TARGET
