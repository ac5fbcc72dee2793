// nvfp4_linear by wgmma on Hopper, and nvfp4_matmul after its x is decoded. These kernels are fastest for more than 16
// columns of x, and for few columns if x is a large part of a CTA's reads: see choose_kernel() in plan.hpp.
#include "ops/nvfp4/decode.hpp"
#include "ops/nvfp4/kernels/few_columns_wgmma.hpp"
#include "ops/nvfp4/kernels/many_columns.hpp"
#include "ops/nvfp4/launch.hpp"
#include "runtime/workspace.hpp"
#include "tile/gpu/tensor_map.hpp"

namespace hopwell::ops::nvfp4 {
namespace {

using namespace HOPWELL_TARGET;

// Counts clusters for a CTA with the largest number of tiles.
int clusters_that_fit(int cluster, const runtime::Device& device) {
  using Config = FewColumnsWgmmaConfig<16>;
  constexpr auto kSharedBytes = static_cast<std::size_t>(Config::shared_bytes(Config::kWarps, 1, 1));
  return runtime::clusters_that_fit<nvfp4_linear_few_columns_wgmma<16, bf16>>(
      device, whole_multiprocessors(cluster, Config::kThreads, kSharedBytes));
}

Plan plan_for(const LinearProblem& p) {
  return make_plan(shape_of(p), true, p.device, [&](int cluster) { return clusters_that_fit(cluster, p.device); });
}

// ---- few columns ---------------------------------------------------------------------------------------------------

template <int kColumns, class T>
void launch_few_columns(const LinearProblem& p, const Plan& plan, const T* x, Stream stream) {
  using Config = FewColumnsWgmmaConfig<kColumns>;
  const FewColumnsWgmmaParams<T> params{.weight = weight_of(p),
                                        .x = x,
                                        .x_stride = p.x.stride[0],
                                        .result = result_of<T>(p),
                                        .factor = p.global,
                                        .rows = static_cast<int>(p.rows),
                                        .k = static_cast<int>(p.k),
                                        .columns = static_cast<int>(p.n),
                                        .cluster = plan.cluster,
                                        .slice = plan.slice,
                                        .tiles_per_cluster = plan.tiles_per_cluster(),
                                        .larger_clusters = plan.larger_clusters(),
                                        .row_groups = plan.row_groups,
                                        .splits = plan.splits,
                                        .whole_scales = has_whole_scales(p.weight_scale)};
  runtime::launch(p.op, nvfp4_linear_few_columns_wgmma<kColumns, T>, launch_shape(plan, Config::kThreads, p.device),
                  stream, params);
}

// ---- many columns --------------------------------------------------------------------------------------------------

template <int kColumns, class T>
void launch_arrange(const LinearProblem& p, const Plan& plan, const T* x, int stages, void* arranged, Stream stream) {
  constexpr std::int64_t kThreads = ManyColumnsConfig::kArrangeThreads;
  const std::int64_t threads = std::int64_t{plan.column_tiles} * stages * 4 * kColumns;
  runtime::launch(p.op, nvfp4_linear_arrange_x<kColumns, T>,
                  {.grid = {static_cast<std::uint32_t>(tile::ceil_div(threads, kThreads))},
                   .threads = kThreads,
                   .programmatic_dependency = p.device.has_dependent_launches()},
                  stream,
                  ArrangeParams<T>{.x = x,
                                   .x_stride = p.x.stride[0],
                                   .to = static_cast<unsigned char*>(arranged),
                                   .k = static_cast<int>(p.k),
                                   .columns = static_cast<int>(p.n),
                                   .stages = stages,
                                   .column_tiles = plan.column_tiles});
}

template <int kColumns, class T>
void launch_many_columns(const LinearProblem& p, const Plan& plan, const T* x, void* workspace, Stream stream) {
  using Config = ManyColumnsConfig;
  const auto stages = static_cast<int>(tile::ceil_div(p.k, Config::kStageK));
  launch_arrange<kColumns>(p, plan, x, stages, workspace, stream);
  const auto rows = static_cast<std::uint32_t>(plan.row_groups * Config::kRows);  // of a CTA
  const ManyColumnsParams params{.codes = tile::map_of(p.weight, {{1, Config::kStageK / 2}, {0, rows}}),
                                 .scales = p.weight_scale,
                                 .x = static_cast<const unsigned char*>(workspace),
                                 .factor = p.global,
                                 .rows = static_cast<int>(p.rows),
                                 .k = static_cast<int>(p.k),
                                 .columns = static_cast<int>(p.n),
                                 .stages = stages,
                                 .stages_per_cta = plan.slice / Config::kStageK,
                                 .row_tiles = plan.row_tiles,
                                 .column_tiles = plan.column_tiles,
                                 .row_groups = plan.row_groups,
                                 .splits = plan.splits,
                                 .cluster = plan.cluster,
                                 .whole_scales = has_whole_scales(p.weight_scale)};
  runtime::launch(p.op, nvfp4_linear_many_columns<kColumns, T>, launch_shape(plan, Config::kThreads, p.device), stream,
                  params, result_of<T>(p));
}

// ---- the backend ---------------------------------------------------------------------------------------------------

runtime::PlanOr<Plan> plan_linear(const LinearProblem& p) {
  using runtime::Unsupported;
  constexpr std::int64_t kMostColumns = std::int64_t{1} << 19, kMostResults = std::int64_t{1} << 38;
  if (p.x.dtype == DType::kFloat32 || p.n < 2 || p.n > kMostColumns || p.n * p.rows > kMostResults)
    return Unsupported{"needs n from 2 to 524288, n * N at most 2^38, x of 16 bits"};
  const ProblemShape shape = shape_of(p);
  if (!shape.can_copy) return Unsupported{kNeedsForCopies};
  if (const char* reason = slower_than_sm80(shape)) return Unsupported{reason};
  return p.rows == 0 ? Plan{} : plan_for(p);
}

template <class T>
void launch_plan(const LinearProblem& p, const Plan& plan, const T* x, void* workspace, Stream stream) {
  runtime::with_constant<8, 16, 32, 64, 96, 128>(plan.columns, [&]<int kColumns>() {
    if constexpr (kColumns <= 16)
      launch_few_columns<kColumns>(p, plan, x, stream);
    else
      launch_many_columns<kColumns>(p, plan, x, workspace, stream);
  });
}

void launch_linear(const LinearProblem& p, const Plan& plan, void* workspace, Stream stream) {
  if (p.rows == 0) return;
  tile::with_type(p.x, [&]<class T>(const T* x) {
    if constexpr (!std::is_same_v<T, float>) launch_plan(p, plan, x, workspace, stream);
  });
}

// ---- nvfp4_matmul --------------------------------------------------------------------------------------------------

runtime::PlanOr<DecodedPlan> plan_matmul(const MatmulProblem& p) {
  if (p.m == 1 || p.n == 1)
    return runtime::Unsupported{"slower than sm80 for M = 1 or N = 1, which decodes nothing first"};
  const auto planned = plan_linear(as_linear(p, decodes_b(p)).linear);
  if (const auto* unsupported = std::get_if<runtime::Unsupported>(&planned))
    return runtime::Unsupported{"as nvfp4_linear with decoded x: " + unsupported->reason};
  return with_decoded_x(p, std::get<Plan>(planned));
}

void launch_matmul(const MatmulProblem& p, const DecodedPlan& plan, void* workspace, Stream stream) {
  if (p.m == 0 || p.n == 0) return;
  launch_linear(decode(p, workspace, stream), plan.linear, runtime::at_offset<std::byte>(workspace, decoded_bytes(p)),
                stream);
}

const runtime::Registration linear{runtime::kBackend, plan_linear, launch_linear};
const runtime::Registration matmul{runtime::kBackend, plan_matmul, launch_matmul};

}  // namespace
}  // namespace hopwell::ops::nvfp4
