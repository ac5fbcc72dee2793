// sparse_mla_forward for any NVIDIA GPU from Ampere on: supported problems, and the kernel's launch.
#include "ops/sparse_mla_forward/sm80/attention.hpp"
#include "ops/sparse_mla_forward/trim_rows.hpp"

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
  if (p.s_q >= kLimit || p.s_kv >= kLimit || p.topk + p.window.most_keys() >= kLimit ||
      p.s_q * head_tiles(p.h_q) >= kLimit)
    return Unsupported{"needs s_q, s_kv, topk (with the window's keys) and s_q times the tiles of 64 heads below 2^31"};
  return trimmed_rows_plan(p);
}

void launch(const Problem& problem, const TrimmedRowsPlan& plan, void* workspace, Stream stream) {
  if (problem.s_q == 0 || problem.h_q == 0) return;
  trim_rows(problem, plan.trimmed, workspace, stream);
  const auto selection = selection_of(problem, plan.trimmed, workspace);
  constexpr const char* kName = "sparse_mla_forward";
  if (problem.window)
    launch_attention(kName, problem, params_with_window(problem, selection), stream);
  else
    launch_attention(kName, problem, params_of(problem, selection), stream);
}

const runtime::Registration backend{runtime::kBackend, plan, launch};

}  // namespace
}  // namespace hopwell::ops::sparse_mla_forward::HOPWELL_TARGET
