// What a launch asks of an operator's views before it passes pointers to a kernel.
#pragma once

#include <cstdint>

#include "arch/sm80/convert.hpp"
#include "runtime/check.hpp"

namespace hopwell::tile {

inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

/// Whether each row of a matrix begins at a multiple of so many bytes.
inline bool has_aligned_rows(const View& view, std::size_t bytes, std::size_t element_bytes) {
  const auto stride = static_cast<std::size_t>(view.stride[0]) * element_bytes;
  return reinterpret_cast<std::uintptr_t>(view.data) % bytes == 0 && (view.shape[0] <= 1 || stride % bytes == 0);
}

/// Calls function(T*) with a pointer to the view's element type, as kernels name it.
template <class Function>
void with_type(const View& view, Function function) {
  if (view.dtype == DType::kFloat16) return function(view.as<arch::fp16>());
  if (view.dtype == DType::kBFloat16) return function(view.as<arch::bf16>());
  function(view.as<float>());
}

}  // namespace hopwell::tile
