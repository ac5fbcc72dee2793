// nvfp4_linear for Hopper where x is much of what there is to read: 9 to 16 columns, or few rows of weights. sm80.cu has the
// rest, and what x lies in shared memory for from beginning to end. The kernel: sm90_many.hpp.
#include <algorithm>
#include <array>

#include "ops/nvfp4/sm80_launch.hpp"
#include "ops/nvfp4/sm90_many.hpp"

namespace hopwell::ops::nvfp4 {
namespace {

constexpr int kMaxRanks = 8, kMaxTiles = WideConfig::kWarps;  // a CTA
// As measured on an H200: with 8 columns sm80's kernel is faster from some rows on, with 16 where all of x fits beside many.
constexpr std::int64_t kFewRows = 4096, kManyRows = 16384, kShortK = 4096;

template <class Number>
int number(Number value) {
  return static_cast<int>(value);
}

// How many clusters of so many CTAs run at a time, one CTA a multiprocessor: fewer than there are multiprocessors for.
int clusters_at_a_time(int ranks) {
  static const std::array<int, kMaxRanks + 1> most = [] {
    std::array<int, kMaxRanks + 1> table{};
    for (int of = 2; of <= kMaxRanks; of *= 2)
      table[static_cast<std::size_t>(of)] = runtime::clusters_at_a_time(
          wide_kernel<16, bf16>, {.threads = WideConfig::kThreads,
                                  .cluster = static_cast<std::uint32_t>(of),
                                  .shared_bytes = static_cast<std::size_t>(wide_shared_bytes<16>(kMaxTiles, 1, 1))});
    return table;
  }();
  return most[static_cast<std::size_t>(ranks)];
}

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
  return rounds * (longest + (columns > 8 ? 12LL : 6LL) * plan.stages + (plan.ranks > 1 ? 55 + 6 * plan.ranks : 0));
}

WidePlan wide_plan(const LinearProblem& p) {
  const std::int64_t tiles = ceil_div(p.rows, LinearConfig::kRows), stages = ceil_div(p.k, LinearConfig::kStageK);
  WidePlan best;
  for (int ranks = 1; ranks <= kMaxRanks; ranks *= 2) {
    const int together = ranks == 1 ? runtime::multiprocessors(p.device.device_id) : clusters_at_a_time(ranks);
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

runtime::Support supports(const LinearProblem& p) {
  if (p.x.dtype == DType::kFloat32 || p.n < 2 || p.n > 16)
    return runtime::Support::no("n must be 2 to 16, x of 16 bits");
  if (!is_aligned(p.x, 16, 2) || !fits_ring(weight_of(p), p.rows, p.k))
    return runtime::Support::no(
        "rows of x and weight must be 16-byte aligned, those of scales 4-byte, K at most 65536");
  if (p.n <= 8 ? p.rows > kFewRows : p.rows > kManyRows && p.k <= kShortK)
    return runtime::Support::no("for so many rows sm80 is faster");
  return {};
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
                   .programmatic_dependency = dependent_launches(p.device)},
                  stream, params);
}

void launch(const LinearProblem& p, Stream stream) {
  if (p.rows == 0) return;
  const WidePlan plan = wide_plan(p);
  with_type(p.x, [&]<class T>(const T* x) {
    if constexpr (!std::is_same_v<T, float>) {
      const Result<T> result{.y = p.y.as<T>(),
                             .row_stride = 1,
                             .column_stride = p.y.stride[0],
                             .batch_stride = 0,
                             .bias = p.bias.as<const T>(),
                             .bias_stride = p.bias.stride[0]};
      p.n <= 8 ? launch_wide<8>(p, plan, x, result, stream) : launch_wide<16>(p, plan, x, result, stream);
    }
  });
}

const runtime::Registration<LinearProblem> backend{
    {.name = HOPWELL_ON_DEVICE ? "sm90" : "emu:sm90", .supports = supports, .launch = launch}};

}  // namespace
}  // namespace hopwell::ops::nvfp4
