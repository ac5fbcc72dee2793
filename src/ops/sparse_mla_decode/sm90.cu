// sparse_mla_decode for Hopper: the forward's kernels over rows of bf16 in a paged cache.
#include "ops/sparse_mla_decode/paged.hpp"
#include "ops/sparse_mla_forward/sm90/kernel.hpp"

namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET {
namespace {

struct Plan {
  forward::Problem problem;
  forward::Plan plan;
};

runtime::PlanOr<Plan> plan(const Problem& p) {
  using runtime::Unsupported;
  runtime::PlanOr<forward::Problem> f = forward_problem(p);
  if (const auto* reason = std::get_if<Unsupported>(&f)) return *reason;
  const auto& problem = std::get<forward::Problem>(f);
  if (!runtime::fit_in_ints({problem.s_q, problem.topk, p.h_q, problem.s_q * ((p.h_q + 63) / 64)}))
    return Unsupported{"needs b · q_len, topk, h_q and b · q_len · h_q / 64 below 2^31 - 1024"};
  return Plan{problem, forward::plan_of(problem)};
}

// Whether all rows of the cache lie within 64 GiB after the first, at offsets of whole 16-byte chunks.
bool has_chunk_offsets(const mla_cache::Blocks& cache, std::int64_t d_qk) {
  const std::int64_t last = (cache.blocks - 1) * (cache.stride / 16) + cache.block * (d_qk / 8);
  return cache.blocks <= 1 || (cache.stride >= 0 && last < 0xffffffff);
}

void launch(const Problem& problem, const Plan& plan, void* /*workspace*/, Stream stream) {
  if (plan.problem.s_q == 0) return;
  PagedParams p = params_of(problem, plan.problem);
  p.aligned = p.aligned && has_chunk_offsets(problem.keys.cache, problem.d_qk);
  if (problem.d_qk == 576)
    forward::HOPWELL_TARGET::launch_for_heads<576>(plan.problem, plan.plan, p, stream);
  else
    forward::HOPWELL_TARGET::launch_for_heads<512>(plan.problem, plan.plan, p, stream);
}

const runtime::Registration backend{runtime::kBackend, plan, launch};

}  // namespace
}  // namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET
