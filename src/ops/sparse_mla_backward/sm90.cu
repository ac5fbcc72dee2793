// sparse_mla_backward on Hopper: what runs for a call, in which order, over which scratch memory.
//
//     order_rows → clear_rows → bound_queries, bound_keys → the main kernel → arrange_dkv or finish_dkv, sum_d_sink     sm90_passes.hpp
//     the main kernel: one query and 64 heads a CTA                                                    sm90_single.hpp
#include <algorithm>

#include "ops/sparse_mla_backward/op.hpp"
#include "ops/sparse_mla_backward/sm90_passes.hpp"
#include "ops/sparse_mla_backward/sm90_single.hpp"

namespace hopwell::ops::sparse_mla_backward {
namespace {

// ---- host

// Whether the kernel adds to the output itself; otherwise to scratch memory, from where the sums are then brought.
bool adds_to_output(const Problem& p) {
  return !p.deterministic && !p.accumulate && p.dkv.dtype == DType::kFloat32 &&
         reinterpret_cast<std::uintptr_t>(p.dkv.data) % 16 == 0 && p.dkv.stride[0] % 4 == 0 &&
         p.dkv.stride[0] < std::int64_t{1} << 31;
}

// Whether each row of indices is put into ascending order first, which pays where the sums do not fit in L2 and many
// queries add to them; the emulator, which knows no speed, always does it.
bool orders_rows(const Problem& p) {
  constexpr std::int64_t kCachedBytes = 40 << 20;
  const bool pays = p.s_kv * p.d_qk * (p.deterministic ? 8 : 4) > kCachedBytes && p.s_q >= 132 && p.topk >= 256;
  return p.dkv && p.s_q > 0 && p.topk <= kLongestSorted && (pays || !HOPWELL_ON_DEVICE);
}

// What lies in the workspace, by offsets in bytes.
struct Workspace {
  std::size_t dkv = 0, state = 0, fixed = 0, sink_parts = 0, rows = 0, places = 0, lengths = 0, progress = 0, bytes = 0;

