// sparse_mla_forward for Hopper: which kernel runs what.
#include <algorithm>

#include "ops/sparse_mla_forward/op.hpp"
#include "ops/sparse_mla_forward/sm90_few_heads.hpp"
#include "ops/sparse_mla_forward/sm90_many_heads.hpp"
#include "runtime/launch.hpp"

namespace hopwell::ops::sparse_mla_forward {
namespace {

runtime::Support supports(const Problem& p) {
  if (p.q.dtype != DType::kBFloat16) return runtime::Support::no("q and kv must be bfloat16");
  if (p.d_qk != 576 && p.d_qk != 512) return runtime::Support::no("d_qk must be 576 or 512");
  if (p.d_v != 512) return runtime::Support::no("d_v must be 512");
  constexpr std::int64_t kLimit = (std::int64_t{1} << 31) - 1024;
  if (p.s_q >= kLimit || p.s_kv >= kLimit || p.topk >= kLimit || p.h_q >= kLimit ||
      p.s_q * ((p.h_q + 63) / 64) >= kLimit)
    return runtime::Support::no("s_q, s_kv, topk, h_q and s_q · h_q / 64 must be below 2^31 - 1024");
  return {};
}

Params params_of(const Problem& problem, int heads) {
  Params p{};
  p.selection = tile::params_of(problem.selection);
  p.q = problem.q.as<const bf16>();
  p.kv = problem.kv.as<const bf16>();
  p.attn_sink = problem.attn_sink.as<const float>();
  p.out = problem.out.as<bf16>();
  p.max_logits = problem.max_logits.as<float>();
  p.lse = problem.lse.as<float>();
  p.q_stride_s = problem.q.stride[0], p.q_stride_h = problem.q.stride[1], p.kv_stride = problem.kv.stride[0];
  p.sink_stride = problem.attn_sink.stride[0];
  p.out_stride_s = problem.out.stride[0], p.out_stride_h = problem.out.stride[1];
  p.max_stride_s = problem.max_logits.stride[0], p.max_stride_h = problem.max_logits.stride[1];
  p.lse_stride_s = problem.lse.stride[0], p.lse_stride_h = problem.lse.stride[1];
  p.h_q = static_cast<int>(problem.h_q);
  p.head_blocks = (p.h_q + heads - 1) / heads;
  p.pieces = static_cast<std::uint32_t>(problem.s_q * p.head_blocks);
  p.aligned = tile::can_gather(p.q, problem.h_q, p.q_stride_h) && tile::can_gather(p.kv, problem.s_kv, p.kv_stride) &&
              (problem.s_q <= 1 || p.q_stride_s % 8 == 0);
  p.out_aligned = reinterpret_cast<std::uintptr_t>(p.out) % 16 == 0 && (problem.s_q <= 1 || p.out_stride_s % 8 == 0) &&
                  (problem.h_q <= 1 || p.out_stride_h % 8 == 0);
  p.scale_log2 = problem.sm_scale * 1.44269504088896F;
  return p;
}

template <class Shared>
void start(const Problem& problem, void (*kernel)(Params), Stream stream) {
  const Params params = params_of(problem, Shared::kHeads);
  const std::int64_t ctas = problem.device.sms;
  const arch::LaunchShape shape{.grid = {static_cast<std::uint32_t>(std::min<std::int64_t>(params.pieces, ctas))},
                                .threads = Shared::kThreads,
                                .shared_bytes = sizeof(Shared)};
  runtime::launch("sparse_mla_forward", kernel, shape, stream, params);
}

template <int kDqk>
void start_for_heads(const Problem& problem, Stream stream) {
  if (problem.h_q <= 16)
    start<few_heads::Shared<16, kDqk>>(problem, few_heads::kernel<few_heads::Shared<16, kDqk>>, stream);
  else if (problem.h_q <= 32)
    start<few_heads::Shared<32, kDqk>>(problem, few_heads::kernel<few_heads::Shared<32, kDqk>>, stream);
  else
    start<many_heads::Shared<kDqk>>(problem, many_heads::kernel<many_heads::Shared<kDqk>>, stream);
}

void launch(const Problem& problem, Stream stream) {
  if (problem.s_q == 0) return;
  problem.d_qk == 576 ? start_for_heads<576>(problem, stream) : start_for_heads<512>(problem, stream);
}

const runtime::Registration<Problem> backend{
    {.name = HOPWELL_ON_DEVICE ? "sm90" : "emu:sm90", .supports = supports, .launch = launch}};

}  // namespace
}  // namespace hopwell::ops::sparse_mla_forward
