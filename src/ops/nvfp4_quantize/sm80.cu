// nvfp4_quantize and nvfp4_dequantize for any NVIDIA GPU from Ampere on.
#include <algorithm>

#include "ops/nvfp4_quantize/dequantize.hpp"
#include "ops/nvfp4_quantize/one_pass.hpp"
#include "ops/nvfp4_quantize/quantize.hpp"
#include "runtime/launch.hpp"
#include "tile/gpu/views.hpp"

namespace hopwell::ops::nvfp4_quantize {
namespace {

using namespace HOPWELL_TARGET;

// Number of CTAs: a thread for each block, but at most `per_multiprocessor` CTAs a multiprocessor.
std::uint32_t quantize_grid(std::int64_t blocks, std::int64_t per_multiprocessor, const runtime::Device& device) {
  const std::int64_t most = per_multiprocessor * device.sms;
  return static_cast<std::uint32_t>(
      std::clamp(tile::ceil_div(blocks, QuantizeConfig::kThreads), std::int64_t{1}, most));
}

int partials_of(const QuantizeProblem& p) {
  const std::uint32_t grid = quantize_grid(p.rows * p.k / tile::kCodesPerBlock, 8, p.device);
  return std::min(static_cast<int>(grid), QuantizeConfig::kMaxPartials);
}

constexpr std::size_t kAmaxBytes = sizeof(std::uint32_t) * QuantizeConfig::kMaxPartials;

runtime::PlanOr<QuantizePlan> plan_quantize(const QuantizeProblem& p) {
  const bool amax = needs_amax(p);
  return QuantizePlan{amax, takes_pairs(p), takes_one_pass(p), amax ? kAmaxBytes : 0};
}

template <class T>
void launch_amax(const arch::LaunchShape& shape, Stream stream, const QuantizeParams<T>& params) {
  const bool few = params.blocks.are_few();
  runtime::launch("nvfp4_quantize", few ? nvfp4_quantize_amax<T, std::uint32_t> : nvfp4_quantize_amax<T, std::int64_t>,
                  shape, stream, params);
}

template <bool kByThresholds, class T>
void launch_blocks(const arch::LaunchShape& shape, Stream stream, const QuantizeParams<T>& params) {
  const bool few = params.items.are_few();
  runtime::launch("nvfp4_quantize",
                  few ? nvfp4_quantize_blocks<T, kByThresholds, 1, std::uint32_t>
                      : nvfp4_quantize_blocks<T, kByThresholds, 1, std::int64_t>,
                  shape, stream, params);
}

template <class T>
void launch_one_pass(const QuantizeProblem& p, void* workspace, Stream stream, const T* x) {
  static_assert(sizeof(std::uint32_t) * AmaxExchange::kWords <= kAmaxBytes);
  const OnePassParams<T> params{
      .x = x,
      .codes = p.codes.as<std::uint8_t>(),
      .scales = p.scales.data,
      .global_scale = p.global_scale.as<float>(),
      .items = static_cast<std::uint32_t>(p.rows * p.k / OnePassConfig::kItemNumbers),
      .exchange = {.words = static_cast<std::uint32_t*>(workspace), .tag = runtime::new_launch_tag()}};
  const auto ctas = static_cast<std::uint32_t>(p.device.sms);
  runtime::launch("nvfp4_quantize", nvfp4_quantize_one_pass<T>,
                  {.grid = {ctas},
                   .threads = OnePassConfig::kThreads,
                   .cluster = HOPWELL_ON_DEVICE ? 1 : ctas,  // the emulator runs all CTAs of a cluster at the same time
                   .shared_bytes = sizeof(OnePassStorage),
                   .programmatic_dependency = p.device.has_dependent_launches(),
                   .cooperative = true},
                  stream, params);
}

void launch_quantize(const QuantizeProblem& p, const QuantizePlan& plan, void* workspace, Stream stream) {
  tile::with_type(p.x, [&]<class T>(const T* x) {
    if constexpr (sizeof(T) == 2)
      if (plan.one_pass) return launch_one_pass(p, workspace, stream, x);
    const bool amax = plan.amax, pairs = plan.pairs;
    const QuantizeParams<T> params{.x = x,
                                   .codes = p.codes.as<std::uint8_t>(),
                                   .scales = p.scales,
                                   .global_scale = p.global_scale.as<float>(),
                                   .global_pointer = p.has_global ? p.global.pointer : nullptr,
                                   .global_value = p.has_global ? p.global.value : 0,
                                   .amax = static_cast<std::uint32_t*>(workspace),
                                   .x_stride = p.x.stride[0],
                                   .codes_stride = p.codes.stride[0],
                                   .blocks = row_items(p.rows, p.k / tile::kCodesPerBlock),
                                   .items = items_of(p, pairs ? 2 : 1),
                                   .partials = amax ? partials_of(p) : 0,
                                   .x_aligned = tile::rows_aligned(p.x, 1),
                                   .codes_aligned = tile::rows_aligned(p.codes, 1, 8)};
    arch::LaunchShape shape{.threads = QuantizeConfig::kThreads,
                            .shared_bytes = sizeof(QuantizeStorage),
                            .programmatic_dependency = p.device.has_dependent_launches()};
    if (amax) {
      shape.grid = {static_cast<std::uint32_t>(params.partials)};
      launch_amax(shape, stream, params);
    }
    // Eight CTAs fit on a multiprocessor, so 16 are two waves. CTAs that first read the largest |x| and fill a table
    // have
    // one wave, because 5 of them fit.
    shape.grid = {quantize_grid(params.items.count(), pairs ? QuantizeConfig::kPairGrid : amax ? 5 : 16, p.device)};
    // With a global scale from x ties are frequent, and the thresholds are as fast with ties.
    if constexpr (sizeof(T) == 2) {
      if (pairs)
        return runtime::launch("nvfp4_quantize", nvfp4_quantize_blocks<T, true, 2, std::uint32_t>, shape, stream,
                               params);
      if (amax) return launch_blocks<true>(shape, stream, params);
    }
    launch_blocks<false>(shape, stream, params);
  });
}

void launch_dequantize(const DequantizeProblem& p, Stream stream) { dequantize("nvfp4_dequantize", p, stream); }

const runtime::Registration quantize{runtime::kBackend, plan_quantize, launch_quantize};
const runtime::Registration dequantize{runtime::kBackend, launch_dequantize};

}  // namespace
}  // namespace hopwell::ops::nvfp4_quantize
