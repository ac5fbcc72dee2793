// Division of sizes, rounded up. Host and kernels use it.
#pragma once

namespace hopwell::tile {

/// The quotient of two non-negative integers, rounded up.
template <class A, class B>
constexpr auto ceil_div(A a, B b) {
  return (a + b - 1) / b;
}

}  // namespace hopwell::tile
