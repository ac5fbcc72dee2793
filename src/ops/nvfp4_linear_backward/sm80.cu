// nvfp4_linear_backward for any NVIDIA GPU from Ampere on.
#include "ops/nvfp4_linear_backward/kernel.hpp"
#include "runtime/launch.hpp"
#include "tile/gpu/views.hpp"

namespace hopwell::ops::nvfp4_linear_backward {
namespace {

using namespace HOPWELL_TARGET;

runtime::PlanOr<Plan> plan(const Problem& p) {
  if (p.d_out.dtype == DType::kFloat32) return runtime::Unsupported{"needs d_out of 16 bits"};
  const std::int64_t rows = p.n + 64, columns = p.k + Config::kColumns;
  const std::int64_t bytes = 2 * (p.rows + Config::kMaxChunks * Config::kStageRows);  // of a row of d_out, rounded up
  if (!runtime::fit_in_ints({rows, bytes, columns, tile::ceil_div(rows, 16) * tile::ceil_div(columns, 256) * 16}))
    return runtime::Unsupported{"needs N below 2^30 and n, K and n * K / 256 below 2^31"};
  return make_plan(p);
}

template <class T>
Params<T> params_of(const Problem& p, const Plan& plan, void* workspace) {
  const Scales& scales = p.weight_scale;
  const bool whole = reinterpret_cast<std::uintptr_t>(scales.data) % 4 == 0;
  return {.d_out = p.d_out.as<const T>(),
          .d_x = p.d_x.as<T>(),
          .sums = plan.splits ? static_cast<float*>(workspace) : nullptr,
          .d_out_stride = p.d_out.stride[0],
          .d_x_stride = p.d_x.stride[0],
          .weight = {p.weight.as<const std::uint8_t>(), p.weight.stride[0], 0, scales},
          .global = p.global,
          .n = static_cast<int>(p.n),
          .rows = static_cast<int>(p.rows),
          .k = static_cast<int>(p.k),
          .row_tiles = plan.row_tiles,
          .column_tiles = plan.column_tiles,
          .chunk = plan.chunk,
          .chunks = plan.chunks,
          .d_out_aligned = tile::rows_aligned(p.d_out, 1),
          .codes_aligned = tile::rows_aligned(p.weight, 1),
          .scales_aligned = whole && (scales.blocked || scales.row_stride % 4 == 0),
          .d_x_aligned = tile::rows_aligned(p.d_x, 1)};
}

template <int kBlocks, class T>
void launch_tiles(const Problem& p, const Plan& plan, void* workspace, Stream stream) {
  const bool dependent = p.device.has_dependent_launches();
  const Params<T> params = params_of<T>(p, plan, workspace);
  runtime::launch(kName, nvfp4_linear_bwd_kernel<kBlocks, T>,
                  {.grid = {static_cast<std::uint32_t>(plan.ctas)},
                   .threads = Config::kThreads,
                   .shared_bytes = Config::kStages * sizeof(Stage<kBlocks>),
                   .programmatic_dependency = dependent},
                  stream, params);
  if (!plan.splits) return;
  const std::int64_t ctas = tile::ceil_div(p.n * p.k, 8 * Config::kSumThreads);
  runtime::launch(kName, nvfp4_linear_bwd_add_chunks<T>,
                  {.grid = {static_cast<std::uint32_t>(ctas)},
                   .threads = Config::kSumThreads,
                   .programmatic_dependency = dependent},
                  stream, params);
}

void launch(const Problem& p, const Plan& plan, void* workspace, Stream stream) {
  if (p.n == 0 || p.k == 0) return;
  tile::with_type(p.d_out, [&]<class T>(const T*) {
    if constexpr (!std::is_same_v<T, float>) {
      if (plan.blocks == 1) return launch_tiles<1, T>(p, plan, workspace, stream);
      if (plan.blocks == 2) return launch_tiles<2, T>(p, plan, workspace, stream);
      launch_tiles<4, T>(p, plan, workspace, stream);
    }
  });
}

const runtime::Registration backend{runtime::kBackend, plan, launch};

}  // namespace
}  // namespace hopwell::ops::nvfp4_linear_backward
