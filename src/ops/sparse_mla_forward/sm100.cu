// sparse_mla_forward for Blackwell: what it takes, and its kernel's launch.
#include "ops/sparse_mla_forward/sm100/attention.hpp"
#include "runtime/launch.hpp"

namespace hopwell::ops::sparse_mla_forward::HOPWELL_TARGET {
namespace {

std::int64_t head_tiles(const Problem& p) { return (p.h_q + Config::kHeads - 1) / Config::kHeads; }

runtime::Support supports(const Problem& p) {
  using runtime::Support;
  if (p.q.dtype != DType::kBFloat16) return Support::no("q and kv must be bfloat16");
  if ((p.d_qk != 576 && p.d_qk != 512) || p.d_v != 512) return Support::no("d_qk must be 576 or 512, d_v 512");
  if (!rows_aligned(p.q, 2) || !rows_aligned(p.kv, 1) || (p.s_kv > 1 && p.kv.stride[0] < 1))
    return Support::no("rows of q and kv must be 16-byte aligned, those of kv in ascending order");
  constexpr std::int64_t kLimit = (std::int64_t{1} << 31) - 1024;
  if (p.s_q * head_tiles(p) >= kLimit || p.s_kv >= kLimit || p.topk >= kLimit)
    return Support::no("s_q times blocks of 64 heads, s_kv and topk must be below 2^31 - 1024");
  return {};
}

template <int kDqk>
void launch_with_width(const Problem& problem, Stream stream) {
  GatherParams p{params_of(problem), tile::map_of_rows(problem.kv, problem.q, kDqk, 64, arch::Swizzle::bytes128)};
  p.head_tiles = static_cast<int>(head_tiles(problem));
  runtime::launch("sparse_mla_forward", attention_kernel<kDqk>,
                  {.grid = {static_cast<std::uint32_t>(problem.s_q * head_tiles(problem))},
                   .threads = Config::kThreads,
                   .shared_bytes = sizeof(SharedStorage<kDqk>)},
                  stream, p);
}

void launch(const Problem& problem, Stream stream) {
  if (problem.s_q == 0) return;
  problem.d_qk == 576 ? launch_with_width<576>(problem, stream) : launch_with_width<512>(problem, stream);
}

const runtime::Registration<Problem> backend{
    {.name = HOPWELL_ON_DEVICE ? "sm100" : "emu:sm100", .supports = supports, .launch = launch}};

}  // namespace
}  // namespace hopwell::ops::sparse_mla_forward::HOPWELL_TARGET
