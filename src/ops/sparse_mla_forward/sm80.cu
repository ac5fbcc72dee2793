// sparse_mla_forward for any NVIDIA GPU from Ampere on: supported problems, and the kernel's launch.
#include "ops/sparse_mla_forward/sm80/attention.hpp"
#include "ops/sparse_mla_forward/trim_rows.hpp"
#include "runtime/launch.hpp"

namespace hopwell::ops::sparse_mla_forward::HOPWELL_TARGET {
namespace {

runtime::PlanOr<TrimmedRowsPlan> plan(const Problem& p) {
  using runtime::Unsupported;
  if (p.q.dtype != DType::kBFloat16) return Unsupported{"needs bfloat16 q and kv"};
  if (p.d_qk != 576 && p.d_qk != 512) return Unsupported{"needs d_qk 576 or 512"};
  if (p.d_v != 512) return Unsupported{"needs d_v 512"};
  if (!tile::rows_aligned(p.q, 2) || !tile::rows_aligned(p.kv, 1))
    return Unsupported{"needs rows of q and kv 16-byte aligned"};
  if (p.window && !tile::rows_aligned(p.window_kv, 1)) return Unsupported{"needs rows of window_kv 16-byte aligned"};
  if (!tile::rows_aligned(p.out, 2, 4)) return Unsupported{"needs rows of out 4-byte aligned"};
  constexpr std::int64_t kLimit = std::int64_t{1} << 31;
  if (p.s_q >= kLimit || p.s_kv >= kLimit || p.topk + p.window.most_keys() >= kLimit || p.h_q > 16 * 65535)
    return Unsupported{"needs s_q, s_kv and topk (with the window's keys) below 2^31, h_q at most 1048560"};
  return trimmed_rows_plan(p);
}

void launch(const Problem& problem, const TrimmedRowsPlan& plan, void* workspace, Stream stream) {
  if (problem.s_q == 0 || problem.h_q == 0) return;
  trim_rows(problem, plan.trimmed, workspace, stream);
  const auto selection = selection_of(problem, plan.trimmed, workspace);
  runtime::with_constant<576, 512>(problem.d_qk, [&]<int kDqk>() {
    const arch::LaunchShape shape{
        .grid = {static_cast<std::uint32_t>(problem.s_q),
                 static_cast<std::uint32_t>((problem.h_q + Config::kHeads - 1) / Config::kHeads)},
        .threads = Config::kThreads,
        .shared_bytes = sizeof(SharedStorage<kDqk>)};
    constexpr const char* kName = "sparse_mla_forward";
    if (problem.window)
      runtime::launch(kName, sparse_mla_fwd_sm80<kDqk, WindowParams>, shape, stream,
                      params_with_window(problem, selection));
    else
      runtime::launch(kName, sparse_mla_fwd_sm80<kDqk, Params>, shape, stream, params_of(problem, selection));
  });
}

const runtime::Registration backend{runtime::kBackend, plan, launch};

}  // namespace
}  // namespace hopwell::ops::sparse_mla_forward::HOPWELL_TARGET
