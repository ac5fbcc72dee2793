// Makes tensor maps of an operator's views.
#pragma once

#include <initializer_list>

#include "arch/sm90/make_tensor_map.hpp"
#include "runtime/check.hpp"

namespace hopwell::tile {

/// A dimension of a view, and the number of its elements that one copy moves.
struct BoxSide {
  std::size_t dimension;
  std::uint32_t elements;
};

/// Whether the copy engine supports a view that is contiguous in all dimensions but `outer`: 16-byte aligned, ascending
/// strides that are multiples of 16 bytes.
inline bool can_map(const View& view, std::initializer_list<std::size_t> outer) {
  constexpr std::int64_t kMost = std::int64_t{1} << 38;  // elements
  const auto chunk = static_cast<std::int64_t>(16 / size_of(view.dtype));
  bool can = reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0;
  for (const std::size_t i : outer)
    can &= view.shape[i] <= 1 || (view.stride[i] > 0 && view.stride[i] < kMost && view.stride[i] % chunk == 0);
  return can;
}

// `static` in each kernel file: see make_tensor_map.
namespace {

/// Tensor map with the dimensions `box` of a view, innermost first, of bf16 or bytes.
[[maybe_unused]] arch::TensorMap map_of(const View& view, std::initializer_list<BoxSide> box,
                                        arch::Swizzle swizzle = arch::Swizzle::none) {
  arch::TensorMapRequest request{
      .address = view.data,
      .element = view.dtype == DType::kBFloat16 ? arch::TensorElement::bf16 : arch::TensorElement::u8,
      .swizzle = swizzle};
  for (const auto& [dimension, elements] : box) {
    const int i = request.rank++;
    const std::int64_t extent = view.shape[dimension];
    request.extent[i] = static_cast<std::uint64_t>(extent);
    request.box[i] = elements;
    // A dimension of size 1 may have any stride, but the copy engine needs a multiple of 16 bytes.
    if (i > 0)
      request.stride_bytes[i - 1] =
          extent > 1 ? size_of(view.dtype) * static_cast<std::uint64_t>(view.stride[dimension]) : 16;
  }
  return arch::make_tensor_map(request);
}

}  // namespace
}  // namespace hopwell::tile