  explicit Workspace(const Problem& p) {
    const auto place = [this](std::int64_t size) {
      const std::size_t at = bytes;
      bytes += (static_cast<std::size_t>(size) + 255) / 256 * 256;
      return at;
    };
    if (p.dkv && !adds_to_output(p)) dkv = place(p.s_kv * p.d_qk * (p.deterministic ? 8 : 4));
    if (p.dkv && p.deterministic) {
      state = place(p.s_kv);
      fixed = place(sizeof(FixedPoint));
    }
    if (p.d_sink) sink_parts = place(4 * p.s_q * p.h_q);
    if (!orders_rows(p)) return;
    rows = place(4 * p.s_q * p.topk);
    if (p.attn) places = place(2 * p.s_q * p.topk);
    lengths = place(4 * p.s_q);
    progress = place(sizeof(uint32_t));
  }
  template <class T>
  static T* at(const Problem& p, std::size_t offset) {
    return reinterpret_cast<T*>(static_cast<std::byte*>(p.workspace) + offset);
  }
};

std::size_t workspace_bytes(const Problem& p) { return Workspace(p).bytes; }

runtime::Support supports(const Problem& p) {
  using runtime::Support;
  if (p.q.dtype != DType::kBFloat16) return Support::no("q and kv must be bfloat16");
  if (p.d_qk != 576 && p.d_qk != 512) return Support::no("d_qk must be 576 or 512");
  if (p.d_v != Config::kDv) return Support::no("d_v must be 512");
  const auto aligned = [](const View& v, int dims) {
    bool ok = reinterpret_cast<std::uintptr_t>(v.data) % 16 == 0;
    for (std::size_t i = 0; i < static_cast<std::size_t>(dims); ++i) ok &= v.shape[i] <= 1 || v.stride[i] % 8 == 0;
    return ok;
  };
  if (!aligned(p.q, 2) || !aligned(p.kv, 1) || !aligned(p.out, 2) || !aligned(p.d_out, 2) || !aligned(p.dq, 2))
    return Support::no("rows of q, kv, out, d_out and dq must be 16-byte aligned");
  constexpr std::int64_t kLimit = std::int64_t{1} << 31;
  if (p.dkv && p.s_kv * (p.deterministic ? p.d_qk : (adds_to_output(p) ? p.dkv.stride[0] : p.d_qk) / 4) >= kLimit)
    return Support::no("dkv must have fewer than 2^33 elements, 2^31 if deterministic");
  if (p.kv.stride[0] >= kLimit || p.topk >= kLimit - Config::kKeys)
    return Support::no("the row stride of kv and topk must be below 2^31");
  if (p.s_q * ((p.h_q + Config::kHeads - 1) / Config::kHeads) >= kLimit)
    return Support::no("s_q times blocks of 64 heads must be below 2^31");
  return {};
}

int log2_above(std::int64_t n) {
  int bits = 0;
  while (bits < 62 && (std::int64_t{1} << bits) < n) ++bits;
  return bits;
}

Params params_of(const Problem& problem, const Workspace& workspace) {
  Params p{};
  p.selection = tile::params_of(problem.selection);
  p.q = problem.q.as<const bf16>(), p.kv = problem.kv.as<const bf16>();
  p.out = problem.out.as<const bf16>(), p.d_out = problem.d_out.as<const bf16>();
  p.lse = problem.lse.as<const float>(), p.sink = problem.attn_sink.as<const float>();
  p.dq = problem.dq.as<bf16>(), p.attn = problem.attn.as<float>();
  p.q_stride_s = problem.q.stride[0], p.q_stride_h = problem.q.stride[1];
  p.out_stride_s = problem.out.stride[0], p.out_stride_h = problem.out.stride[1];
  p.d_out_stride_s = problem.d_out.stride[0], p.d_out_stride_h = problem.d_out.stride[1];
  p.lse_stride_s = problem.lse.stride[0], p.lse_stride_h = problem.lse.stride[1];
  p.sink_stride = problem.attn_sink.stride[0], p.attn_stride = problem.attn.stride[0];
  p.dq_stride_s = problem.dq.stride[0], p.dq_stride_h = problem.dq.stride[1];
  p.kv_stride = static_cast<int>(problem.kv.stride[0]);
  if (orders_rows(problem)) {
    p.selection.indices = Workspace::at<int>(problem, workspace.rows), p.selection.indices_stride = problem.topk;
    p.selection.topk_length = Workspace::at<int>(problem, workspace.lengths), p.selection.length_stride = 1;
    p.selection.q_positions = nullptr, p.selection.causal_from_start = false;
    if (problem.attn) p.places = Workspace::at<uint16_t>(problem, workspace.places);
    // The count of steps must fit; and the emulator runs CTAs in turn, where waiting for others is in vain.
    if (HOPWELL_ON_DEVICE && problem.s_q * (problem.h_q + 63) < std::int64_t{1} << 31)
      p.progress = Workspace::at<uint32_t>(problem, workspace.progress);
    // What CTAs that are so many steps apart add to should stay in L2.
    constexpr std::int64_t kWindow = 16 << 20;
    const std::int64_t steps = std::max<std::int64_t>(problem.topk / Config::kKeys, 1),
                       step_bytes = problem.s_kv * problem.d_qk * 4 / steps;
    p.slack = static_cast<int>(std::clamp<std::int64_t>(kWindow / std::max<std::int64_t>(step_bytes, 1), 1, 8));
  }
  p.h_q = static_cast<int>(problem.h_q), p.log2_sums = log2_above(problem.s_q * problem.h_q);
  p.sm_scale = problem.sm_scale, p.scale_log2 = problem.sm_scale * 1.44269504088896F;
  if (problem.d_sink) p.sink_parts = Workspace::at<float>(problem, workspace.sink_parts);
  if (!problem.dkv) return p;
  p.dkv_stride = static_cast<int>(problem.d_qk);
  if (problem.deterministic) {
    p.fixed_dkv = Workspace::at<int64_t>(problem, workspace.dkv);
    p.state = Workspace::at<KeyState>(problem, workspace.state);
    p.fixed = Workspace::at<FixedPoint>(problem, workspace.fixed);
  } else if (adds_to_output(problem)) {
    p.dkv = problem.dkv.as<float>();
    p.dkv_stride = static_cast<int>(problem.dkv.stride[0]);
  } else {
    p.dkv = Workspace::at<float>(problem, workspace.dkv);
  }
  return p;
}

template <int kDqk>
auto kernel_for(bool fixed, bool attn) {
  if (fixed) return attn ? kernel<kDqk, true, true> : kernel<kDqk, true, false>;
  return attn ? kernel<kDqk, false, true> : kernel<kDqk, false, false>;
}

constexpr const char* kName = "sparse_mla_backward";

// Zeros where sums are added; the bound of fixed-point sums.
void prepare_sums(const Problem& problem, const Workspace& workspace, const Params& p, Stream stream) {
  if (orders_rows(problem)) {
    const OrderParams order{tile::params_of(problem.selection), Workspace::at<int>(problem, workspace.rows),
                            problem.attn ? Workspace::at<uint16_t>(problem, workspace.places) : nullptr,
                            Workspace::at<int>(problem, workspace.lengths),
                            Workspace::at<uint32_t>(problem, workspace.progress)};
    runtime::launch(kName, order_rows,
                    {.grid = {static_cast<std::uint32_t>(problem.s_q)},
                     .threads = kOrderThreads,
                     .shared_bytes = sizeof(OrderStorage)},
                    stream, order);
  }
  const std::int64_t words = problem.d_qk * (problem.deterministic ? 2 : 1);
  if (problem.attn) clear(problem.attn.as<uint32_t>(), problem.s_q, problem.topk, problem.attn.stride[0], stream);
  if (!problem.dkv) return;
  if (!adds_to_output(problem))
    clear(Workspace::at<uint32_t>(problem, workspace.dkv), problem.s_kv, words, words, stream);
  else
    clear(problem.dkv.as<uint32_t>(), problem.s_kv, words, problem.dkv.stride[0], stream);
  if (!problem.deterministic) return;
  const auto state_bytes = static_cast<std::int64_t>(workspace.fixed - workspace.state + 256);
  clear(Workspace::at<uint32_t>(problem, workspace.state), state_bytes / 256, 64, 64, stream);
  if (problem.s_q == 0 || problem.s_kv == 0) return;
  const BoundParams bound{p.selection,
                          p.q,
                          p.d_out,
                          p.kv,
                          p.q_stride_s,
                          p.q_stride_h,
                          p.d_out_stride_s,
                          p.d_out_stride_h,
                          p.kv_stride,
                          p.state,
                          Workspace::at<FixedPoint>(problem, workspace.fixed),
                          p.h_q,
                          static_cast<int>(problem.d_qk)};
  runtime::launch(
      kName, bound_queries,
      {.grid = {static_cast<std::uint32_t>(problem.s_q)}, .threads = kPassThreads, .shared_bytes = 4 * kPassWarps},
      stream, bound);
  runtime::launch(kName, bound_keys, {.grid = {pass_grid(problem.s_kv)}, .threads = kPassThreads}, stream, bound);
}

// What was added, to the outputs as they are promised.
void finish_sums(const Problem& problem, const Params& p, Stream stream) {
  if (problem.dkv && problem.s_kv > 0 && adds_to_output(problem)) {
    runtime::launch(kName, arrange_dkv, {.grid = {pass_grid(problem.s_kv)}, .threads = kPassThreads}, stream,
                    ArrangeParams{p.dkv, problem.dkv.stride[0], problem.s_kv, static_cast<int>(problem.d_qk)});
  }
  if (problem.dkv && problem.s_kv > 0 && !adds_to_output(problem)) {
    const bool wide = problem.dkv.dtype == DType::kFloat32;
    const FinishParams finish{p.dkv,
                              p.fixed_dkv,
                              p.state,
                              p.fixed,
                              wide ? problem.dkv.as<float>() : nullptr,
                              wide ? nullptr : problem.dkv.as<bf16>(),
                              problem.dkv.stride[0],
                              problem.s_kv,
                              static_cast<int>(problem.d_qk),
                              p.log2_sums,
                              p.sm_scale,
                              problem.accumulate};
    runtime::launch(kName, finish_dkv, {.grid = {pass_grid(problem.s_kv)}, .threads = kPassThreads}, stream, finish);
  }
  if (!problem.d_sink) return;
  const SinkParams sink{p.sink_parts, problem.d_sink.as<float>(), problem.s_q, problem.d_sink.stride[0], p.h_q};
  runtime::launch(kName, sum_d_sink,
                  {.grid = {static_cast<std::uint32_t>((problem.h_q + 31) / 32)},
                   .threads = 32 * kSinkWarps,
                   .shared_bytes = 4 * 32 * kSinkWarps},
                  stream, sink);
}

void launch(const Problem& problem, Stream stream) {
  const Workspace workspace(problem);
  Params p = params_of(problem, workspace);
  prepare_sums(problem, workspace, p, stream);
  const auto kernel = problem.d_qk == 576 ? kernel_for<576>(p.fixed_dkv, p.attn) : kernel_for<512>(p.fixed_dkv, p.attn);
  const auto shared_bytes = problem.d_qk == 576 ? sizeof(SharedStorage<576>) : sizeof(SharedStorage<512>);
  const auto head_blocks = static_cast<int>((problem.h_q + Config::kHeads - 1) / Config::kHeads);
  p.wave = 132;  // of an H100 or H200
  // 0 + x + y has the same bits in any order, further terms do not: then the kernels of further heads follow one
  // another.
  const bool in_turn = problem.deterministic && problem.attn;
  for (int block = 0; block < head_blocks && problem.s_q > 0; block += p.head_blocks) {
    p.first_head = block * Config::kHeads;
    p.head_blocks = std::min(!in_turn ? head_blocks : block == 0 ? 2 : 1, head_blocks - block);
    runtime::launch(kName, kernel,
                    {.grid = {static_cast<std::uint32_t>(problem.s_q * p.head_blocks)},
                     .threads = Config::kThreads,
                     .shared_bytes = shared_bytes},
                    stream, p);
  }
  finish_sums(problem, p, stream);
}

const runtime::Registration<Problem> backend{{.name = HOPWELL_ON_DEVICE ? "sm90" : "emu:sm90",
                                              .supports = supports,
                                              .workspace_bytes = workspace_bytes,
                                              .launch = launch}};

}  // namespace
}  // namespace hopwell::ops::sparse_mla_backward
