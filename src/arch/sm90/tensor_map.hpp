// A tensor map as a kernel parameter; make_tensor_map.hpp makes it.
#pragma once

namespace hopwell::arch {

/// Opaque, 128 bytes; passed to kernels by value as a `const __grid_constant__` parameter (or inside of one).
struct alignas(128) TensorMap {
  unsigned char opaque[128];
};

}  // namespace hopwell::arch
