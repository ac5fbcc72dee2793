// nvfp4_linear for Hopper where x is much of what there is to read: 9 to 16 columns, or few rows of weights (sm90_many.hpp),
// and all that have more columns (sm90_matmul.hpp). sm80.cu has the rest, and what x lies in shared memory for from beginning
// to end.
#include <algorithm>

#include "arch/sm90/make_tensor_map.hpp"
#include "ops/nvfp4/sm80_launch.hpp"
#include "ops/nvfp4/sm90_many.hpp"
#include "ops/nvfp4/sm90_matmul.hpp"

namespace hopwell::ops::nvfp4 {
namespace {

constexpr int kMaxRanks = 8, kMaxTiles = WideConfig::kWarps;  // a CTA
// As measured on an H200: with 8 columns sm80's kernel is faster from some rows on, with 16 where all of x fits beside many.
constexpr std::int64_t kFewestRows = 2048, kFewRows = 4096, kManyRows = 16384, kShortK = 4096;

template <class Number>
int number(Number value) {
  return static_cast<int>(value);
}

// How many clusters of so many CTAs run at a time, one CTA a multiprocessor: fewer than there are multiprocessors for.
int clusters_that_fit(int ranks, const runtime::Device& device) {
  const arch::LaunchShape shape{.threads = WideConfig::kThreads,
                                .cluster = static_cast<std::uint32_t>(ranks),
                                .shared_bytes = static_cast<std::size_t>(wide_shared_bytes<16>(kMaxTiles, 1, 1))};
  return ranks == 1 ? device.sms : runtime::clusters_that_fit<wide_kernel<16, bf16>>(device, shape);
}

// ---- 2 to 16 columns -----------------------------------------------------------------------------------------------

// How the work is shared out; no ranks: the device has not the clusters.
struct WidePlan {
  int ranks = 0, clusters = 0, tiles = 0, stages = 0;  // tiles and stages of a CTA, at most
  int groups = 0, parts = 0;
  std::int64_t cost = 0;  // in 10 ns, measured on an H200
};

// Decoding, the stages of one warp, or those of x, whichever is longest; x's first one; giving sums to each other.
std::int64_t cost_of(const WidePlan& plan, std::int64_t columns, std::int64_t rounds) {
  const std::int64_t of_warp = ceil_div(plan.stages, plan.parts);
  const std::int64_t longest = std::max({10LL * plan.tiles * plan.stages, 100LL * of_warp, 30LL * plan.stages});
  return rounds * (longest + (columns > 8 ? 12LL : 6LL) * plan.stages + (plan.ranks > 1 ? 80 + 6 * plan.ranks : 0));
}

WidePlan wide_plan(const LinearProblem& p) {
  const std::int64_t tiles = ceil_div(p.rows, LinearConfig::kRows), stages = ceil_div(p.k, LinearConfig::kStageK);
  WidePlan best;
  for (int ranks = 1; ranks <= kMaxRanks; ranks *= 2) {
    const int together = clusters_that_fit(ranks, p.device);
    if (together == 0 || ranks > stages) continue;
    const std::int64_t rounds = ceil_div(tiles, std::int64_t{together} * kMaxTiles);
    WidePlan plan{.ranks = ranks};
    plan.tiles = number(ceil_div(tiles, together * rounds));
    plan.clusters = number(ceil_div(tiles, plan.tiles));
    plan.stages = number(ceil_div(stages, ranks));
    plan.groups = number(ceil_div(plan.tiles, 4));
    plan.parts = WideConfig::kWarps / 4 / plan.groups;
    plan.cost = cost_of(plan, p.n, rounds);
    if (best.ranks == 0 || plan.cost < best.cost) best = plan;
  }
  return best;
}

template <int kColumns, class T>
void launch_wide(const LinearProblem& p, const WidePlan& plan, const T* x, const Result<T>& result, Stream stream) {
  const std::int64_t tiles = ceil_div(p.rows, LinearConfig::kRows);
  const WideParams<T> params{.weight = weight_of(p),
                             .x = x,
                             .x_stride = p.x.stride[0],
                             .result = result,
                             .factor = factor_of(p.global, p.global_is_reciprocal),
                             .rows = number(p.rows),
                             .k = number(p.k),
                             .columns = number(p.n),
                             .ranks = plan.ranks,
                             .slice = plan.stages * LinearConfig::kStageK,
                             .tiles_of_cta = number(tiles / plan.clusters),
                             .larger_ctas = number(tiles % plan.clusters),
                             .groups = plan.groups,
                             .parts = plan.parts,
                             .whole_scales = whole_scales(p.weight_scale)};
  const int shared_bytes = wide_shared_bytes<kColumns>(plan.tiles, plan.ranks, plan.parts);
  runtime::launch("nvfp4_linear", wide_kernel<kColumns, T>,
                  {.grid = {static_cast<std::uint32_t>(plan.clusters * plan.ranks)},
                   .threads = WideConfig::kThreads,
                   .cluster = static_cast<std::uint32_t>(plan.ranks),
                   .shared_bytes = static_cast<std::size_t>(shared_bytes),
                   .programmatic_dependency = p.device.has_dependent_launches()},
                  stream, params);
}

// ---- more columns --------------------------------------------------------------------------------------------------

struct MatmulPlan {
  int columns = 0, column_tiles = 0, row_tiles = 0, groups = 0, ranks = 0, stages_of_rank = 0, ctas = 0;
  std::int64_t cost = 0;  // ns, measured on an H200

