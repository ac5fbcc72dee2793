// NVFP4 for Blackwell: nvfp4_gemv on the tensor core, kernels/block_scaled_gemv.hpp; nvfp4_linear of one column by
// kernels/one_column.hpp, with Blackwell's conversion of codes. The rest runs by sm80.cu.
#include <algorithm>

#include "arch/launch.hpp"
#include "arch/sm90/make_tensor_map.hpp"
#include "ops/nvfp4/kernels/block_scaled_gemv.hpp"
#include "ops/nvfp4/launch_one_column.hpp"
#include "ops/nvfp4/op.hpp"
#include "runtime/launch.hpp"

namespace hopwell::ops::nvfp4 {
namespace {

using namespace HOPWELL_TARGET;

constexpr const char* kBackend = HOPWELL_ON_DEVICE ? "sm100" : "emu:sm100";
constexpr std::int64_t kMaxK = std::int64_t{1} << 30, kMaxRows = std::int64_t{1} << 28, kMaxBatches = 65535;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Codes [rows, K/2, L] as the copy engine takes them: 16-byte aligned rows and batches.
bool takes_codes(const View& codes, std::int64_t rows, std::int64_t batches) {
  const auto fits = [](std::int64_t stride) { return stride >= 0 && stride % 16 == 0 && stride < kMaxK; };
  return reinterpret_cast<std::uintptr_t>(codes.data) % 16 == 0 && (rows <= 1 || fits(codes.stride[0])) &&
         (batches <= 1 || (codes.stride[2] >= 0 && codes.stride[2] % 16 == 0));
}

// ---- nvfp4_linear --------------------------------------------------------------------------------------------------

Plan plan_for(const LinearProblem& p) {
  return make_plan(shape_of(p), false, p.device, [](int) { return 0; });  // one column has no clusters
}

runtime::Support linear_supports(const LinearProblem& p) {
  using runtime::Support;
  if (p.n != 1 || p.rows < 1 || p.x.dtype == DType::kFloat32) return Support::no("n must be 1, x of 16 bits");
  if (!shape_of(p).can_copy)
    return Support::no("rows of x and weight must be 16-byte aligned, those of scales 4-byte, K at most 65536");
  if (plan_for(p).kernel != Kernel::kOneColumn) return Support::no("too little shared memory for x");
  return {};
}

void launch_linear(const LinearProblem& p, Stream stream) {
  Plan plan = plan_for(p);
  plan.clusters = static_cast<int>(ceil_div(plan.row_tiles, plan.most_tiles()));  // with as many tiles each: see Bound
  tile::with_type(p.x, [&]<class T>(const T* x) {
    if constexpr (!std::is_same_v<T, float>)
      launch_one_column<FloatColumn<T, DecodeByConversion>, T>(
          "nvfp4_linear", plan, shape_of(p), p.device, stream,
          {.weight = weight_of(p), .x = {x}, .result = result_of<T>(p), .factor = factor_of(p)});
  });
}

// ---- nvfp4_gemv ----------------------------------------------------------------------------------------------------

runtime::Support supports(const GemvProblem& p) {
  using runtime::Support;
  if (!takes_codes(p.a, p.m, p.l) || !takes_codes(p.b, 1, p.l))
    return Support::no("rows and batches of a and b must be 16-byte aligned");
  if (p.k < 1 || p.k > kMaxK || p.m > kMaxRows || p.l > kMaxBatches)
    return Support::no("K must be 16 to 2^30, M at most 2^28, L at most 65535");
  return {};
}

// Over how many CTAs to share out K: the one whose CTAs have least to do, two on a multiprocessor at a time.
int ranks_of(const GemvProblem& p, std::int64_t steps) {
  const std::int64_t tiles = ceil_div(p.m, BlockScaledConfig::kRows) * p.l, at_a_time = 2 * p.device.cluster_sms;
  const auto cost = [&](std::int64_t ranks) { return ceil_div(tiles * ranks, at_a_time) * ceil_div(steps, ranks); };
  std::int64_t best = 1;
  for (std::int64_t ranks = 2; ranks <= std::min<std::int64_t>(BlockScaledConfig::kMaxRanks, steps); ++ranks)
    if (cost(ranks) < cost(best)) best = ranks;
  return static_cast<int>(best);
}

// A dimension of size 1 may have any stride; the copy engine wants a multiple of 16.
std::uint64_t stride_of(std::int64_t stride, std::int64_t size) {
  return size > 1 ? static_cast<std::uint64_t>(stride) : 16;
}

arch::TensorMap map_of(const View& codes, std::int64_t k, std::int64_t rows, std::int64_t batches, std::uint32_t box) {
  return arch::make_tensor_map({.address = codes.data,
                                .element = arch::TensorElement::u8,
                                .rank = 3,
                                .extent = {static_cast<std::uint64_t>(k / 2), static_cast<std::uint64_t>(rows),
                                           static_cast<std::uint64_t>(batches)},
                                .stride_bytes = {stride_of(codes.stride[0], rows), stride_of(codes.stride[2], batches)},
                                .box = {BlockScaledConfig::kRowBytes, box, 1},
                                .swizzle = arch::Swizzle::bytes128});
}

template <class T>
void launch_typed(const GemvProblem& p, Stream stream) {
  using Config = BlockScaledConfig;
  const std::int64_t steps = ceil_div(p.k, Config::kK);
  const int ranks = ranks_of(p, steps);
  const BlockScaledParams<T> params{.a = map_of(p.a, p.k, p.m, p.l, Config::kRows),
                                    .b = map_of(p.b, p.k, 1, p.l, Config::kColumns),
                                    .sfa = p.sfa,
                                    .sfb = p.sfb,
                                    .c = p.c.as<T>(),
                                    .c_stride_m = p.c.stride[0],
                                    .c_stride_l = p.c.stride[2],
                                    .m = static_cast<int>(p.m),
                                    .steps = static_cast<int>(steps),
                                    .alpha = p.alpha};
  const std::int64_t ctas = ceil_div(p.m, Config::kRows) * ranks;
  runtime::launch("nvfp4_gemv", block_scaled_gemv_kernel<T>,
                  {.grid = {static_cast<std::uint32_t>(ctas), static_cast<std::uint32_t>(p.l)},
                   .threads = Config::kThreads,
                   .cluster = static_cast<std::uint32_t>(ranks),
                   .shared_bytes = sizeof(BlockScaledStorage),
                   .programmatic_dependency = p.device.has_dependent_launches()},
                  stream, params);
}

void launch(const GemvProblem& p, Stream stream) {
  if (p.m == 0 || p.l == 0) return;
  if (p.c.dtype == DType::kFloat16) return launch_typed<arch::fp16>(p, stream);
  if (p.c.dtype == DType::kBFloat16) return launch_typed<arch::bf16>(p, stream);
  launch_typed<float>(p, stream);
}

const runtime::Registration<LinearProblem> linear{
    {.name = kBackend, .supports = linear_supports, .launch = launch_linear}};
const runtime::Registration<GemvProblem> gemv{{.name = kBackend, .supports = supports, .launch = launch}};

}  // namespace
}  // namespace hopwell::ops::nvfp4
