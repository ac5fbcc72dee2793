// sparse_mla_backward on Hopper: what runs for a call, in which order, over which scratch memory.
//
//     deterministic sums: attention_distribution, measure_keys, bound_entries, choose_units    sm90_fixed.hpp
//     order_rows, clear_rows                                                                   sm90_passes.hpp
//     the main kernel: 128 heads of a query on two CTAs, what is left 64 heads a CTA           sm90_pair.hpp, sm90_single.hpp
//     arrange_dkv, finish_dkv or finish_fixed_dkv; arrange_attn; sum_d_sink
#include <algorithm>

#include "ops/attention_distribution/op.hpp"
#include "ops/sparse_mla_backward/op.hpp"
#include "ops/sparse_mla_backward/sm90_pair.hpp"
#include "ops/sparse_mla_backward/sm90_passes.hpp"

namespace hopwell::ops::sparse_mla_backward {
namespace {

namespace distribution = attention_distribution;

constexpr const char* kName = "sparse_mla_backward";
constexpr const char* kBackend = HOPWELL_ON_DEVICE ? "sm90" : "emu:sm90";

// Deterministic calls take attn from attention_distribution, which adds nothing in an order that depends on time, and
// bound the sums of dkv by it.
bool needs_distribution(const Problem& p) { return p.deterministic && p.s_q > 0 && p.topk > 0 && (p.dkv || p.attn); }
bool adds_fixed_point(const Problem& p) { return p.dkv && needs_distribution(p); }

// Whether the kernel adds to the output itself; otherwise to scratch memory, from where the sums are then brought.
bool adds_to_output(const Problem& p) {
  return !adds_fixed_point(p) && !p.accumulate && p.dkv.dtype == DType::kFloat32 &&
         reinterpret_cast<std::uintptr_t>(p.dkv.data) % 16 == 0 && p.dkv.stride[0] % 4 == 0 &&
         p.dkv.stride[0] < std::int64_t{1} << 31;
}

// Whether CTAs go through ascending rows in step, which pays where the sums do not fit in L2 and many queries add to
// them; the emulator, which knows no speed, always has such rows.
bool keeps_step(const Problem& p) {
  constexpr std::int64_t kCachedBytes = 40 << 20;
  const bool pays = p.s_kv * p.d_qk * 4 > kCachedBytes && p.s_q >= p.device.sms && p.topk >= 256;
  return p.dkv && p.s_q > 0 && (pays || p.device.emulated()) && (p.topk <= kLongestSorted || p.indices_ascending);
}
bool orders_rows(const Problem& p) { return keeps_step(p) && !p.indices_ascending; }

// The two main kernels: how many heads one takes of a query, on how many CTAs; and how much there is for it.
struct Part {
  int heads, ctas, first_head, head_blocks;
};
Part pairs_of(const Problem& p) {
  // The pair has no registers left for fixed point.
  return {PairConfig::kHeads, 2, 0, adds_fixed_point(p) ? 0 : static_cast<int>((p.h_q + 63) / PairConfig::kHeads)};
}
Part singles_of(const Problem& p) {
  const Part pairs = pairs_of(p);
  const int first = pairs.heads * pairs.head_blocks;
  return {Config::kHeads, 1, first, static_cast<int>((p.h_q - first + Config::kHeads - 1) / Config::kHeads)};
}

// How the pieces of a part are shared out: whole ones while they fill the device, then, where what is left would leave
// most of it idle, slices of their keys.
struct Share {
  std::int64_t whole = 0, cut = 0, slices = 1;
};
Share share_of(const Problem& p, const Part& part) {
  constexpr std::int64_t kMostSlices = 8;
  const std::int64_t pieces = p.s_q * part.head_blocks, at_a_time = std::max(p.device.sms / part.ctas, 1),
                     rest = pieces % at_a_time;
  if (rest == 0 || (p.dkv && !adds_to_output(p))) return {pieces};
  // What they give of dQ takes no more memory than sums of dKV would that are not added to the output; or 2.4 MB.
  const std::int64_t rows = std::max<std::int64_t>(p.s_kv, 1024), fit = rows / (rest * part.heads),
                     steps = (p.topk + Config::kKeys - 1) / Config::kKeys,
                     slices = std::min({kMostSlices, at_a_time / rest, steps, fit});
  return slices > 1 ? Share{pieces - rest, rest, slices} : Share{pieces};
}
std::int64_t bytes_of_slices(const Problem& p, const Part& part) {
  const Share share = share_of(p, part);
  return p.dq ? 4 * share.cut * share.slices * part.heads * p.d_qk : 0;
}

// What lies in the workspace, by offsets in bytes. The distribution is no longer needed when rows are put in order.
struct Workspace {
  std::size_t dkv = 0, scale = 0, most = 0, count = 0, sink_parts = 0, rows = 0, places = 0, lengths = 0, progress = 0,
              dq_slices = 0, bytes = 0;

