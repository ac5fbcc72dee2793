// attention_distribution for Hopper: supported problems, and the kernel's launch.
#include "ops/attention_distribution/order_rows.hpp"
#include "ops/attention_distribution/sm90/head_sums.hpp"

namespace hopwell::ops::attention_distribution::HOPWELL_TARGET {
namespace {

runtime::Support supports(const Problem& p) {
  if (p.q.dtype != DType::kBFloat16) return runtime::Support::no("q and kv must be bfloat16");
  if (p.d_qk != 576 && p.d_qk != 512) return runtime::Support::no("d_qk must be 576 or 512");
  if (!sizes_fit(p)) return runtime::Support::no(kSizesDoNotFit);
  return {};
}

// Whether rows of q and kv can be copied in units of 16 bytes.
bool is_aligned(const Params& p, const Problem& problem) {
  return tile::can_gather(p.q, problem.h_q, p.q_stride_h) && tile::can_gather(p.kv, problem.s_kv, p.kv_stride_s) &&
         (problem.s_q <= 1 || p.q_stride_s % 8 == 0);
}

template <int kDqk>
auto kernel_of(bool alternate, bool ordered) {
  if (ordered) return alternate ? kernel<kDqk, true, true> : kernel<kDqk, false, true>;
  return alternate ? kernel<kDqk, true, false> : kernel<kDqk, false, false>;
}

template <int kDqk>
void launch_with_width(const Problem& problem, Stream stream) {
  Params p = params_of(problem);
  p.aligned = is_aligned(p, problem);
  const Ordering ordering = ordering_of(problem);
  if (ordering.orders_rows) order_rows(problem, ordering, p, stream);
  runtime::launch("attention_distribution", kernel_of<kDqk>(p.plan.alternate, ordering.orders_rows),
                  runtime::shape_of_ctas(p.plan.ctas, Config::kThreads, sizeof(SharedStorage<kDqk>)), stream, p);
}

void launch(const Problem& problem, Stream stream) {
  if (problem.s_q == 0 || problem.topk == 0) return;
  problem.d_qk == 576 ? launch_with_width<576>(problem, stream) : launch_with_width<512>(problem, stream);
}

const runtime::Registration<Problem> backend{{.name = runtime::kBackend,
                                              .supports = supports,
                                              .workspace_bytes = [](const Problem& p) { return ordering_of(p).bytes; },
                                              .launch = launch}};

}  // namespace
}  // namespace hopwell::ops::attention_distribution::HOPWELL_TARGET
