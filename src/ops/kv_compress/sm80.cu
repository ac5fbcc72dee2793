// kv_compress and kv_compress_backward for any NVIDIA GPU from Ampere on.
#include "ops/kv_compress/backward.hpp"
#include "ops/kv_compress/forward.hpp"
#include "runtime/launch.hpp"
#include "tile/gpu/views.hpp"

namespace hopwell::ops::kv_compress {
namespace {

using namespace HOPWELL_TARGET;

runtime::Support supports_sizes(const Blocks& blocks, std::int64_t d) {
  if (d % 8 != 0) return runtime::Support::no("needs d that is a multiple of 8");
  constexpr std::int64_t kMostRatio = std::int64_t{1} << 29;
  const std::int64_t ctas = (blocks.n + blocks.s / Config::kThreads) * (d / 8);
  if (blocks.ratio > kMostRatio || !runtime::fit_in_ints({blocks.s, blocks.n, 2 * d, ctas}))
    return runtime::Support::no("needs ratio up to 2^29, and s, 2 * d and n * d / 8 below 2^31 - 1024");
  return {};
}
template <class AnyProblem>
runtime::Support supports(const AnyProblem& p) {
  return supports_sizes(p.blocks, p.d);
}

// Whether a thread's columns may be read or written by one instruction.
bool columns_aligned(const View& view) {
  return tile::rows_aligned(view, 1, Config::kColumns * static_cast<std::int64_t>(size_of(view.dtype)));
}

// Calls function(T{}) with the kernels' type of an element of kv.
template <class Function>
void with_element(const View& kv, Function function) {
  kv.dtype == DType::kBFloat16 ? function(arch::bf16{}) : function(float{});
}

template <class T, class AnyProblem>
Operands<T> operands_of(const AnyProblem& p, const Shape& shape) {
  return {.kv = p.kv.template as<const T>(),
          .gate = p.gate.template as<const T>(),
          .position_bias = p.position_bias.template as<const float>(),
          .kv_stride = p.kv.stride[0],
          .gate_stride = p.gate.stride[0],
          .bias_stride = p.position_bias ? p.position_bias.stride[0] : 0,
          .blocks = p.blocks,
          .d = static_cast<int>(p.d),
          .w = static_cast<int>(p.w),
          .ratio = static_cast<int>(p.blocks.ratio),
          .shape = shape,
          .aligned = columns_aligned(p.kv) && columns_aligned(p.gate) && columns_aligned(p.position_bias)};
}

void launch(const Problem& p, Stream stream) {
  if (p.blocks.n == 0) return;
  with_element(p.kv, [&]<class T>(T) {
    const Shape shape = shape_of(p.blocks, p.d);
    const ForwardParams<T> params{.operands = operands_of<T>(p, shape),
                                  .out = p.out.data,
                                  .out_stride = p.out.stride[0],
                                  .out_is_bf16 = p.out.dtype == DType::kBFloat16,
                                  .out_aligned = columns_aligned(p.out)};
    arch::LaunchShape launch_shape = runtime::shape_of_ctas(shape.slabs * tile::ceil_div(p.blocks.n, shape.rows),
                                                            Config::kThreads, shape.groups > 1 ? sizeof(Partials) : 0);
    launch_shape.programmatic_dependency = p.device.has_dependent_launches();
    runtime::launch("kv_compress", kv_compress_forward<T>, launch_shape, stream, params);
  });
}

template <class T>
void launch_windows(const BackwardProblem& p, const BackwardPlan& plan, Stream stream) {
  const std::int64_t window_ctas = plan.strips * plan.shape.slabs;
  if (window_ctas + plan.clearing_ctas == 0) return;
  const bool aligned = (!p.d_kv || columns_aligned(p.d_kv)) && (!p.d_gate || columns_aligned(p.d_gate));
  const BackwardParams<T> params{.operands = operands_of<T>(p, plan.shape),
                                 .d_out = p.d_out.data,
                                 .d_kv = p.d_kv.as<T>(),
                                 .d_gate = p.d_gate.as<T>(),
                                 .planes = p.d_position_bias ? static_cast<float*>(p.workspace) : nullptr,
                                 .d_out_stride = p.d_out.stride[0],
                                 .d_kv_stride = p.d_kv ? p.d_kv.stride[0] : 0,
                                 .d_gate_stride = p.d_gate ? p.d_gate.stride[0] : 0,
                                 .strip_rows = static_cast<int>(plan.strip_rows),
                                 .window_ctas = static_cast<int>(window_ctas),
                                 .d_out_is_bf16 = p.d_out.dtype == DType::kBFloat16,
                                 .gradients_aligned = aligned};
  const bool sums = p.d_position_bias && plan.shape.batches == 1;
  const std::size_t shared = sums ? sizeof(BackwardStorage) : plan.shape.groups > 1 ? sizeof(Partials) : 0;
  arch::LaunchShape shape = runtime::shape_of_ctas(window_ctas + plan.clearing_ctas, Config::kThreads, shared);
  shape.programmatic_dependency = p.device.has_dependent_launches();
  runtime::launch("kv_compress_backward", kv_compress_backward<T>, shape, stream, params);
}

void launch_backward(const BackwardProblem& p, Stream stream) {
  const BackwardPlan plan = make_plan(p);
  with_element(p.kv, [&]<class T>(T) { launch_windows<T>(p, plan, stream); });
  if (!p.d_position_bias || p.d_position_bias.size() == 0) return;
  const SumParams params{.planes = static_cast<const float*>(p.workspace),
                         .out = p.d_position_bias.as<float>(),
                         .count = plan.planes,
                         .out_stride = p.d_position_bias.stride[0],
                         .rows = static_cast<int>(p.blocks.ratio),
                         .w = static_cast<int>(p.w)};
  arch::LaunchShape shape = runtime::shape_of_ctas(tile::ceil_div(p.d_position_bias.size(), 32), Config::kThreads,
                                                   sizeof(float) * Config::kThreads);
  shape.programmatic_dependency = p.device.has_dependent_launches();
  runtime::launch("kv_compress_backward", kv_compress_sum_planes, shape, stream, params);
}

const runtime::Registration<Problem> forward_backend{
    {.name = runtime::kBackend, .supports = supports<Problem>, .launch = launch}};
const runtime::Registration<BackwardProblem> backward_backend{
    {.name = runtime::kBackend,
     .supports = supports<BackwardProblem>,
     .workspace_bytes = [](const BackwardProblem& p) { return make_plan(p).workspace_bytes; },
     .launch = launch_backward}};

}  // namespace
}  // namespace hopwell::ops::kv_compress