  explicit Workspace(const Problem& p) {
    const auto place = [this](std::int64_t size) {
      const std::size_t at = bytes;
      bytes += (static_cast<std::size_t>(size) + 255) / 256 * 256;
      return at;
    };
    if (p.dkv && !adds_to_output(p)) dkv = place(4 * p.s_kv * p.d_qk);
    if (adds_fixed_point(p)) {
      scale = place(4 * p.s_kv);
      most = place(4 * p.s_kv);
      count = place(4 * p.s_kv);
    }
    if (p.d_sink) sink_parts = place(4 * p.s_q * p.h_q);
    if (orders_rows(p) || (needs_distribution(p) && !p.attn)) rows = place(4 * p.s_q * p.topk);
    if (keeps_step(p)) progress = place(sizeof(uint32_t));
    dq_slices = place(std::max(bytes_of_slices(p, pairs_of(p)), bytes_of_slices(p, singles_of(p))));
    if (!orders_rows(p)) return;
    if (p.attn && !needs_distribution(p)) places = place(2 * p.s_q * p.topk);
    lengths = place(4 * p.s_q);
  }
  template <class T>
  static T* at(const Problem& p, std::size_t offset) {
    return reinterpret_cast<T*>(static_cast<std::byte*>(p.workspace) + offset);
  }
};

// The call of attention_distribution that a deterministic call makes.
distribution::Problem distribution_of(const Problem& p) {
  distribution::Problem d;
  d.q = p.q, d.kv = p.kv, d.lse = p.lse, d.attn = p.attn;
  if (!p.attn) {
    d.attn.data = Workspace::at<float>(p, Workspace(p).rows);
    d.attn.dtype = DType::kFloat32, d.attn.ndim = 2, d.attn.present = true;
    d.attn.shape = {p.s_q, p.topk}, d.attn.stride = {p.topk, 1};
  }
  d.selection = p.selection, d.sm_scale = p.sm_scale;
  d.s_q = p.s_q, d.s_kv = p.s_kv, d.h_q = p.h_q, d.d_qk = p.d_qk, d.topk = p.topk, d.device = p.device;
  return d;
}

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
  if (p.dkv &&
      p.s_kv * (adds_fixed_point(p) ? p.d_qk / 2 : (adds_to_output(p) ? p.dkv.stride[0] : p.d_qk) / 4) >= kLimit)
    return Support::no("dkv must have fewer than 2^33 elements, 2^32 if deterministic");
  if (p.kv.stride[0] >= kLimit || p.topk >= kLimit - Config::kKeys)
    return Support::no("the row stride of kv and topk must be below 2^31");
  if (p.s_q * ((p.h_q + Config::kHeads - 1) / Config::kHeads) >= kLimit)
    return Support::no("s_q times blocks of 64 heads must be below 2^31");
  return {};
}

Params params_of(const Problem& problem, const Workspace& workspace) {
  Params p{};
  p.selection = tile::params_of(problem.selection);
  p.q = problem.q.as<const bf16>(), p.kv = problem.kv.as<const bf16>();
  p.out = problem.out.as<const bf16>(), p.d_out = problem.d_out.as<const bf16>();
  p.lse = problem.lse.as<const float>(), p.sink = problem.attn_sink.as<const float>();
  p.dq = problem.dq.as<bf16>(), p.attn = needs_distribution(problem) ? nullptr : problem.attn.as<float>();
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
  }
  if (keeps_step(problem)) {
    // The count of steps must fit; and the emulator runs CTAs in turn, where waiting for others is in vain.
    if (!problem.device.emulated() && problem.s_q * (problem.h_q + 63) < std::int64_t{1} << 31)
      p.progress = Workspace::at<uint32_t>(problem, workspace.progress);
    // What CTAs that are so many steps apart add to should stay in L2.
    constexpr std::int64_t kWindow = 16 << 20;
    const std::int64_t steps = std::max<std::int64_t>(problem.topk / Config::kKeys, 1),
                       step_bytes = problem.s_kv * problem.d_qk * 4 / steps;
    p.slack = static_cast<int>(std::clamp<std::int64_t>(kWindow / std::max<std::int64_t>(step_bytes, 1), 1, 8));
  }
  p.h_q = static_cast<int>(problem.h_q), p.wave = problem.device.sms;
  p.sm_scale = problem.sm_scale, p.scale_log2 = problem.sm_scale * 1.44269504088896F;
  if (problem.d_sink) p.sink_parts = Workspace::at<float>(problem, workspace.sink_parts);
  if (!problem.dkv) return p;
  p.dkv_stride = static_cast<int>(problem.d_qk);
  // Additions that miss L2 are slow. Where most would, rows are fetched a step ahead; where few do, that costs more.
  constexpr std::int64_t kMostlyMissed = 200 << 20;
  p.prefetch = problem.s_kv * problem.d_qk * 4 > kMostlyMissed || problem.device.emulated();
  if (adds_fixed_point(problem)) {
    p.fixed_dkv = Workspace::at<int64_t>(problem, workspace.dkv);
    p.scale = Workspace::at<float>(problem, workspace.scale);
  } else if (adds_to_output(problem)) {
    p.dkv = problem.dkv.as<float>();
    p.dkv_stride = static_cast<int>(problem.dkv.stride[0]);
  } else {
    p.dkv = Workspace::at<float>(problem, workspace.dkv);
  }
  return p;
}

