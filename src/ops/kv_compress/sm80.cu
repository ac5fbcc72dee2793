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

// Whether a thread's columns may be read or written by one instruction.
bool columns_aligned(const View& view) {
  return tile::rows_aligned(view, 1, Config::kColumns * static_cast<std::int64_t>(size_of(view.dtype)));
}
bool entries_aligned(const View& kv, const View& gate, const View& bias) {
  return tile::rows_aligned(kv, 1) && tile::rows_aligned(gate, 1) && columns_aligned(bias);
}

// Calls function.template operator()<F>() with the form of kernel.
template <class Function>
decltype(auto) with_form(bool overlap, int exact_entries, Function function) {
  if (overlap && exact_entries == 8) return function.template operator()<Form<8, true, true>>();
  if (overlap && exact_entries == 4) return function.template operator()<Form<4, true, true>>();
  if (exact_entries == 8) return function.template operator()<Form<8, false, true>>();
  if (exact_entries == 4) return function.template operator()<Form<4, false, true>>();
  if (exact_entries == 2) return function.template operator()<Form<2, false, true>>();
  return function.template operator()<Form<Config::kEntries, false, false>>();
}

// Calls function(T{}) with the kernels' type of an element of kv.
template <class Function>
void with_element(const View& kv, Function function) {
  kv.dtype == DType::kBFloat16 ? function(arch::bf16{}) : function(float{});
}

// Bytes of shared memory of a kernel for elements of kv of type T.
template <class T>
struct SharedBytes {
  bool sums;  // of d_position_bias

  template <class F>
  std::size_t operator()() const {
    return F::exact && sums ? sizeof(BackwardStorage<T, F>) : sizeof(Storage<T, F>);
  }
};
std::size_t shared_bytes(const View& kv, bool overlap, const Shape& shape, bool sums) {
  return kv.dtype == DType::kBFloat16 ? with_form(overlap, shape.exact_entries, SharedBytes<arch::bf16>{sums})
                                      : with_form(overlap, shape.exact_entries, SharedBytes<float>{sums});
}
std::size_t shared_bytes(const Problem& p, const ForwardPlan& plan) {
  return shared_bytes(p.kv, p.blocks.overlap, plan.shape, false);
}
std::size_t shared_bytes(const BackwardProblem& p, const BackwardPlan& plan) {
  return shared_bytes(p.kv, p.blocks.overlap, plan.shape, bool(p.d_position_bias));
}

// Why sizes are not supported; empty if they are. The grid has up to 2^16 - 1 slabs, of 64 columns or more.
std::string unsupported(const Blocks& blocks, std::int64_t d) {
  if (d % 8 != 0) return "needs d that is a multiple of 8";
  if (blocks.ratio > std::int64_t{1} << 29 || d > std::int64_t{1} << 21 || !runtime::fit_in_ints({blocks.s, blocks.n}))
    return "needs ratio up to 2^29, d up to 2^21, and s and n below 2^31 - 1024";
  return {};
}

// A plan with an exact form, if alignment allows it and the device has enough shared memory, otherwise without one.
template <class Plan, class AnyProblem>
runtime::PlanOr<Plan> plan_of(const AnyProblem& p, bool aligned) {
  if (std::string reason = unsupported(p.blocks, p.d); !reason.empty()) return runtime::Unsupported{std::move(reason)};
  Plan plan = make_plan(p, aligned);
  if (shared_bytes(p, plan) > p.device.shared_bytes) plan = make_plan(p, false);
  return plan;
}
runtime::PlanOr<ForwardPlan> plan(const Problem& p) {
  return plan_of<ForwardPlan>(p, entries_aligned(p.kv, p.gate, p.position_bias));
}
runtime::PlanOr<BackwardPlan> plan_backward(const BackwardProblem& p) {
  const bool aligned = entries_aligned(p.kv, p.gate, p.position_bias);
  return plan_of<BackwardPlan>(p, aligned && columns_aligned(p.d_kv) && columns_aligned(p.d_gate));
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

void launch(const Problem& p, const ForwardPlan& plan, void* /*workspace*/, Stream stream) {
  if (p.blocks.n == 0) return;
  with_element(p.kv, [&]<class Element>(Element) {
    const ForwardParams<Element> params{.operands = operands_of<Element>(p, plan.shape),
                                        .out = p.out.data,
                                        .out_stride = p.out.stride[0],
                                        .key_tiles = plan.key_tiles,
                                        .out_is_bf16 = p.out.dtype == DType::kBFloat16,
                                        .out_aligned = columns_aligned(p.out)};
    with_form(p.blocks.overlap, plan.shape.exact_entries, [&]<class F>() {
      runtime::launch(
          "kv_compress", kv_compress_forward<Element, F>,
          {.grid = {static_cast<std::uint32_t>(plan.key_tiles.count), static_cast<std::uint32_t>(plan.shape.slabs)},
           .threads = Config::kThreads,
           .shared_bytes = shared_bytes(p, plan),
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
  const std::int64_t columns = plan.key_tiles.count + plan.clearing_columns;
  if (columns == 0) return;
  with_element(p.kv, [&]<class Element>(Element) {
    const BackwardParams<Element> params = params_of<Element>(p, plan, workspace);
    with_form(p.blocks.overlap, plan.shape.exact_entries, [&]<class F>() {
      runtime::launch("kv_compress_backward", kv_compress_backward<Element, F>,
                      {.grid = {static_cast<std::uint32_t>(columns), static_cast<std::uint32_t>(plan.shape.slabs)},
                       .threads = Config::kThreads,
                       .shared_bytes = shared_bytes(p, plan),
                       .programmatic_dependency = p.device.has_dependent_launches()},
                      stream, params);
    });
  });
}

void launch_backward(const BackwardProblem& p, const BackwardPlan& plan, void* workspace, Stream stream) {
  launch_windows(p, plan, workspace, stream);
  if (!p.d_position_bias || p.d_position_bias.size() == 0) return;
  // The fewest splits with which a thread adds at most kUnroll planes. A split has at least 8 threads, which read 128
  // bytes of a plane.
  int splits = 1;
  while (splits < Config::kThreads / 8 && splits * SumParams::kUnroll < plan.key_tiles.count) splits *= 2;
  const SumParams params{.planes = static_cast<const float*>(workspace),
                         .out = p.d_position_bias.as<float>(),
                         .count = plan.key_tiles.count,
                         .stride = plan.planes_of_tile * p.d_position_bias.size(),
                         .size = p.d_position_bias.size(),
                         .out_stride = p.d_position_bias.stride[0],
                         .w = static_cast<int>(p.w),
                         .splits = splits};
  const std::int64_t columns = kColumns * Config::kThreads / splits;  // of a CTA
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
