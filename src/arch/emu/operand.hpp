// Operands of wgmma and tcgen05.mma in shared memory: the bytes they cover, and their values.
#pragma once

#include "geometry.hpp"
#include "machine.hpp"

namespace hopwell::arch::emu {

enum class ElementType : uint8_t { fp16, bf16, e4m3, e2m1 };
constexpr int element_bits(ElementType t) { return t == ElementType::e2m1 ? 4 : t == ElementType::e4m3 ? 8 : 16; }

/// A matrix of `mn` × `k` elements in the shared memory of CTA `rank`.
struct SharedOperand {
  MatrixDescriptor descriptor;
  Major major;
  ElementType type;
  int mn, k;
  uint32_t rank;

  /// Stops the launch if the descriptor is malformed or uses a feature that is not modelled.
  void check(const char* which) const;
  /// Records that `who` reads every 16-byte chunk from now on until its operation completes.
  void record_reads(Observer& who, Epoch epoch, const char* what) const;
  /// out[mn][k] with row pitch `pitch`, or transposed [k][mn].
  void load(float* out, int pitch, bool transposed) const;
};

float element_value(ElementType type, const std::byte* row, int index);

}  // namespace hopwell::arch::emu
