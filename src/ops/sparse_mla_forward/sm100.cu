// sparse_mla_forward for Blackwell: two CTAs process 128 heads of a query, one CTA 64 remaining heads. Supported
// problems, and the launches.
#include <algorithm>

#include "ops/sparse_mla_forward/sm100/pair.hpp"
#include "ops/sparse_mla_forward/sm100/single.hpp"
#include "ops/sparse_mla_forward/trim_rows.hpp"
#include "runtime/launch.hpp"

namespace hopwell::ops::sparse_mla_forward::HOPWELL_TARGET {
namespace {

// CTA pairs per query, each for 65 to 128 heads. Up to 64 remaining heads run on a single CTA, which takes 1,920 cycles
// for 64 keys (single.hpp). A pair would take 1,250 cycles on each of two SMs (pair.hpp).
std::int64_t pairs_of(const Problem& p) { return (p.h_q + Config::kHeads - 1) / PairConfig::kHeads; }

runtime::PlanOr<TrimmedRowsPlan> plan(const Problem& p) {
  using runtime::Unsupported;
  if (p.window) return Unsupported{"needs a call without window_kv"};
  if (p.q.dtype != DType::kBFloat16) return Unsupported{"needs bfloat16 q and kv"};
  if ((p.d_qk != 576 && p.d_qk != 512) || p.d_v != 512) return Unsupported{"needs d_qk 576 or 512, d_v 512"};
  if (!tile::rows_aligned(p.q, 2) || !tile::rows_aligned(p.kv, 1) || (p.s_kv > 1 && p.kv.stride[0] < 1))
    return Unsupported{"needs rows of q and kv 16-byte aligned, a positive row stride of kv"};
  if (!runtime::fit_in_ints({p.s_q * (2 * pairs_of(p) + 1), p.s_kv, p.topk}))
    return Unsupported{"needs s_q times blocks of 64 heads, s_kv and topk below 2^31 - 1024"};
  return trimmed_rows_plan(p);
}

template <int kDqk>
void launch_with_width(const Problem& problem, const tile::SelectionParams& selection, Stream stream) {
  const std::int64_t pairs = pairs_of(problem);
  GatherParams p{params_of(problem, selection), tile::map_of_rows(problem.kv, problem.q, 64, arch::Swizzle::bytes128)};
  p.out_sectors = tile::rows_aligned(problem.out, 2, 32);
  p.head_tiles = static_cast<int>(pairs), p.work_tiles = static_cast<std::uint32_t>(problem.s_q * pairs);
  if (pairs > 0)
    runtime::launch(
        "sparse_mla_forward", sparse_mla_fwd_sm100_pair<kDqk>,
        {.grid = {2 * std::min(p.work_tiles, std::max(1U, static_cast<std::uint32_t>(problem.device.sms) / 2))},
         .threads = PairConfig::kThreads,
         .cluster = 2,
         .shared_bytes = sizeof(PairStorage<kDqk>)},
        stream, p);
  p.first_head = static_cast<int>(PairConfig::kHeads * pairs);
  if (p.first_head < problem.h_q)
    runtime::launch("sparse_mla_forward", sparse_mla_fwd_sm100_single<kDqk>,
                    runtime::shape_of_ctas(problem.s_q, SingleConfig::kThreads, sizeof(SingleStorage<kDqk>)), stream,
                    p);
}

void launch(const Problem& problem, const TrimmedRowsPlan& plan, void* workspace, Stream stream) {
  if (problem.s_q == 0) return;
  trim_rows(problem, plan.trimmed, workspace, stream);
  const auto selection = selection_of(problem, plan.trimmed, workspace);
  runtime::with_constant<576, 512>(problem.d_qk,
                                   [&]<int kDqk>() { launch_with_width<kDqk>(problem, selection, stream); });
}

const runtime::Registration backend{runtime::kBackend, plan, launch};

}  // namespace
}  // namespace hopwell::ops::sparse_mla_forward::HOPWELL_TARGET
