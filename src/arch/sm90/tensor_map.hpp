// What a kernel sees of a tensor map; see make_tensor_map.hpp for how it is made.
#pragma once

namespace hopwell::arch {

/// Opaque, 128 bytes; passed to kernels by value as a `const __grid_constant__` parameter (or inside of one).
struct alignas(128) TensorMap {
  unsigned char opaque[128];
};

}  // namespace hopwell::arch
