// Checks of an operator's views before a launch passes pointers to a kernel.
#pragma once

#include <cstdint>

#include "arch/sm80/convert.hpp"
#include "runtime/check.hpp"
#include "tile/ceil_div.hpp"

namespace hopwell::tile {

/// Whether every row of a view starts at a multiple of `bytes` bytes. The first `dims` dimensions select the row.
inline bool rows_aligned(const View& view, std::size_t dims, std::int64_t bytes = 16) {
  const auto width = static_cast<std::int64_t>(size_of(view.dtype));
  bool aligned = reinterpret_cast<std::uintptr_t>(view.data) % static_cast<std::uintptr_t>(bytes) == 0;
  for (std::size_t i = 0; i < dims; ++i) aligned &= view.shape[i] <= 1 || view.stride[i] * width % bytes == 0;
  return aligned;
}

/// Calls function(T*) with a pointer to the view's element type, with the kernels' type names.
template <class Function>
void with_type(const View& view, Function function) {
  if (view.dtype == DType::kFloat16) return function(view.as<arch::fp16>());
  if (view.dtype == DType::kBFloat16) return function(view.as<arch::bf16>());
  function(view.as<float>());
}

}  // namespace hopwell::tile
