// What the backends of nvfp4_gemv, nvfp4_linear and nvfp4_matmul pass to their kernels.
#pragma once

#include "ops/nvfp4/kernels/operands.hpp"
#include "ops/nvfp4/plan.hpp"
#include "runtime/launch.hpp"
#include "tile/gpu/views.hpp"

namespace hopwell::ops::nvfp4::HOPWELL_TARGET {

// Whether the scales of a lane's 8 blocks lie together and are aligned, so that one copy brings them.
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

// A grid of the plan's clusters, times y and z.
inline arch::LaunchShape launch_shape(const Plan& plan, int threads, const runtime::Device& device, std::int64_t y = 1,
                                      std::int64_t z = 1) {
  return {.grid = {static_cast<std::uint32_t>(plan.clusters * plan.cluster), static_cast<std::uint32_t>(y),
                   static_cast<std::uint32_t>(z)},
          .threads = static_cast<std::uint32_t>(threads),
          .cluster = static_cast<std::uint32_t>(plan.cluster),
          .shared_bytes = plan.shared_bytes,
          .programmatic_dependency = device.has_dependent_launches()};
}

// For runtime::clusters_that_fit: a CTA that has all of a multiprocessor.
inline arch::LaunchShape whole_multiprocessors(int cluster, int threads, std::size_t shared_bytes) {
  return {.threads = static_cast<std::uint32_t>(threads),
          .cluster = static_cast<std::uint32_t>(cluster),
          .shared_bytes = shared_bytes};
}

}  // namespace hopwell::ops::nvfp4::HOPWELL_TARGET
