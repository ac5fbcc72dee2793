// kv_compress and kv_compress_backward for any NVIDIA GPU from Ampere on.
#include <cstddef>
#include <string>
#include <utility>

#include "ops/kv_compress/backward.hpp"
#include "ops/kv_compress/forward.hpp"
#include "runtime/launch.hpp"
#include "tile/gpu/views.hpp"

namespace hopwell::ops::kv_compress {
namespace {

using namespace HOPWELL_TARGET;

// Why sizes are not supported; empty if they are.
std::string unsupported(const Blocks& blocks, std::int64_t d) {
  if (d % 8 != 0) return "needs d that is a multiple of 8";
  constexpr std::int64_t kMostRatio = std::int64_t{1} << 29;
  const std::int64_t ctas = (blocks.n + blocks.s / Config::kThreads) * (d / 8);
  if (blocks.ratio > kMostRatio || !runtime::fit_in_ints({blocks.s, blocks.n, 2 * d, ctas}))
    return "needs ratio up to 2^29, and s, 2 * d and n * d / 8 below 2^31 - 1024";
  return {};
}

runtime::PlanOr<ForwardPlan> plan(const Problem& p) {
  if (std::string reason = unsupported(p.blocks, p.d); !reason.empty()) return runtime::Unsupported{std::move(reason)};
  return make_plan(p);
}
runtime::PlanOr<BackwardPlan> plan_backward(const BackwardProblem& p) {
  if (std::string reason = unsupported(p.blocks, p.d); !reason.empty()) return runtime::Unsupported{std::move(reason)};
  return make_plan(p);
}

// Whether a thread's columns may be read or written by one instruction.
bool columns_aligned(const View& view) {
  return tile::rows_aligned(view, 1, Config::kColumns * static_cast<std::int64_t>(size_of(view.dtype)));
}
// Whether exact forms may take the rows of kv and gate.
template <class AnyProblem>
bool entries_aligned(const AnyProblem& p) {
  return tile::rows_aligned(p.kv, 1) && tile::rows_aligned(p.gate, 1);
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

// Calls function.template operator()<T, F>() with the element type of kv and the form of kernel for it.
template <class T, class Function>
void with_form(const Operands<T>& o, bool aligned, Function function) {
  constexpr int kMost = Config::kEntries;
  const int entries = o.blocks.overlap ? 2 * o.ratio : o.ratio, of_thread = entries / o.shape.groups;
  const bool exact = aligned && o.shape.batches == 1 && of_thread * o.shape.groups == entries;
  if (exact && o.blocks.overlap && entries == 8) return function.template operator()<T, Form<8, true, true>>();
  if (exact && o.blocks.overlap && entries == 4) return function.template operator()<T, Form<4, true, true>>();
  if (exact && !o.blocks.overlap && of_thread == 8) return function.template operator()<T, Form<8, false, true>>();
  if (exact && !o.blocks.overlap && of_thread == 4) return function.template operator()<T, Form<4, false, true>>();
  if (exact && !o.blocks.overlap && of_thread == 2) return function.template operator()<T, Form<2, false, true>>();
  function.template operator()<T, Form<kMost, false, false>>();
}

// Calls function(T{}) with the kernels' type of an element of kv.
template <class Function>
void with_element(const View& kv, Function function) {
  kv.dtype == DType::kBFloat16 ? function(arch::bf16{}) : function(float{});
}

void launch(const Problem& p, const ForwardPlan& plan, void* /*workspace*/, Stream stream) {
  if (p.blocks.n == 0) return;
  with_element(p.kv, [&]<class Element>(Element) {
    const ForwardParams<Element> params{.operands = operands_of<Element>(p, plan.shape),
                                        .out = p.out.data,
                                        .out_stride = p.out.stride[0],
                                        .key_tiles = plan.key_tiles,
                                        .out_is_bf16 = p.out.dtype == DType::kBFloat16,
                                        .out_aligned = columns_aligned(p.out)};
    with_form(params.operands, params.operands.aligned && entries_aligned(p), [&]<class T, class F>() {
      runtime::launch(
          "kv_compress", kv_compress_forward<T, F>,
          {.grid = {static_cast<std::uint32_t>(plan.key_tiles.count), static_cast<std::uint32_t>(plan.shape.slabs)},
           .threads = Config::kThreads,
           .shared_bytes = plan.shape.groups > 1 ? sizeof(ForwardStorage<T>) : sizeof(Stage<T>[2]),
           .programmatic_dependency = p.device.has_dependent_launches()},
          stream, params);
    });
  });
}

template <class Element>
BackwardParams<Element> params_of(const BackwardProblem& p, const BackwardPlan& plan, void* workspace) {
  return {.operands = operands_of<Element>(p, plan.shape),
          .d_out = p.d_out.data,
          .d_kv = p.d_kv.as<Element>(),
          .d_gate = p.d_gate.as<Element>(),
          .planes = p.d_position_bias ? static_cast<float*>(workspace) : nullptr,
          .d_out_stride = p.d_out.stride[0],
          .d_kv_stride = p.d_kv ? p.d_kv.stride[0] : 0,
          .d_gate_stride = p.d_gate ? p.d_gate.stride[0] : 0,
          .key_tiles = plan.key_tiles,
          .d_out_is_bf16 = p.d_out.dtype == DType::kBFloat16,
          .d_out_aligned = columns_aligned(p.d_out),
          .gradients_aligned = columns_aligned(p.d_kv) && columns_aligned(p.d_gate)};
}

void launch_windows(const BackwardProblem& p, const BackwardPlan& plan, void* workspace, Stream stream) {
  const std::int64_t ctas = plan.key_tiles.count + plan.clearing_ctas;
  if (ctas == 0) return;
  with_element(p.kv, [&]<class Element>(Element) {
    const BackwardParams<Element> params = params_of<Element>(p, plan, workspace);
    const bool aligned = params.operands.aligned && entries_aligned(p) && params.gradients_aligned;
    with_form(params.operands, aligned, [&]<class T, class F>() {
      const bool sums = p.d_position_bias && plan.shape.batches == 1;
      const std::size_t bytes = sums                    ? sizeof(BackwardStorage<T>)
                                : plan.shape.groups > 1 ? offsetof(BackwardStorage<T>, sums)
                                                        : offsetof(BackwardStorage<T>, partials);
      runtime::launch("kv_compress_backward", kv_compress_backward<T, F>,
                      {.grid = {static_cast<std::uint32_t>(ctas), static_cast<std::uint32_t>(plan.shape.slabs)},
                       .threads = Config::kThreads,
                       .shared_bytes = bytes,
                       .programmatic_dependency = p.device.has_dependent_launches()},
                      stream, params);
    });
  });
}

void launch_backward(const BackwardProblem& p, const BackwardPlan& plan, void* workspace, Stream stream) {
  launch_windows(p, plan, workspace, stream);
  if (p.d_position_bias.size() == 0) return;
  int parts = 1;
  while (parts < Config::kThreads / 8 && parts * kPlanesAtOnce < plan.planes) parts *= 2;
  const SumParams params{.planes = static_cast<const float*>(workspace),
                         .out = p.d_position_bias.as<float>(),
                         .count = plan.planes,
                         .out_stride = p.d_position_bias.stride[0],
                         .rows = static_cast<int>(p.d_position_bias.shape[0]),
                         .w = static_cast<int>(p.w),
                         .parts = parts};
  const std::int64_t columns = kColumns * Config::kThreads / parts;
  runtime::launch("kv_compress_backward", kv_compress_sum_planes,
                  {.grid = {static_cast<std::uint32_t>(tile::ceil_div(p.d_position_bias.size(), columns))},
                   .threads = Config::kThreads,
                   .shared_bytes = sizeof(Float4) * Config::kThreads,
                   .programmatic_dependency = p.device.has_dependent_launches()},
                  stream, params);
}

const runtime::Registration compress{runtime::kBackend, plan, launch};
const runtime::Registration compress_backward{runtime::kBackend, plan_backward, launch_backward};

}  // namespace
}  // namespace hopwell::ops::kv_compress
