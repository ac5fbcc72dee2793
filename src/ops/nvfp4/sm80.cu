// NVFP4 for any NVIDIA GPU from Ampere on: which kernel runs what. sm80_linear.hpp multiplies by one column at the speed
// of memory, sm80_many.hpp by up to 16 at a time, sm80_any.hpp by anything, sm80_quantize.hpp converts.
#include <algorithm>

#include "ops/nvfp4/sm80_any.hpp"
#include "ops/nvfp4/sm80_launch.hpp"
#include "ops/nvfp4/sm80_linear.hpp"
#include "ops/nvfp4/sm80_many.hpp"
#include "ops/nvfp4/sm80_quantize.hpp"

namespace hopwell::ops::nvfp4 {
namespace {

constexpr const char* kBackend = HOPWELL_ON_DEVICE ? "sm80" : "emu:sm80";
constexpr std::int64_t kMaxGridY = 65535, kMaxGridX = 0x7fffffff;

// ---- nvfp4_linear, nvfp4_gemv --------------------------------------------------------------------------------------

template <class Rows, class T>
void launch_any(const char* name, AnyParams<Rows, T> p, std::int64_t batches, const runtime::Device& device,
                Stream stream) {
  p.lanes = 1;
  while (p.lanes < 32 && p.lanes < p.blocks) p.lanes *= 2;
  const std::int64_t rows_of_cta = AnyConfig::kThreads / p.lanes;
  const arch::LaunchShape shape{.grid = {static_cast<std::uint32_t>(ceil_div(p.rows, rows_of_cta)),
                                         static_cast<std::uint32_t>(ceil_div(p.columns, AnyConfig::kColumns)),
                                         static_cast<std::uint32_t>(batches)},
                                .threads = AnyConfig::kThreads,
                                .programmatic_dependency = device.has_dependent_launches()};
  runtime::launch(name, any_kernel<Rows, T>, shape, stream, p);
}

// How the fast kernel shares out its work; no warps: it has not the shared memory.
struct LinearPlan {
  int warps = 0, slice = 0, ctas = 0, tiles_of_cta = 0, larger_ctas = 0, batch = 0;
  std::size_t shared_bytes = 0;
};

LinearPlan linear_plan(std::int64_t rows, std::int64_t k, std::int64_t batches, const runtime::Device& device) {
  constexpr std::int64_t kRowSums = 4 * LinearConfig::kRows, kMaxBatch = 16;
  constexpr std::int64_t kRingBytes = LinearConfig::kStages * LinearConfig::kStageBytes;
  const std::int64_t tiles = ceil_div(rows, LinearConfig::kRows);
  const std::int64_t together = std::max<std::int64_t>(device.sms / batches, 1);
  const std::int64_t ctas = std::min(tiles, together), most = ceil_div(tiles, ctas), batch = std::min(most, kMaxBatch);
  for (std::int64_t warps = LinearConfig::kMaxWarps; warps >= 4; warps /= 2) {
    const std::int64_t slice = ceil_div(ceil_div(k, warps), LinearConfig::kStageK) * LinearConfig::kStageK;
    const auto bytes =
        static_cast<std::size_t>(warps * (kRingBytes + 2 * slice + (batch < most ? 2 : 1) * batch * kRowSums));
    if (bytes > device.shared_bytes) continue;
    const auto number = [](std::int64_t x) { return static_cast<int>(x); };
    return {number(warps),        number(slice), number(ctas), number(tiles / ctas),
            number(tiles % ctas), number(batch), bytes};
  }
  return {};
}

template <class Columns, class T>
void launch_fast(const char* name, LinearParams<Columns, T> p, const LinearPlan& plan, std::int64_t batches,
                 const runtime::Device& device, Stream stream) {
  p.warps = plan.warps, p.slice = plan.slice, p.batch = plan.batch;
  p.tiles_of_cta = plan.tiles_of_cta, p.larger_ctas = plan.larger_ctas;
  p.whole_scales = whole_scales(p.weight.scales);
  const arch::LaunchShape shape{.grid = {static_cast<std::uint32_t>(plan.ctas), static_cast<std::uint32_t>(batches)},
                                .threads = static_cast<std::uint32_t>(32 * plan.warps),
                                .shared_bytes = plan.shared_bytes,
                                .programmatic_dependency = device.has_dependent_launches()};
  runtime::launch(name, linear_kernel<Columns, T>, shape, stream, p);
}

runtime::Support linear_supports(const LinearProblem& p) {
  if (p.n > kMaxGridY * AnyConfig::kColumns || p.rows > kMaxGridX)
    return runtime::Support::no("n must be at most 524280, N below 2^31");
  return {};
}

// How the kernel for several columns shares out its work; no warps: it is not for that kernel.
struct ManyPlan {
  std::int64_t columns = 0, warps = 0, ranks = 0, phases = 0, slice = 0, ctas = 0, chunk = 0;
  std::int64_t cost = 0;  // in stages of a warp, measured on an H200
  std::size_t pushed = 0, shared_bytes = 0;
};

std::int64_t round_up(std::int64_t x, std::int64_t multiple) { return ceil_div(x, multiple) * multiple; }

// Shared memory for so many tiles at a time, in plan.pushed and plan.shared_bytes. What CTAs give each other goes where x was,
// if there is no more to do with that.
void place_shared(ManyPlan& plan, std::int64_t chunk, bool is_last) {
  const std::int64_t sums = 4 * LinearConfig::kRows * plan.columns, threads = 32 * plan.warps;
  const std::int64_t x_bytes = plan.slice * 2 * plan.columns,
                     before_x = plan.warps * (plan.columns == 8 ? kRingBytes<8> : kRingBytes<16>);
  const std::int64_t pieces = ceil_div(chunk * sums / 16, threads);  // of four sums a thread
  const std::int64_t push = plan.ranks > 1 ? round_up(pieces, plan.ranks) * 16 * threads : 0;
  const bool in_x = is_last && push <= x_bytes;
  const std::int64_t rest = round_up(before_x + x_bytes + (plan.warps + chunk) * sums + 8 * chunk, 16);
  plan.chunk = chunk;
  plan.pushed = static_cast<std::size_t>(in_x ? before_x : rest);
  plan.shared_bytes = static_cast<std::size_t>(in_x ? rest : rest + push);
}

// In stages of a warp, as an H200 takes them: beside those, x comes in, phases start anew, CTAs meet, tiles beyond a chunk wait,
// scales want some L1 cache, and fewer warps are slower but sooner done, above all where two CTAs fit at a time.
std::int64_t cost_of(const ManyPlan& plan, std::int64_t most_tiles) {
  constexpr std::int64_t kX = 3, kPhase = 35, kMeet = 33, kRound = 20, kSooner = 16;
  constexpr std::size_t kMuchShared = 195 * 1024, kHalfShared = 113 * 1024;
  const std::int64_t stages = plan.slice / LinearConfig::kStageK;
  const std::int64_t share = ceil_div(most_tiles * stages, plan.warps) * plan.warps * plan.phases;
  std::int64_t cost = share + kX * plan.phases * stages * plan.columns / 8 + kPhase * (plan.phases - 1);
  cost += ceil_div(most_tiles, plan.chunk) * (kRound + (plan.ranks > 1 ? kMeet * plan.ranks / 2 : 0));
  if (plan.shared_bytes > kMuchShared) cost += share / 5;
  if (plan.warps < ManyConfig::kMaxWarps) {
    cost += plan.columns > 8 ? share * 3 / 10 - kSooner : share / 6;
    if (plan.shared_bytes <= kHalfShared) cost -= kSooner;
  }
  return cost;
}

// How many CTAs, or clusters of them, run at a time, one CTA a multiprocessor. Clusters of four do not fill all of those.
std::int64_t clusters_that_fit(std::int64_t ranks, const runtime::Device& device) {
  const std::int64_t most = device.sms / ranks;
  if (ranks <= 2) return most;
  const arch::LaunchShape shape{.threads = 32 * ManyConfig::kMaxWarps,
                                .cluster = static_cast<std::uint32_t>(ranks),
                                .shared_bytes = device.shared_bytes};
  return std::min<std::int64_t>(most, runtime::clusters_that_fit<many_kernel<8, bf16>>(device, shape));
}

ManyPlan many_plan_of(const LinearProblem& p, std::int64_t columns, std::int64_t warps, std::int64_t ranks) {
  constexpr std::int64_t kFewTiles = 8, kMostOfFour = 16;  // more have too much to give each other
  const std::size_t room = p.device.shared_bytes;
  const std::int64_t tiles = ceil_div(p.rows, LinearConfig::kRows), stages = ceil_div(p.k, LinearConfig::kStageK);
  const std::int64_t together = clusters_that_fit(ranks, p.device) / ceil_div(p.n, columns);
  ManyPlan best;
  ManyPlan plan{.columns = columns, .warps = warps, .ranks = ranks};
  plan.ctas = std::clamp<std::int64_t>(together, 1, tiles);
  const std::int64_t most = ceil_div(tiles, plan.ctas);
  if (ranks > 2 && (columns > 8 || most > kMostOfFour)) return {};
  for (plan.phases = 1; plan.phases == 1 || plan.phases * ranks <= stages; ++plan.phases) {
    plan.slice = ceil_div(stages, ranks * plan.phases) * LinearConfig::kStageK;
    std::int64_t chunk = most;
    for (place_shared(plan, chunk, true); plan.shared_bytes > room && chunk > 1;) place_shared(plan, --chunk, false);
    if (plan.shared_bytes > room || chunk < std::min(most, kFewTiles)) continue;
    plan.cost = cost_of(plan, most);
    if (best.warps != 0 && best.cost <= plan.cost) break;
    best = plan;
  }
  return best;
}

ManyPlan many_plan(const LinearProblem& p) {
  if (p.x.dtype == DType::kFloat32 || p.n < 2 || !is_aligned(p.x, 16, 2) || !fits_ring(weight_of(p), p.rows, p.k))
    return {};
  const std::int64_t columns = p.n <= 8 ? 8 : 16;
  ManyPlan best;
  for (const std::int64_t ranks : {1, 2, 4}) {
    if (ranks > 1 && !p.device.has_clusters()) continue;
    for (const std::int64_t warps : {ManyConfig::kMaxWarps, ManyConfig::kMaxWarps / 2}) {
      const ManyPlan plan = many_plan_of(p, columns, warps, ranks);
      if (plan.warps != 0 && (best.warps == 0 || plan.cost < best.cost)) best = plan;
    }
  }
  return best;
}

template <int kColumns, class T>
void launch_many(const LinearProblem& p, const ManyPlan& plan, const T* x, const Result<T>& result, Stream stream) {
  const auto number = [](auto value) { return static_cast<int>(value); };
  const std::int64_t tiles = ceil_div(p.rows, LinearConfig::kRows);
  const ManyParams<T> params{.weight = weight_of(p),
                             .x = x,
                             .x_stride = p.x.stride[0],
                             .result = result,
                             .factor = factor_of(p.global, p.global_is_reciprocal),
                             .rows = number(p.rows),
                             .k = number(p.k),
                             .columns = number(p.n),
                             .slice = number(plan.slice),
                             .ranks = number(plan.ranks),
                             .phases = number(plan.phases),
                             .tiles_of_cta = number(tiles / plan.ctas),
                             .larger_ctas = number(tiles % plan.ctas),
                             .warps = number(plan.warps),
                             .chunk = number(plan.chunk),
                             .pushed = number(plan.pushed),
                             .whole_scales = whole_scales(p.weight_scale)};
  const arch::LaunchShape shape{.grid = {static_cast<std::uint32_t>(plan.ctas * plan.ranks), 1,
                                         static_cast<std::uint32_t>(ceil_div(p.n, kColumns))},
                                .threads = static_cast<std::uint32_t>(32 * plan.warps),
                                .cluster = static_cast<std::uint32_t>(plan.ranks),
                                .shared_bytes = plan.shared_bytes,
                                .programmatic_dependency = p.device.has_dependent_launches()};
  runtime::launch("nvfp4_linear", many_kernel<kColumns, T>, shape, stream, params);
}

// 16-bit floats: true if a fast kernel took them.
template <class T>
bool launch_fast_linear(const LinearProblem& p, const T* x, const Result<T>& result, Stream stream) {
  if constexpr (std::is_same_v<T, float>) {
    return false;
  } else {
    if (const ManyPlan plan = many_plan(p); plan.warps != 0) {
      plan.columns == 8 ? launch_many<8>(p, plan, x, result, stream) : launch_many<16>(p, plan, x, result, stream);
      return true;
    }
    const Matrix weight = weight_of(p);
    if (p.n != 1 || !is_aligned(p.x, 16, sizeof(T)) || !fits_ring(weight, p.rows, p.k)) return false;
    const LinearPlan plan = linear_plan(p.rows, p.k, 1, p.device);
    if (plan.warps == 0) return false;
    launch_fast<FloatColumn<T>, T>("nvfp4_linear",
                                   {.weight = weight,
                                    .x = {x},
                                    .result = result,
                                    .factor = factor_of(p.global, p.global_is_reciprocal),
                                    .rows = static_cast<int>(p.rows),
                                    .k = static_cast<int>(p.k)},
                                   plan, 1, p.device, stream);
    return true;
  }
}

void launch_linear(const LinearProblem& p, Stream stream) {
  if (p.n == 0 || p.rows == 0) return;
  with_type(p.x, [&]<class T>(const T* x) {
    const Result<T> result{.y = p.y.as<T>(),
                           .row_stride = 1,
                           .column_stride = p.y.stride[0],
                           .batch_stride = 0,
                           .bias = p.bias.as<const T>(),
                           .bias_stride = p.bias.stride[0]};
    if (launch_fast_linear(p, x, result, stream)) return;
    launch_any<FloatRows<T>, T>("nvfp4_linear",
                                {.weight = weight_of(p),
                                 .x = {x, p.x.stride[0]},
                                 .result = result,
                                 .factor = factor_of(p.global, p.global_is_reciprocal),
                                 .rows = p.rows,
                                 .blocks = p.k / kCodesOfBlock,
                                 .columns = static_cast<int>(p.n),
                                 .lanes = 1},
                                1, p.device, stream);
  });
}

Matrix batched(const View& codes, const Scales& scales) {
  return {codes.as<const std::uint8_t>(), codes.stride[0], codes.stride[2], scales};
}

runtime::Support gemv_supports(const GemvProblem& p) {
  if (p.l > kMaxGridY || p.m > kMaxGridX) return runtime::Support::no("L must be at most 65535, M below 2^31");
  return {};
}

void launch_gemv(const GemvProblem& p, Stream stream) {
  if (p.m == 0 || p.l == 0) return;
  const Matrix a = batched(p.a, p.sfa), b = batched(p.b, p.sfb);
  const Factor factor{nullptr, p.alpha, false};
  const LinearPlan plan = fits_ring(a, p.m, p.k) ? linear_plan(p.m, p.k, p.l, p.device) : LinearPlan{};
  with_type(p.c, [&]<class T>(T* c) {
    const Result<T> result{.y = c,
                           .row_stride = p.c.stride[0],
                           .column_stride = 0,
                           .batch_stride = p.c.stride[2],
                           .bias = nullptr,
                           .bias_stride = 0};
    if (plan.warps != 0)
      return launch_fast<CodeColumn, T>("nvfp4_gemv",
                                        {.weight = a,
                                         .x = {b},
                                         .result = result,
                                         .factor = factor,
                                         .rows = static_cast<int>(p.m),
                                         .k = static_cast<int>(p.k)},
                                        plan, p.l, p.device, stream);
    launch_any<CodeRow, T>("nvfp4_gemv",
                           {.weight = a,
                            .x = {b},
                            .result = result,
                            .factor = factor,
                            .rows = p.m,
                            .blocks = p.k / kCodesOfBlock,
                            .columns = 1,
                            .lanes = 1},
                           p.l, p.device, stream);
  });
}

// ---- nvfp4_quantize, nvfp4_dequantize ------------------------------------------------------------------------------

// CTAs for so many blocks of 16 numbers: a thread each, or so many CTAs a multiprocessor.
std::uint32_t quantize_grid(std::int64_t blocks, std::int64_t of_multiprocessor, const runtime::Device& device) {
  const std::int64_t most = of_multiprocessor * device.sms;
  return static_cast<std::uint32_t>(std::clamp(ceil_div(blocks, QuantizeConfig::kThreads), std::int64_t{1}, most));
}

bool needs_amax(const QuantizeProblem& p) { return !p.has_global && p.rows * p.k != 0; }

int shares_of(const QuantizeProblem& p) {
  const std::uint32_t grid = quantize_grid(p.rows * p.k / kCodesOfBlock, 8, p.device);
  return std::min(static_cast<int>(grid), QuantizeConfig::kMaxShares);
}

std::size_t quantize_workspace(const QuantizeProblem& p) {
  return needs_amax(p) ? sizeof(std::uint32_t) * QuantizeConfig::kMaxShares : 0;
}

void launch_quantize(const QuantizeProblem& p, Stream stream) {
  with_type(p.x, [&]<class T>(const T* x) {
    const bool amax = needs_amax(p);
    const std::int64_t blocks = p.k / kCodesOfBlock;
    const QuantizeParams<T> params{.x = x,
                                   .codes = p.codes.as<std::uint8_t>(),
                                   .scales = p.scales,
                                   .global_scale = p.global_scale.as<float>(),
                                   .given_pointer = p.has_global ? p.global.pointer : nullptr,
                                   .given_value = p.has_global ? p.global.value : 0,
                                   .amax = static_cast<std::uint32_t*>(p.workspace),
                                   .x_stride = p.x.stride[0],
                                   .codes_stride = p.codes.stride[0],
                                   .blocks = pieces_of(p.rows, blocks),
                                   .scale_blocks = p.scales.blocked
                                                       ? pieces_of(ceil_div(p.rows, 128) * 128, ceil_div(blocks, 4) * 4)
                                                       : pieces_of(p.rows, blocks),
                                   .shares = amax ? shares_of(p) : 0,
                                   .x_aligned = is_aligned(p.x, 16, sizeof(T)),
                                   .codes_aligned = is_aligned(p.codes, 8, 1)};
    arch::LaunchShape shape{.threads = QuantizeConfig::kThreads,
                            .shared_bytes = sizeof(QuantizeStorage),
                            .programmatic_dependency = p.device.has_dependent_launches()};
    if (amax) {
      shape.grid = {static_cast<std::uint32_t>(params.shares)};
      runtime::launch("nvfp4_quantize", amax_kernel<T>, shape, stream, params);
    }
    // Six of these fit at a time: two rounds. Where each first waits for the largest |x| and makes a table, eight.
    shape.grid = {quantize_grid(params.scale_blocks.rows * params.scale_blocks.of_row, amax ? 8 : 12, p.device)};
    // A global that comes from x makes many ties, which thresholds do not mind.
    if constexpr (sizeof(T) == 2) {
      if (amax) return runtime::launch("nvfp4_quantize", quantize_kernel<T, true>, shape, stream, params);
    }
    runtime::launch("nvfp4_quantize", quantize_kernel<T, false>, shape, stream, params);
  });
}

void launch_dequantize(const DequantizeProblem& p, Stream stream) {
  if (p.rows == 0 || p.k == 0) return;
  with_type(p.x, [&]<class T>(T* x) {
    constexpr std::int64_t kNumbers = Piece<T>::kNumbers,
                           kOfCta = std::int64_t{QuantizeConfig::kThreads} * QuantizeConfig::kTogether;
    const arch::LaunchShape shape{.grid = {static_cast<std::uint32_t>(ceil_div(p.rows * (p.k / kNumbers), kOfCta))},
                                  .threads = QuantizeConfig::kThreads,
                                  .programmatic_dependency = p.device.has_dependent_launches()};
    const DequantizeParams<T> params{.matrix = {p.codes.as<const std::uint8_t>(), p.codes.stride[0], 0, p.scales},
                                     .x = x,
                                     .global = factor_of(p.global),
                                     .x_stride = p.x.stride[0],
                                     .pieces = pieces_of(p.rows, p.k / kNumbers),
                                     .x_aligned = is_aligned(p.x, 16, sizeof(T)),
                                     .codes_aligned = is_aligned(p.codes, 4, 1)};
    runtime::launch("nvfp4_dequantize", dequantize_kernel<T>, shape, stream, params);
  });
}

const runtime::Registration<LinearProblem> linear{
    {.name = kBackend, .supports = linear_supports, .launch = launch_linear}};
const runtime::Registration<GemvProblem> gemv{{.name = kBackend, .supports = gemv_supports, .launch = launch_gemv}};
const runtime::Registration<QuantizeProblem> quantize{
    {.name = kBackend, .workspace_bytes = quantize_workspace, .launch = launch_quantize}};
const runtime::Registration<DequantizeProblem> dequantize{{.name = kBackend, .launch = launch_dequantize}};

}  // namespace
}  // namespace hopwell::ops::nvfp4
