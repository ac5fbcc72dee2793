// sparse_mla_forward for any NVIDIA GPU from Ampere on: supported problems, and the kernel's launch.
#include "ops/sparse_mla_forward/sm80/attention.hpp"
#include "runtime/launch.hpp"

namespace hopwell::ops::sparse_mla_forward::HOPWELL_TARGET {
namespace {

runtime::Support supports(const Problem& p) {
  if (p.q.dtype != DType::kBFloat16) return runtime::Support::no("q and kv must be bfloat16");
  if (p.d_qk != 576 && p.d_qk != 512) return runtime::Support::no("d_qk must be 576 or 512");
  if (p.d_v != 512) return runtime::Support::no("d_v must be 512");
  if (!tile::rows_aligned(p.q, 2) || !tile::rows_aligned(p.kv, 1))
    return runtime::Support::no("rows of q and kv must be 16-byte aligned");
  if (!tile::rows_aligned(p.out, 2, 4)) return runtime::Support::no("rows of out must be 4-byte aligned");
  constexpr std::int64_t kLimit = std::int64_t{1} << 31;
  if (p.s_q >= kLimit || p.s_kv >= kLimit || p.topk >= kLimit || p.h_q > 16 * 65535)
    return runtime::Support::no("s_q, s_kv and topk must be below 2^31, h_q at most 1048560");
  return {};
}

template <int kDqk>
void launch_with_width(const Problem& problem, Stream stream) {
  const arch::LaunchShape shape{
      .grid = {static_cast<std::uint32_t>(problem.s_q),
               static_cast<std::uint32_t>((problem.h_q + Config::kHeads - 1) / Config::kHeads)},
      .threads = Config::kThreads,
      .shared_bytes = sizeof(SharedStorage<kDqk>)};
  runtime::launch("sparse_mla_forward", kernel<kDqk>, shape, stream, params_of(problem));
}

void launch(const Problem& problem, Stream stream) {
  if (problem.s_q == 0 || problem.h_q == 0) return;
  problem.d_qk == 576 ? launch_with_width<576>(problem, stream) : launch_with_width<512>(problem, stream);
}

const runtime::Registration<Problem> backend{{.name = runtime::kBackend, .supports = supports, .launch = launch}};

}  // namespace
}  // namespace hopwell::ops::sparse_mla_forward::HOPWELL_TARGET