  [[nodiscard]] int parts() const { return MatmulConfig::kGroups / groups; }
  [[nodiscard]] bool is_shared() const { return ranks * parts() > 1; }
  [[nodiscard]] std::int64_t tiles() const { return std::int64_t{row_tiles} * column_tiles; }
};

// Stages, slower where more multiprocessors take part; what comes before the first product and after the last; shares meet.
std::int64_t cost_of(const MatmulPlan& plan, std::int64_t together, std::int64_t multiprocessors) {
  const std::int64_t of_stage = plan.parts() == 1 ? 400 + 33 * plan.columns / 5 : 280 + 3 * plan.columns;
  const std::int64_t rounds = ceil_div(plan.tiles(), together), ctas = std::min(plan.tiles(), together) * plan.ranks;
  const std::int64_t stages =
      plan.stages_of_rank * of_stage * (100 * multiprocessors + 45 * ctas) / (100 * multiprocessors);
  const std::int64_t begin_and_end = 6000 + 10 * plan.columns, store = 1000, exchange = 8 * plan.columns * plan.ranks;
  return plan.is_shared() ? rounds * (begin_and_end + stages + exchange) : begin_and_end + rounds * (stages + store);
}

MatmulPlan matmul_plan(const LinearProblem& p) {
  constexpr int kColumnsOfShare = 8;  // a multiple
  const std::int64_t stages = ceil_div(p.k, MatmulConfig::kStageK);
  MatmulPlan best;
  for (const int columns : {32, 64, 96, 128}) {
    for (const int groups : {MatmulConfig::kGroups, MatmulConfig::kFewestGroups}) {
      for (int ranks = 1; ranks <= kMaxRanks; ranks *= 2) {
        const int together = clusters_that_fit(ranks, p.device);
        MatmulPlan plan{.columns = columns, .groups = groups, .ranks = ranks};
        if (together == 0 || ranks > stages || columns % (ranks * plan.parts() * kColumnsOfShare) != 0) continue;
        plan.column_tiles = number(ceil_div(p.n, columns));
        plan.row_tiles = number(ceil_div(p.rows, groups * MatmulConfig::kRows));
        plan.stages_of_rank = number(ceil_div(stages, ranks));
        // A CTA goes from tile to tile, but not if its tiles are shared.
        plan.ctas = number(plan.is_shared() ? plan.tiles() * ranks : std::min<std::int64_t>(plan.tiles(), together));
        plan.cost = cost_of(plan, together, p.device.sms);
        if (best.columns == 0 || plan.cost < best.cost) best = plan;
      }
    }
  }
  return best;
}

std::size_t arranged_bytes(const MatmulPlan& plan, std::int64_t k) {
  const auto columns = std::int64_t{plan.column_tiles} * plan.columns;
  return static_cast<std::size_t>(columns * ceil_div(k, MatmulConfig::kStageK) * MatmulConfig::kStageK * 2);
}

std::size_t workspace_bytes(const LinearProblem& p) { return p.n > 16 ? arranged_bytes(matmul_plan(p), p.k) : 0; }

arch::TensorMap map_of_codes(const LinearProblem& p, int rows_of_tile) {
  return arch::make_tensor_map({.address = p.weight.data,
                                .element = arch::TensorElement::u8,
                                .rank = 2,
                                .extent = {static_cast<std::uint64_t>(p.k / 2), static_cast<std::uint64_t>(p.rows)},
                                .stride_bytes = {p.rows > 1 ? static_cast<std::uint64_t>(p.weight.stride[0]) : 16},
                                .box = {MatmulConfig::kStageK / 2, static_cast<std::uint32_t>(rows_of_tile)}});
}

template <int kColumns, class T>
void launch_matmul(const LinearProblem& p, const MatmulPlan& plan, const T* x, const Result<T>& result, Stream stream) {
  constexpr std::int64_t kArrangeThreads = 256;
  const int stages = number(ceil_div(p.k, MatmulConfig::kStageK));
  auto* const arranged = static_cast<unsigned char*>(p.workspace);
  const std::int64_t threads = std::int64_t{plan.column_tiles} * stages * 4 * kColumns;
  runtime::launch("nvfp4_linear", arrange_kernel<kColumns, T>,
                  {.grid = {static_cast<std::uint32_t>(ceil_div(threads, kArrangeThreads))},
                   .threads = kArrangeThreads,
                   .programmatic_dependency = p.device.has_dependent_launches()},
                  stream,
                  ArrangeParams<T>{.x = x,
                                   .x_stride = p.x.stride[0],
                                   .to = arranged,
                                   .k = number(p.k),
                                   .columns = number(p.n),
                                   .stages = stages,
                                   .column_tiles = plan.column_tiles});
  const MatmulParams params{.codes = map_of_codes(p, plan.groups * MatmulConfig::kRows),
                            .scales = p.weight_scale,
                            .x = arranged,
                            .factor = factor_of(p.global, p.global_is_reciprocal),
                            .rows = number(p.rows),
                            .k = number(p.k),
                            .columns = number(p.n),
                            .stages = stages,
                            .stages_of_rank = plan.stages_of_rank,
                            .row_tiles = plan.row_tiles,
                            .column_tiles = plan.column_tiles,
                            .groups = plan.groups,
                            .parts = plan.parts(),
                            .ranks = plan.ranks,
                            .whole_scales = whole_scales(p.weight_scale)};
  runtime::launch("nvfp4_linear", matmul_kernel<kColumns, T>,
                  {.grid = {static_cast<std::uint32_t>(plan.ctas)},
                   .threads = MatmulConfig::kThreads,
                   .cluster = static_cast<std::uint32_t>(plan.ranks),
                   .shared_bytes = sizeof(MatmulStorage<kColumns>),
                   .programmatic_dependency = p.device.has_dependent_launches()},
                  stream, params, result);
}

template <class T>
void launch_matmul(const LinearProblem& p, const T* x, const Result<T>& result, Stream stream) {
  const MatmulPlan plan = matmul_plan(p);
  if (plan.columns == 32) return launch_matmul<32>(p, plan, x, result, stream);
  if (plan.columns == 64) return launch_matmul<64>(p, plan, x, result, stream);
  if (plan.columns == 96) return launch_matmul<96>(p, plan, x, result, stream);
  launch_matmul<128>(p, plan, x, result, stream);
}

// ---- the backend ---------------------------------------------------------------------------------------------------

runtime::Support supports(const LinearProblem& p) {
  constexpr std::int64_t kMostColumns = std::int64_t{1} << 19, kMostResults = std::int64_t{1} << 38;
  if (p.x.dtype == DType::kFloat32 || p.n < 2 || p.n > kMostColumns || p.n * p.rows > kMostResults)
    return runtime::Support::no("n must be 2 to 524288, n * N at most 2^38, x of 16 bits");
  if (!is_aligned(p.x, 16, 2) || !fits_ring(weight_of(p), p.rows, p.k))
    return runtime::Support::no(
        "rows of x and weight must be 16-byte aligned, those of scales 4-byte, K at most 65536");
  if (p.n <= 8 ? p.rows > kFewRows : p.n <= 16 && p.rows > kManyRows && p.k <= kShortK)
    return runtime::Support::no("for so many rows sm80 is faster");
  if (p.n > 16 && p.n <= 32 && p.rows <= kFewestRows) return runtime::Support::no("for so few rows sm80 is faster");
  return {};
}

void launch(const LinearProblem& p, Stream stream) {
  if (p.rows == 0) return;
  with_type(p.x, [&]<class T>(const T* x) {
    if constexpr (!std::is_same_v<T, float>) {
      const Result<T> result{.y = p.y.as<T>(),
                             .row_stride = 1,
                             .column_stride = p.y.stride[0],
                             .batch_stride = 0,
                             .bias = p.bias.as<const T>(),
                             .bias_stride = p.bias.stride[0]};
      if (p.n > 16) return launch_matmul(p, x, result, stream);
      const WidePlan plan = wide_plan(p);
      p.n <= 8 ? launch_wide<8>(p, plan, x, result, stream) : launch_wide<16>(p, plan, x, result, stream);
    }
  });
}

const runtime::Registration<LinearProblem> backend{{.name = HOPWELL_ON_DEVICE ? "sm90" : "emu:sm90",
                                                    .supports = supports,
                                                    .workspace_bytes = workspace_bytes,
                                                    .launch = launch}};

}  // namespace
}  // namespace hopwell::ops::nvfp4
