// Helpers of the CPU backends for an operator's views.
#pragma once

#include <hopwell/tensor.hpp>

#include <cstddef>
#include <cstdint>

#include "runtime/check.hpp"

namespace hopwell::cpu {

// Calls function(T*) with a pointer to the view's element type.
template <class Function>
void with_type(const View& view, Function function) {
  switch (view.dtype) {
    case DType::kFloat16:
      return function(view.as<float16>());
    case DType::kBFloat16:
      return function(view.as<bfloat16>());
    default:
      return function(view.as<float>());
  }
}

inline std::size_t unsigned_size(std::int64_t size) { return static_cast<std::size_t>(size); }

}  // namespace hopwell::cpu
