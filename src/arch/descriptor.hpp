// Bit fields of the descriptors of wgmma and tcgen05. Plain arithmetic, identical for nvcc and for the host compiler.
//
// Sections of https://docs.nvidia.com/cuda/parallel-thread-execution/
//   wgmma operands        #asynchronous-warpgroup-level-matrix-shared-memory-layout-matrix-descriptor
//   tcgen05 operands      #tcgen05-shared-memory-descriptor
//   tcgen05 instructions  #tcgen05-instruction-descriptor
#pragma once

#include "platform.hpp"

namespace hopwell::arch {

/// How 16-byte chunks are permuted inside rows of 32, 64 or 128 bytes.
enum class Swizzle : uint8_t { none = 0, bytes32 = 1, bytes64 = 2, bytes128 = 3 };

/// Index of an operand that is contiguous in memory. K-major is row-major A [M][K] and column-major B.
enum class Major : uint8_t { k = 0, mn = 1 };

/// Strides of an operand in shared memory, in bytes. Their meaning depends on the major-ness and on the swizzle:
///   K-major              stride: next group of 8 rows; leading: next 16-byte column (without swizzle only)
///   MN-major, swizzled   stride: next group of 8 k;    leading: next panel of one swizzle width along MN
///   MN-major, none       stride: next 16 bytes of MN;  leading: next group of 8 k
struct OperandLayout {
  Swizzle swizzle;
  uint32_t leading_bytes, stride_bytes;
};

/// Descriptor of a wgmma operand, without its start address (see at_address).
HOPWELL_HOST_DEVICE constexpr uint64_t wgmma_descriptor(OperandLayout layout) {
  constexpr uint64_t type[4] = {0, 3, 2, 1};
  return type[int(layout.swizzle)] << 62 | uint64_t{layout.stride_bytes >> 4} << 32 |
         uint64_t{layout.leading_bytes >> 4} << 16;
}

/// Descriptor of a tcgen05 operand, without its start address. Bits 46-48 are the fixed value 0b001.
HOPWELL_HOST_DEVICE constexpr uint64_t tcgen05_descriptor(OperandLayout layout) {
  constexpr uint64_t type[4] = {0, 6, 4, 2};
  return type[int(layout.swizzle)] << 61 | uint64_t{1} << 46 | uint64_t{layout.stride_bytes >> 4} << 32 |
         uint64_t{layout.leading_bytes >> 4} << 16;
}

/// Adds a start address to the descriptor: a shared-memory address, 16-byte aligned. Only its low 18 bits are used.
HOPWELL_HOST_DEVICE constexpr uint64_t at_address(uint64_t descriptor, uint32_t shared_address) {
  return descriptor | uint64_t{(shared_address & 0x3ffff) >> 4};
}

enum class Half : uint8_t { fp16 = 0, bf16 = 1 };
/// Element types of wgmma operands.
enum class WgmmaType : uint8_t { fp16, bf16, e4m3 };

/// tcgen05.mma kind::f16: fp16 or bf16 inputs, fp32 accumulators.
struct InstructionShape {
  int m, n;
  Half type = Half::bf16;
  Major a_major = Major::k, b_major = Major::k;
  bool negate_a = false, negate_b = false;
};
HOPWELL_HOST_DEVICE constexpr uint32_t instruction_descriptor(InstructionShape s) {
  return 1u << 4 | uint32_t(s.type) << 7 | uint32_t(s.type) << 10 | uint32_t(s.negate_a) << 13 |
         uint32_t(s.negate_b) << 14 | uint32_t(s.a_major) << 15 | uint32_t(s.b_major) << 16 | uint32_t(s.n >> 3) << 17 |
         uint32_t(s.m >> 4) << 24;
}

/// tcgen05.mma kind::mxf4nvf4 block16: e2m1 inputs, one ue4m3 scale for every 16 of K, fp32 accumulators, K-major.
HOPWELL_HOST_DEVICE constexpr uint32_t nvfp4_instruction_descriptor(int m, int n) {
  return 1u << 7 | 1u << 10 | uint32_t(n >> 3) << 17 | uint32_t(m >> 4) << 24;
}

}  // namespace hopwell::arch
