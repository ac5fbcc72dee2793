// NVFP4 for Blackwell. sm80.cu has the other kernels.
//
//     nvfp4_gemv, nvfp4_matmul    kernels/block_scaled.hpp: products of codes on the tensor core
//     nvfp4_linear, n = 1         kernels/one_column.hpp, with Blackwell's conversion of codes
#include <algorithm>

#include "ops/nvfp4/kernels/block_scaled.hpp"
#include "ops/nvfp4/launch_one_column.hpp"
#include "tile/gpu/tensor_map.hpp"

namespace hopwell::ops::nvfp4 {
namespace {

using namespace HOPWELL_TARGET;

constexpr std::int64_t kMaxK = std::int64_t{1} << 30, kMaxRows = std::int64_t{1} << 28,
                       kMaxColumns = std::int64_t{1} << 23, kMaxBatches = 65535;

using tile::ceil_div;

// True if TMA can copy codes [rows, K/2, L]: rows and batches are 16-byte aligned.
bool takes_codes(const View& codes, std::int64_t rows, std::int64_t batches) {
  const auto fits = [](std::int64_t stride) { return stride >= 0 && stride % 16 == 0 && stride < kMaxK; };
  return reinterpret_cast<std::uintptr_t>(codes.data) % 16 == 0 && (rows <= 1 || fits(codes.stride[0])) &&
         (batches <= 1 || (codes.stride[2] >= 0 && codes.stride[2] % 16 == 0));
}

// A product of weights w (rows of a tile) and x (columns of a tile).
struct Product {
  const char* op;
  View w, x;  // codes [rows, K/2, L], [columns, K/2, L]
  Scales w_scales, x_scales;
  double factor;
  std::int64_t rows, columns, k, batches;
  const runtime::Device& device;
};

runtime::PlanOr<runtime::NoPlan> plan_product(const Product& p, const char* dimensions) {
  using runtime::Unsupported;
  if (!takes_codes(p.w, p.rows, p.batches) || !takes_codes(p.x, p.columns, p.batches))
    return Unsupported{"needs rows and batches of a and b 16-byte aligned"};
  if (p.k < 1 || p.k > kMaxK || p.rows > kMaxRows || p.columns > kMaxColumns || p.batches > kMaxBatches)
    return Unsupported{dimensions};
  return runtime::NoPlan{};
}

// Columns of a tile: the smallest size that holds all columns, or 256, the tile of a pair of CTAs. More than 128
// columns imply more than 128 rows: see sides_of.
int columns_of_tile(std::int64_t columns) { return columns <= 8 ? 8 : columns <= 32 ? 32 : columns <= 128 ? 128 : 256; }

// Number of CTAs, or pairs of CTAs, that K is split over: the number with the shortest CTA. The exchange of sums takes
// as long as one step for every 32 columns.
template <int kColumns>
int ranks_of(const Product& p, std::int64_t steps) {
  using Config = BlockScaledConfig<kColumns>;
  const std::int64_t tiles = ceil_div(p.rows, Config::kTileRows) * ceil_div(p.columns, kColumns) * p.batches,
                     at_a_time = std::max(Config::kCtas * p.device.cluster_sms / Config::kCtaGroup, 1);
  const auto cost = [&](std::int64_t ranks) {
    return ceil_div(tiles * ranks, at_a_time) * (ceil_div(steps, ranks) + (ranks > 1 ? kColumns / 32 : 0));
  };
  std::int64_t best = 1;
  for (std::int64_t ranks = 2; ranks <= std::min<std::int64_t>(Config::kMaxRanks, steps); ++ranks)
    if (cost(ranks) < cost(best)) best = ranks;
  return static_cast<int>(best);
}

arch::TensorMap map_of(View codes, const Product& p, std::int64_t rows, std::uint32_t box) {
  codes.shape = {rows, p.k / 2, p.batches};
  return tile::map_of(codes, {{1, BlockScaledConfig<8>::kRowBytes}, {0, box}, {2, 1}}, arch::Swizzle::bytes128);
}

template <int kColumns, class T>
void launch_tiles(const Product& p, const Result<T>& result, Stream stream) {
  using Config = BlockScaledConfig<kColumns>;
  const std::int64_t steps = ceil_div(p.k, Config::kK);
  const int ctas = ranks_of<kColumns>(p, steps) * Config::kCtaGroup;  // of a cluster
  const BlockScaledParams<T> params{.w = map_of(p.w, p, p.rows, Config::kRows),
                                    .x = map_of(p.x, p, p.columns, Config::kOwnColumns),
                                    .w_scales = p.w_scales,
                                    .x_scales = p.x_scales,
                                    .result = result,
                                    .rows = static_cast<int>(p.rows),
                                    .columns = static_cast<int>(p.columns),
                                    .steps = static_cast<int>(steps),
                                    .factor = p.factor};
  runtime::launch(
      p.op, nvfp4_matmul_block_scaled<kColumns, T>,
      {.grid = {static_cast<std::uint32_t>(ceil_div(p.rows, Config::kTileRows) * ctas),
                static_cast<std::uint32_t>(ceil_div(p.columns, kColumns)), static_cast<std::uint32_t>(p.batches)},
       .threads = Config::kThreads,
       .cluster = static_cast<std::uint32_t>(ctas),
       .shared_bytes = sizeof(BlockScaledStorage<kColumns>),
       .programmatic_dependency = p.device.has_dependent_launches()},
      stream, params);
}

template <class T>
void launch_product(const Product& p, const Result<T>& result, Stream stream) {
  runtime::with_constant<8, 32, 128, 256>(columns_of_tile(p.columns),
                                          [&]<int kColumns>() { launch_tiles<kColumns>(p, result, stream); });
}

// ---- nvfp4_gemv ----------------------------------------------------------------------------------------------------

Product product_of(const GemvProblem& p) {
  return {"nvfp4_gemv", p.a, p.b, p.sfa, p.sfb, p.alpha.get(), p.m, 1, p.k, p.l, p.device};
}

runtime::PlanOr<runtime::NoPlan> plan_gemv(const GemvProblem& p) {
  return plan_product(product_of(p), "needs K from 16 to 2^30, M at most 2^28, L at most 65535");
}

void launch_gemv(const GemvProblem& p, Stream stream) {
  if (p.m == 0 || p.l == 0) return;
  tile::with_type(p.c, [&]<class T>(T* c) {
    launch_tiles<8>(product_of(p), Result<T>{c, p.c.stride[0], 0, p.c.stride[2], nullptr, 0, 0}, stream);
  });
}

// ---- nvfp4_matmul --------------------------------------------------------------------------------------------------

// If a has at most 128 rows and fewer rows than b, memory bounds the product: a is x, and b's codes are read once.
// Otherwise b is x, and the results of an epilogue thread are contiguous.
DecodedProduct sides_of(const MatmulProblem& p) { return as_linear(p, p.m >= p.n || p.m > 128); }

Product product_of(const MatmulProblem& p) {
  const auto [codes, scales, linear] = sides_of(p);
  return {linear.op, linear.weight, codes, linear.weight_scale, scales, p.alpha.get(), linear.rows, linear.n, p.k,
          1,         p.device};
}

runtime::PlanOr<runtime::NoPlan> plan_matmul(const MatmulProblem& p) {
  return plan_product(product_of(p), "needs K from 16 to 2^30, M at most 2^28, N at most 2^23");
}

void launch_matmul(const MatmulProblem& p, Stream stream) {
  if (p.m == 0 || p.n == 0) return;
  tile::with_type(p.c, [&]<class T>(T*) { launch_product(product_of(p), result_of<T>(sides_of(p).linear), stream); });
}

// ---- nvfp4_linear --------------------------------------------------------------------------------------------------

runtime::PlanOr<Plan> plan_linear(const LinearProblem& p) {
  using runtime::Unsupported;
  if (p.n != 1 || p.rows < 1 || p.x.dtype == DType::kFloat32) return Unsupported{"needs n = 1, x of 16 bits"};
  const ProblemShape shape = shape_of(p);
  if (!shape.can_copy) return Unsupported{kNeedsForCopies};
  Plan plan = make_plan(shape, false, p.device, [](int) { return 0; });  // the plan of one column has no clusters
  if (plan.kernel != Kernel::kOneColumn) return Unsupported{"needs more shared memory for x"};
  plan.clusters =
      static_cast<int>(ceil_div(plan.row_tiles, plan.most_tiles()));  // CTAs with the same number of tiles: see Bound
  return plan;
}

void launch_linear(const LinearProblem& p, const Plan& plan, void* /*workspace*/, Stream stream) {
  tile::with_type(p.x, [&]<class T>(const T* x) {
    if constexpr (!std::is_same_v<T, float>)
      launch_one_column<FloatColumn<T, DecodeByConversion>, T>(
          "nvfp4_linear", plan, shape_of(p), p.device, stream,
          {.weight = weight_of(p), .x = {x}, .result = result_of<T>(p), .factor = p.global});
  });
}

const runtime::Registration linear{runtime::kBackend, plan_linear, launch_linear};
const runtime::Registration gemv{runtime::kBackend, plan_gemv, launch_gemv};
const runtime::Registration matmul{runtime::kBackend, plan_matmul, launch_matmul};

}  // namespace
}  // namespace hopwell::ops::nvfp4