template <int kDqk, int kHeadSteps>
auto kernel_for(bool fixed, bool attn) {
  return fixed  ? kernel<kDqk, kHeadSteps, true, false>
         : attn ? kernel<kDqk, kHeadSteps, false, true>
                : kernel<kDqk, kHeadSteps, false, false>;
}
template <int kDqk>
auto kernel_for(int h_q, bool fixed, bool attn) {
  return h_q <= 32 ? kernel_for<kDqk, 2>(fixed, attn) : kernel_for<kDqk, 4>(fixed, attn);
}

// attn, and the units of fixed-point sums.
void choose_fixed_point(const Problem& problem, const Workspace& workspace, Stream stream) {
  const distribution::Problem attn = distribution_of(problem);
  runtime::run("attention_distribution", attn, kBackend, stream);
  if (!problem.dkv || problem.s_kv == 0) return;
  BoundParams p{};
  p.selection = tile::params_of(problem.selection);
  p.q = problem.q.as<const bf16>(), p.kv = problem.kv.as<const bf16>();
  p.out = problem.out.as<const bf16>(), p.d_out = problem.d_out.as<const bf16>();
  p.lse = problem.lse.as<const float>(), p.attn = attn.attn.as<const float>();
  p.q_stride_s = problem.q.stride[0], p.q_stride_h = problem.q.stride[1], p.kv_stride = problem.kv.stride[0];
  p.out_stride_s = problem.out.stride[0], p.out_stride_h = problem.out.stride[1];
  p.d_out_stride_s = problem.d_out.stride[0], p.d_out_stride_h = problem.d_out.stride[1];
  p.lse_stride_s = problem.lse.stride[0], p.lse_stride_h = problem.lse.stride[1], p.attn_stride = attn.attn.stride[0];
  p.keys = {Workspace::at<float>(problem, workspace.scale), Workspace::at<uint32_t>(problem, workspace.most),
            Workspace::at<uint32_t>(problem, workspace.count)};
  p.h_q = static_cast<int>(problem.h_q), p.d_qk = static_cast<int>(problem.d_qk), p.sm_scale = problem.sm_scale;
  const arch::LaunchShape over_keys{.grid = {pass_grid(problem.s_kv, problem.device)}, .threads = kPassThreads};
  runtime::launch(kName, measure_keys, over_keys, stream, p);
  runtime::launch(kName, bound_entries,
                  {.grid = {static_cast<std::uint32_t>(problem.s_q)},
                   .threads = kPassThreads,
                   .shared_bytes = kPassWarps * sizeof(QueryBound)},
                  stream, p);
  runtime::launch(kName, choose_units, over_keys, stream, UnitParams{p.keys, problem.s_kv});
}

