// Kernel arguments and launch shapes for the backends of nvfp4_gemv, nvfp4_linear and nvfp4_matmul.
#pragma once

#include "ops/nvfp4/kernels/operands.hpp"
#include "ops/nvfp4/plan.hpp"
#include "runtime/launch.hpp"
#include "tile/gpu/views.hpp"

namespace hopwell::ops::nvfp4::HOPWELL_TARGET {

// True if the scales of 8 consecutive blocks are contiguous and 8-byte aligned. One 8-byte copy then loads them.
inline bool has_whole_scales(const Scales& scales) {
  return !scales.blocked && reinterpret_cast<std::uintptr_t>(scales.data) % 8 == 0 && scales.row_stride % 8 == 0 &&
         scales.batch_stride % 8 == 0;
}

inline Fp4Matrix weight_of(const LinearProblem& p) {
  return {p.weight.as<const std::uint8_t>(), p.weight.stride[0], 0, p.weight_scale};
}

template <class T>
Result<T> result_of(const LinearProblem& p) {
  return {.y = p.y.as<T>(),
          .row_stride = p.y.stride[1],
          .column_stride = p.y.stride[0],
          .batch_stride = 0,
          .bias = p.bias.as<const T>(),
          .bias_row_stride = p.bias.stride[1],
          .bias_column_stride = p.bias.stride[0]};
}

// Grid [clusters · CTAs of a cluster, y, z].
inline arch::LaunchShape launch_shape(const Plan& plan, int threads, const runtime::Device& device, std::int64_t y = 1,
                                      std::int64_t z = 1) {
  return {.grid = {static_cast<std::uint32_t>(plan.clusters * plan.cluster), static_cast<std::uint32_t>(y),
                   static_cast<std::uint32_t>(z)},
          .threads = static_cast<std::uint32_t>(threads),
          .cluster = static_cast<std::uint32_t>(plan.cluster),
          .shared_bytes = plan.shared_bytes,
          .programmatic_dependency = device.has_dependent_launches()};
}

// Launch shape for runtime::clusters_that_fit, for a kernel with one CTA per multiprocessor.
inline arch::LaunchShape whole_multiprocessors(int cluster, int threads, std::size_t shared_bytes) {
  return {.threads = static_cast<std::uint32_t>(threads),
          .cluster = static_cast<std::uint32_t>(cluster),
          .shared_bytes = shared_bytes};
}

}  // namespace hopwell::ops::nvfp4::HOPWELL_TARGET
