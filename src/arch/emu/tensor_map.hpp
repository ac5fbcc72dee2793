// Contents that the emulator stores in the 128 opaque bytes of a tensor map.
#pragma once

#include "../sm90/make_tensor_map.hpp"

namespace hopwell::arch::emu {

struct TensorMapContents {
  uint64_t magic;
  std::byte* base;
  uint64_t stride_bytes[4];
  uint32_t extent[5];
  uint16_t box[5];
  uint8_t rank, element_bytes;
  Swizzle swizzle;
};
static_assert(sizeof(TensorMapContents) <= sizeof(TensorMap));
inline constexpr uint64_t kTensorMapMagic = 0x70616d726f736e74;

/// Size of a box in shared memory, in bytes.
inline uint32_t box_bytes(const TensorMapContents& m) {
  uint32_t bytes = m.element_bytes;
  for (int i = 0; i < m.rank; ++i) bytes *= m.box[i];
  return bytes;
}

}  // namespace hopwell::arch::emu
