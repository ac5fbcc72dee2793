// Views of the same memory with one dimension more or less.
#pragma once

#include <algorithm>
#include <cstdint>

#include "runtime/check.hpp"

namespace hopwell {

// With a dimension of size 1 inserted at `dim`: [b, h_q, d] -> [b, 1, h_q, d].
inline View unsqueezed(View view, int dim) {
  const auto at = static_cast<std::size_t>(dim), end = static_cast<std::size_t>(view.ndim);
  std::copy_backward(view.shape.begin() + dim, view.shape.begin() + view.ndim, view.shape.begin() + view.ndim + 1);
  std::copy_backward(view.stride.begin() + dim, view.stride.begin() + view.ndim, view.stride.begin() + view.ndim + 1);
  view.shape[at] = 1;
  view.stride[at] = at == end ? 1 : 0;
  ++view.ndim;
  return view;
}

// Element i of the first dimension: [b, q_len, h_q, d] -> [q_len, h_q, d].
inline View element(const View& view, std::int64_t i) {
  View one = view;
  one.data = view.as<std::uint8_t>() + i * view.stride[0] * static_cast<std::int64_t>(size_of(view.dtype));
  return one.squeezed(0);
}

}  // namespace hopwell