// Rows in order, and zeros where sums are added.
void prepare_sums(const Problem& problem, const Workspace& workspace, const Params& p, Stream stream) {
  ClearParams sums{}, attn{};
  if (p.attn) attn = {problem.attn.as<uint32_t>(), problem.s_q, problem.topk, problem.attn.stride[0]};
  if (problem.dkv && adds_to_output(problem))
    sums = {problem.dkv.as<uint32_t>(), problem.s_kv, problem.d_qk, problem.dkv.stride[0]};
  else if (problem.dkv)
    sums = {Workspace::at<uint32_t>(problem, workspace.dkv), problem.s_kv, problem.d_qk, problem.d_qk};
  if (p.progress) clear({p.progress, 1, 1, 1}, problem.device, stream);
  if (!orders_rows(problem)) {
    clear(attn, problem.device, stream);
    clear(sums, problem.device, stream);
    return;
  }
  const OrderParams order{tile::params_of(problem.selection),
                          Workspace::at<int>(problem, workspace.rows),
                          p.attn ? Workspace::at<uint16_t>(problem, workspace.places) : nullptr,
                          Workspace::at<int>(problem, workspace.lengths),
                          sums,
                          attn};
  runtime::launch(kName, order_rows,
                  {.grid = {static_cast<std::uint32_t>(problem.s_q)},
                   .threads = kOrderThreads,
                   .shared_bytes = sizeof(OrderStorage)},
                  stream, order);
}

// What was added, to the outputs as they are promised.
void finish_sums(const Problem& problem, const Workspace& workspace, const Params& p, Stream stream) {
  if (problem.dkv && problem.s_kv > 0) {
    const arch::LaunchShape over_keys{.grid = {pass_grid(problem.s_kv, problem.device)}, .threads = kPassThreads};
    const bool wide = problem.dkv.dtype == DType::kFloat32;
    const FinishParams finish{p.dkv,
                              wide ? problem.dkv.as<float>() : nullptr,
                              wide ? nullptr : problem.dkv.as<bf16>(),
                              problem.dkv.stride[0],
                              problem.s_kv,
                              static_cast<int>(problem.d_qk),
                              problem.accumulate};
    if (p.fixed_dkv)
      runtime::launch(kName, finish_fixed_dkv, over_keys, stream, FinishFixedParams{p.fixed_dkv, p.scale, finish});
    else if (adds_to_output(problem))
      runtime::launch(kName, arrange_dkv, over_keys, stream,
                      ArrangeParams{p.dkv, problem.dkv.stride[0], problem.s_kv, static_cast<int>(problem.d_qk)});
    else
      runtime::launch(kName, finish_dkv, over_keys, stream, finish);
  }
  if (p.attn && orders_rows(problem) && problem.s_q > 0)
    runtime::launch(kName, arrange_attn,
                    {.grid = {static_cast<std::uint32_t>(problem.s_q)},
                     .threads = kOrderThreads,
                     .shared_bytes = 4 * kLongestSorted},
                    stream,
                    ArrangeAttnParams{p.attn, Workspace::at<uint16_t>(problem, workspace.places),
                                      Workspace::at<int>(problem, workspace.lengths), p.attn_stride,
                                      static_cast<int>(problem.topk)});
  if (!problem.d_sink) return;
  const SinkParams sink{p.sink_parts, problem.d_sink.as<float>(), problem.s_q, problem.d_sink.stride[0], p.h_q};
  runtime::launch(kName, sum_d_sink,
                  {.grid = {static_cast<std::uint32_t>((problem.h_q + 31) / 32)},
                   .threads = 32 * kSinkWarps,
                   .shared_bytes = 4 * 32 * kSinkWarps},
                  stream, sink);
}

