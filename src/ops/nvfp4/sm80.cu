// nvfp4_gemv, nvfp4_linear and nvfp4_matmul for NVIDIA GPUs from Ampere on. plan.hpp chooses the kernel:
//
//     kernels/one_column.hpp    one column of x, at the speed of memory
//     kernels/few_columns.hpp   up to 16 columns at a time; every 16 columns read the weights once
//     kernels/general.hpp       other types and alignments, in fp32
//
// nvfp4_matmul decodes one side first, unless M or N is 1.
#include "ops/nvfp4/decode.hpp"
#include "ops/nvfp4/kernels/few_columns.hpp"
#include "ops/nvfp4/kernels/general.hpp"
#include "ops/nvfp4/launch_one_column.hpp"

namespace hopwell::ops::nvfp4 {
namespace {

using namespace HOPWELL_TARGET;

constexpr std::int64_t kMaxGridY = 65535, kMaxGridX = 0x7fffffff;

int clusters_that_fit(int cluster, const runtime::Device& device) {
  return runtime::clusters_that_fit<nvfp4_linear_few_columns<8, bf16>>(
      device, whole_multiprocessors(cluster, 32 * FewColumnsConfig<8>::kMaxWarps, device.shared_bytes));
}

Plan plan_for(const ProblemShape& shape, const runtime::Device& device) {
  return make_plan(shape, false, device, [&](int cluster) { return clusters_that_fit(cluster, device); });
}

// ---- each kernel ---------------------------------------------------------------------------------------------------

template <class X, class T>
void launch_general(const char* name, const Plan& plan, const ProblemShape& shape, const runtime::Device& device,
                    Stream stream, GeneralParams<X, T> p) {
  p.rows = shape.rows, p.blocks = shape.k / kCodesPerBlock, p.columns = static_cast<int>(shape.columns);
  p.lanes_per_row = plan.lanes_per_row;
  const arch::LaunchShape grid = launch_shape(plan, GeneralConfig::kThreads, device, plan.column_tiles, shape.batches);
  runtime::launch(name, nvfp4_linear_general<X, T>, grid, stream, p);
}

template <int kColumns, class T>
void launch_few_columns(const LinearProblem& p, const Plan& plan, const T* x, Stream stream) {
  const FewColumnsParams<T> params{.weight = weight_of(p),
                                   .x = x,
                                   .x_stride = p.x.stride[0],
                                   .result = result_of<T>(p),
                                   .factor = p.global,
                                   .rows = static_cast<int>(p.rows),
                                   .k = static_cast<int>(p.k),
                                   .columns = static_cast<int>(p.n),
                                   .slice = plan.slice,
                                   .cluster = plan.cluster,
                                   .phases = plan.phases,
                                   .tiles_per_cluster = plan.tiles_per_cluster(),
                                   .larger_clusters = plan.larger_clusters(),
                                   .warps = plan.warps,
                                   .round_tiles = plan.round_tiles,
                                   .exchange_offset = static_cast<int>(plan.exchange_offset),
                                   .whole_scales = has_whole_scales(p.weight_scale)};
  runtime::launch(p.op, nvfp4_linear_few_columns<kColumns, T>,
                  launch_shape(plan, 32 * plan.warps, p.device, 1, plan.column_tiles), stream, params);
}

// ---- nvfp4_linear --------------------------------------------------------------------------------------------------

runtime::PlanOr<Plan> plan_linear(const LinearProblem& p) {
  if (p.n > kMaxGridY * GeneralConfig::kColumns || p.rows > kMaxGridX)
    return runtime::Unsupported{"needs n at most 524280, N below 2^31"};
  return p.n == 0 || p.rows == 0 ? Plan{} : plan_for(shape_of(p), p.device);
}

void launch_linear(const LinearProblem& p, const Plan& plan, void* /*workspace*/, Stream stream) {
  if (p.n == 0 || p.rows == 0) return;
  const ProblemShape shape = shape_of(p);
  tile::with_type(p.x, [&]<class T>(const T* x) {
    if constexpr (!std::is_same_v<T, float>) {
      if (plan.kernel == Kernel::kFewColumns && plan.columns == 8) return launch_few_columns<8>(p, plan, x, stream);
      if (plan.kernel == Kernel::kFewColumns) return launch_few_columns<16>(p, plan, x, stream);
      if (plan.kernel == Kernel::kOneColumn)
        return launch_one_column<FloatColumn<T>, T>(
            p.op, plan, shape, p.device, stream,
            {.weight = weight_of(p), .x = {x}, .result = result_of<T>(p), .factor = p.global});
    }
    launch_general<FloatRows<T>, T>(
        p.op, plan, shape, p.device, stream,
        {.weight = weight_of(p), .x = {x, p.x.stride[0]}, .result = result_of<T>(p), .factor = p.global});
  });
}

// ---- nvfp4_gemv ----------------------------------------------------------------------------------------------------

runtime::PlanOr<Plan> plan_gemv(const GemvProblem& p) {
  if (p.l > kMaxGridY || p.m > kMaxGridX) return runtime::Unsupported{"needs L at most 65535, M below 2^31"};
  return p.m == 0 || p.l == 0 ? Plan{} : plan_for(shape_of(p), p.device);
}

// Multiplies one row of codes, x, by the weights.
template <class T>
void launch_codes(const char* op, const Plan& plan, const ProblemShape& shape, const runtime::Device& device,
                  Stream stream, const Fp4Matrix& weight, const Fp4Matrix& x, const Result<T>& result,
                  const Global& factor) {
  if (plan.kernel == Kernel::kOneColumn)
    return launch_one_column<CodeColumn, T>(op, plan, shape, device, stream,
                                            {.weight = weight, .x = {x}, .result = result, .factor = factor});
  launch_general<CodeRow, T>(op, plan, shape, device, stream,
                             {.weight = weight, .x = {x}, .result = result, .factor = factor});
}

void launch_gemv(const GemvProblem& p, const Plan& plan, void* /*workspace*/, Stream stream) {
  if (p.m == 0 || p.l == 0) return;
  const auto batched = [](const View& codes, const Scales& scales) {
    return Fp4Matrix{codes.as<const std::uint8_t>(), codes.stride[0], codes.stride[2], scales};
  };
  tile::with_type(p.c, [&]<class T>(T* c) {
    const Result<T> result{.y = c,
                           .row_stride = p.c.stride[0],
                           .column_stride = 0,
                           .batch_stride = p.c.stride[2],
                           .bias = nullptr,
                           .bias_row_stride = 0,
                           .bias_column_stride = 0};
    launch_codes<T>("nvfp4_gemv", plan, shape_of(p), p.device, stream, batched(p.a, p.sfa), batched(p.b, p.sfb), result,
                    p.alpha);
  });
}

// ---- nvfp4_matmul --------------------------------------------------------------------------------------------------

// With one row, the kernels take x as codes, and nothing is decoded first.
bool takes_codes(const MatmulProblem& p) { return p.m == 1 || p.n == 1; }

ProblemShape shape_of_codes(const LinearProblem& linear) {
  ProblemShape shape = shape_of(linear);
  shape.x_is_16_bit = true;
  return shape;
}

runtime::PlanOr<DecodedPlan> plan_matmul(const MatmulProblem& p) {
  const LinearProblem linear = as_linear(p, decodes_b(p)).linear;
  const auto planned = plan_linear(linear);
  if (std::holds_alternative<runtime::Unsupported>(planned))
    return runtime::Unsupported{"needs M at most 524280, N below 2^31"};
  if (!takes_codes(p)) return with_decoded_x(p, std::get<Plan>(planned));
  return DecodedPlan{p.m == 0 || p.n == 0 ? Plan{} : plan_for(shape_of_codes(linear), p.device), 0};
}

void launch_matmul(const MatmulProblem& p, const DecodedPlan& plan, void* workspace, Stream stream) {
  if (p.m == 0 || p.n == 0) return;
  if (!takes_codes(p)) return launch_linear(decode(p, workspace, stream), plan.linear, nullptr, stream);
  const DecodedProduct product = as_linear(p, decodes_b(p));
  const LinearProblem& linear = product.linear;
  const Fp4Matrix x{product.codes.as<const std::uint8_t>(), product.codes.stride[0], 0, product.scales};
  tile::with_type(p.c, [&]<class T>(T*) {
    launch_codes<T>(linear.op, plan.linear, shape_of_codes(linear), p.device, stream, weight_of(linear), x,
                    result_of<T>(linear), linear.global);
  });
}

const runtime::Registration linear{runtime::kBackend, plan_linear, launch_linear};
const runtime::Registration gemv{runtime::kBackend, plan_gemv, launch_gemv};
const runtime::Registration matmul{runtime::kBackend, plan_matmul, launch_matmul};

}  // namespace
}  // namespace hopwell::ops::nvfp4
