// attention_distribution for any NVIDIA GPU from Ampere on: supported problems, and the kernel's launch.
#include "ops/attention_distribution/sm80/head_sums.hpp"

namespace hopwell::ops::attention_distribution::HOPWELL_TARGET {
namespace {

runtime::Support supports(const Problem& p) {
  using runtime::Support;
  if (p.q.dtype != DType::kBFloat16) return Support::no("q and kv must be bfloat16");
  if (p.d_qk % 16 != 0 || p.d_qk > Config::kMaxColumns)
    return Support::no("d_qk must be a multiple of 16, at most 576");
  if (!tile::row_major<bf16>(p.q, 2).in_chunks || !tile::row_major<bf16>(p.kv, 1).in_chunks)
    return Support::no("rows of q and kv must be 16-byte aligned");
  if (!sizes_fit(p)) return Support::no(kSizesDoNotFit);
  return {};
}

template <int kHeadWarps>
void launch_with_warps(const Params& p, Stream stream) {
  runtime::launch("attention_distribution", p.d_qk > 512 ? kernel<576, kHeadWarps> : kernel<512, kHeadWarps>,
                  runtime::shape_of_ctas(p.plan.ctas, Config::kThreads, sizeof(SharedStorage)), stream, p);
}

void launch(const Problem& problem, Stream stream) {
  if (problem.s_q == 0 || problem.topk == 0) return;
  const Params p = params_of(problem);
  if (p.h_q > 64)
    launch_with_warps<8>(p, stream);
  else if (p.h_q > 32)
    launch_with_warps<4>(p, stream);
  else if (p.h_q > 16)
    launch_with_warps<2>(p, stream);
  else
    launch_with_warps<1>(p, stream);
}

const runtime::Registration<Problem> backend{{.name = runtime::kBackend, .supports = supports, .launch = launch}};

}  // namespace
}  // namespace hopwell::ops::attention_distribution::HOPWELL_TARGET