// A part's pieces, and dQ of those that are cut.
void run_part(const Problem& problem, const Workspace& workspace, Params p, const Part& part, void (*kernel)(Params),
              std::size_t shared_bytes, Stream stream) {
  const Share share = share_of(problem, part);
  const std::int64_t steps = (problem.topk + Config::kKeys - 1) / Config::kKeys,
                     count = share.whole + share.cut * share.slices;
  if (count == 0) return;
  p.first_head = part.first_head, p.head_blocks = part.head_blocks;
  p.whole = static_cast<int>(share.whole), p.slices = static_cast<int>(share.slices);
  p.slice_entries = static_cast<int>((steps + share.slices - 1) / share.slices * Config::kKeys);
  p.dq_slices = Workspace::at<float>(problem, workspace.dq_slices);
  const auto ctas = static_cast<std::uint32_t>(part.ctas);
  runtime::launch(kName, kernel,
                  {.grid = {ctas * static_cast<std::uint32_t>(count)},
                   .threads = Config::kThreads,
                   .cluster = ctas,
                   .shared_bytes = shared_bytes},
                  stream, p);
  if (!p.dq || share.cut == 0) return;
  runtime::launch(kName, sum_dq,
                  {.grid = {static_cast<std::uint32_t>(share.cut * part.heads)}, .threads = kPassThreads}, stream,
                  SumDqParams{p.dq_slices, p.dq, p.dq_stride_s, p.dq_stride_h, p.whole, part.first_head,
                              part.head_blocks, part.heads, p.slices, p.h_q, static_cast<int>(problem.d_qk)});
}

void launch(const Problem& problem, Stream stream) {
  const Workspace workspace(problem);
  const Params p = params_of(problem, workspace);
  if (needs_distribution(problem)) choose_fixed_point(problem, workspace, stream);
  prepare_sums(problem, workspace, p, stream);
  const bool wide = problem.d_qk == 576, fixed = p.fixed_dkv, attn = p.attn;
  const auto pair = wide ? (attn ? pair_kernel<576, true> : pair_kernel<576, false>)
                         : (attn ? pair_kernel<512, true> : pair_kernel<512, false>);
  run_part(problem, workspace, p, pairs_of(problem), pair, sizeof(PairStorage), stream);
  run_part(problem, workspace, p, singles_of(problem),
           wide ? kernel_for<576>(p.h_q, fixed, attn) : kernel_for<512>(p.h_q, fixed, attn),
           wide ? sizeof(SharedStorage<576>) : sizeof(SharedStorage<512>), stream);
  finish_sums(problem, workspace, p, stream);
}

const runtime::Registration<Problem> backend{
    {.name = kBackend, .supports = supports, .workspace_bytes = workspace_bytes, .launch = launch}};

}  // namespace
}  // namespace hopwell::ops::sparse_mla_backward
