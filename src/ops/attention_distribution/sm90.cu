// attention_distribution for Hopper: supported problems, and the kernel's launch.
#include "ops/attention_distribution/order_rows.hpp"
#include "ops/attention_distribution/sm90/head_sums.hpp"

namespace hopwell::ops::attention_distribution::HOPWELL_TARGET {
namespace {

runtime::PlanOr<OrderedPlan> plan(const Problem& p) {
  using runtime::Unsupported;
  if (p.q.dtype != DType::kBFloat16) return Unsupported{"needs bfloat16 q and kv"};
  if (p.d_qk != 576 && p.d_qk != 512) return Unsupported{"needs d_qk 576 or 512"};
  if (!sizes_fit(p)) return Unsupported{kSizesThatFit};
  const Ordering ordering = ordering_of(p);
  return OrderedPlan{plan_of(p), ordering, ordering.bytes};
}

// Whether rows of q and kv can be copied in units of 16 bytes.
bool is_aligned(const Params& p, const Problem& problem) {
  return tile::can_gather(p.q, problem.h_q, p.q_stride_h) && tile::can_gather(p.kv, problem.s_kv, p.kv_stride_s) &&
         (problem.s_q <= 1 || p.q_stride_s % 8 == 0);
}

template <int kDqk>
auto kernel_of(bool alternate, bool ordered) {
  if (ordered)
    return alternate ? attention_distribution_sm90<kDqk, true, true> : attention_distribution_sm90<kDqk, false, true>;
  return alternate ? attention_distribution_sm90<kDqk, true, false> : attention_distribution_sm90<kDqk, false, false>;
}

void launch(const Problem& problem, const OrderedPlan& plan, void* workspace, Stream stream) {
  if (problem.s_q == 0 || problem.topk == 0) return;
  Params p = params_of(problem, plan.tiles);
  p.aligned = is_aligned(p, problem);
  const bool ordered = plan.ordering.orders_rows && workspace != nullptr;
  if (ordered) order_rows(problem, plan.ordering, p, workspace, stream);
  runtime::with_constant<576, 512>(problem.d_qk, [&]<int kDqk>() {
    runtime::launch("attention_distribution", kernel_of<kDqk>(p.plan.alternate, ordered),
                    runtime::shape_of_ctas(p.plan.ctas, Config::kThreads, sizeof(SharedStorage<kDqk>)), stream, p);
  });
}

const runtime::Registration backend{runtime::kBackend, plan, launch};

}  // namespace
}  // namespace hopwell::ops::attention_distribution::HOPWELL_TARGET
