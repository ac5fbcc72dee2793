// What the backends of NVFP4 ask of a problem before they launch a kernel.
#pragma once

#include "ops/nvfp4/sm80_codes.hpp"
#include "runtime/launch.hpp"

namespace hopwell::ops::nvfp4 {
namespace {

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

bool is_aligned(const View& view, std::size_t bytes, std::size_t element_bytes) {
  const auto stride = static_cast<std::size_t>(view.stride[0]) * element_bytes;
  return reinterpret_cast<std::uintptr_t>(view.data) % bytes == 0 && (view.shape[0] <= 1 || stride % bytes == 0);
}

// Calls function(T*) with a pointer to the view's element type, as kernels name it.
template <class Function>
void with_type(const View& view, Function function) {
  if (view.dtype == DType::kFloat16) return function(view.as<fp16>());
  if (view.dtype == DType::kBFloat16) return function(view.as<bf16>());
  function(view.as<float>());
}

// Whether the fast kernel can copy a matrix: rows of codes by 16 bytes, plain scales by 4.
bool fits_ring(const Matrix& m, std::int64_t rows, std::int64_t k) {
  const auto multiple = [](std::int64_t stride, std::int64_t of) { return stride % of == 0; };
  const auto aligned = [](const void* data, std::uintptr_t to) {
    return reinterpret_cast<std::uintptr_t>(data) % to == 0;
  };
  constexpr std::int64_t kMaxK = std::int64_t{1} << 16, kMaxRows = std::int64_t{1} << 30,
                         kMaxStride = std::int64_t{1} << 27;
  return k > 0 && k <= kMaxK && rows <= kMaxRows && aligned(m.codes, 16) && multiple(m.row_stride, 16) &&
         multiple(m.batch_stride, 16) && m.row_stride < kMaxStride && aligned(m.scales.data, 4) &&
         multiple(m.scales.batch_stride, 4) && (m.scales.blocked || multiple(m.scales.row_stride, 4));
}

bool whole_scales(const Scales& scales) {  // a lane's 8 bytes lie together and are aligned, if slices are
  return !scales.blocked && reinterpret_cast<std::uintptr_t>(scales.data) % 8 == 0 && scales.row_stride % 8 == 0 &&
         scales.batch_stride % 8 == 0;
}

Matrix weight_of(const LinearProblem& p) {
  return {p.weight.as<const std::uint8_t>(), p.weight.stride[0], 0, p.weight_scale};
}

}  // namespace
}  // namespace hopwell::ops::nvfp4
