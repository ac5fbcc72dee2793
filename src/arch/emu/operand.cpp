#include "operand.hpp"

#include "numeric.hpp"

namespace hopwell::arch::emu {

float element_value(ElementType type, const std::byte* row, int index) {
  if (type == ElementType::e2m1) return from_e2m1(uint8_t(uint8_t(row[index / 2]) >> 4 * (index % 2) & 15));
  if (type == ElementType::e4m3) return from_e4m3(uint8_t(row[index]));
  uint16_t bits;
  __builtin_memcpy(&bits, row + 2 * index, 2);
  return type == ElementType::bf16 ? from_bf16(bits) : from_fp16(bits);
}

void SharedOperand::check(const char* which) const {
  const auto fail = [&](Kind kind, const char* what) {
    machine->stop(
        kind, format("matrix descriptor of %s: %s (start 0x%x, leading %u, stride %u, swizzle mode %d)", which, what,
                     descriptor.start, descriptor.leading, descriptor.stride, int(descriptor.swizzle)));
  };
  if (descriptor.error) fail(Kind::descriptor, descriptor.error);
  if (descriptor.base_offset) fail(Kind::unsupported, "a base offset is not modelled");
  const uint32_t pattern = 128u << int(descriptor.swizzle);
  if (descriptor.swizzle != Swizzle::none && major == Major::k &&
      descriptor.start % pattern >= 16u << int(descriptor.swizzle))
    fail(Kind::unsupported, "a start inside of the swizzle pattern, other than in its first row, is not modelled");
  // MN-major with a swizzle: an operand may start inside the first row of the swizzle pattern if its rows end inside
  // that row too (certified on a GPU).
  const uint32_t width = 16u << int(descriptor.swizzle), offset = descriptor.start % pattern;
  if (descriptor.swizzle != Swizzle::none && major == Major::mn && offset &&
      offset + uint32_t(mn * element_bits(type) / 8) > width)
    fail(Kind::unsupported,
         "an MN-major operand that leaves the first row of the swizzle pattern it starts in is not modelled");
}

void SharedOperand::record_reads(Observer& who, Epoch epoch, const char* what) const {
  const int chunk = 128 / element_bits(type);  // elements in 16 bytes
  if (major == Major::k) {
    for (int i = 0; i < mn; ++i)
      for (int j = 0; j < k; j += chunk)
        machine->async_access(who, epoch, in_rank(rank, operand_address(descriptor, major, element_bits(type), i, j)),
                              16, false, Proxy::async, what);
  } else {
    for (int j = 0; j < k; ++j)
      for (int i = 0; i < mn; i += chunk)
        machine->async_access(who, epoch, in_rank(rank, operand_address(descriptor, major, element_bits(type), i, j)),
                              16, false, Proxy::async, what);
  }
}

void SharedOperand::load(float* out, int pitch, bool transposed) const {
  const int chunk = 128 / element_bits(type);
  const std::byte* base = machine->memory(in_rank(rank, 0));
  const auto put = [&](int i, int j, float v) { out[transposed ? j * pitch + i : i * pitch + j] = v; };
  const bool k_major = major == Major::k;
  const int outer = k_major ? mn : k, inner = k_major ? k : mn;
  for (int o = 0; o < outer; ++o)
    for (int i = 0; i < inner; i += chunk) {
      const std::byte* row =
          base + operand_address(descriptor, major, element_bits(type), k_major ? o : i, k_major ? i : o);
      if (type == ElementType::bf16) {  // the common case, without a branch on the type for every element
        uint16_t bits[8];
        __builtin_memcpy(bits, row, 16);
        for (int e = 0; e < 8; ++e) k_major ? put(o, i + e, from_bf16(bits[e])) : put(i + e, o, from_bf16(bits[e]));
      } else {
        for (int e = 0; e < chunk; ++e) {
          const float v = element_value(type, row, e);
          k_major ? put(o, i + e, v) : put(i + e, o, v);
        }
      }
    }
}

}  // namespace hopwell::arch::emu
