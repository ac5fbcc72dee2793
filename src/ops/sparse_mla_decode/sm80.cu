// sparse_mla_decode for any NVIDIA GPU from Ampere on: the forward's kernel over rows of bf16 in a paged cache.
#include "ops/sparse_mla_decode/paged.hpp"
#include "ops/sparse_mla_forward/sm80/attention.hpp"
#include "runtime/launch.hpp"

namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET {
namespace {

using Config = forward::HOPWELL_TARGET::Config;

runtime::PlanOr<forward::Problem> plan(const Problem& p) {
  using runtime::Unsupported;
  runtime::PlanOr<forward::Problem> f = forward_problem(p);
  if (std::holds_alternative<Unsupported>(f)) return f;
  if (!tile::rows_aligned(p.q, 3)) return Unsupported{"needs rows of q 16-byte aligned"};
  if (!cache_aligned(p)) return Unsupported{"needs base and block stride of cache in multiples of 16 bytes"};
  if (!tile::rows_aligned(p.out, 3, 4)) return Unsupported{"needs rows of out 4-byte aligned"};
  if (p.b * p.q_len >= std::int64_t{1} << 31 || p.h_q > 16 * 65535)
    return Unsupported{"needs b · q_len below 2^31 and h_q of at most 1048560"};
  return f;
}

template <int kDqk>
void launch_with_width(const Problem& problem, const forward::Problem& f, Stream stream) {
  const arch::LaunchShape shape{.grid = {static_cast<std::uint32_t>(f.s_q),
                                         static_cast<std::uint32_t>((f.h_q + Config::kHeads - 1) / Config::kHeads)},
                                .threads = Config::kThreads,
                                .shared_bytes = sizeof(forward::HOPWELL_TARGET::SharedStorage<kDqk>)};
  runtime::launch("sparse_mla_decode", forward::HOPWELL_TARGET::sparse_mla_fwd_sm80<kDqk, PagedParams>, shape, stream,
                  params_of(problem, f));
}

void launch(const Problem& problem, const forward::Problem& f, void* /*workspace*/, Stream stream) {
  if (f.s_q == 0) return;
  problem.d_qk == 576 ? launch_with_width<576>(problem, f, stream) : launch_with_width<512>(problem, f, stream);
}

const runtime::Registration backend{runtime::kBackend, plan, launch};

}  // namespace
}  // namespace hopwell::ops::sparse_mla_decode::HOPWELL_TARGET
