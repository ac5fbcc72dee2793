// sparse_mla_backward on GPUs: shared by the preprocess and postprocess kernels. Memory bounds all of them.
#pragma once

#include <algorithm>

#include "arch/sm80/memory.hpp"
#include "arch/sm80/threads.hpp"
#include "ops/sparse_mla_backward/params.hpp"
#include "runtime/launch.hpp"

namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET {

using runtime::shape_of_ctas;

constexpr int kPassThreads = 288;  // half a row of 576
constexpr int kPassWarps = kPassThreads / 32;

// For kernels over rows: enough CTAs to fill the device, with several rows each.
inline arch::LaunchShape shape_over_rows(std::int64_t rows, const runtime::Device& device) {
  const auto ctas = std::clamp<std::int64_t>((rows + 15) / 16, 1, std::int64_t{8} * device.sms);
  return shape_of_ctas(ctas, kPassThreads);
}

}  // namespace hopwell::ops::sparse_mla_backward::HOPWELL_TARGET
