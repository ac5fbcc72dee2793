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
  const std::int64_t keys = p.s_kv + p.window.s_w, keys_of_query = p.topk + p.window.most_keys();
  if (!runtime::fit_in_ints({p.s_q, keys, keys_of_query, p.h_q, p.s_q * head_tiles(p.h_q)}))
    return Unsupported{"needs s_q, s_kv, topk (both with the window's), h_q and s_q · h_q / 64 below 2^31 - 1024"};
  return trimmed_rows_plan(p);
}

void launch(const Problem& problem, const TrimmedRowsPlan& plan, void* workspace, Stream stream) {
  if (problem.s_q == 0) return;
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
