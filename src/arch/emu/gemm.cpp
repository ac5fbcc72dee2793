#include "gemm.hpp"

#include <cstddef>

#include "vector_clones.hpp"

namespace hopwell::arch::emu {

namespace {

// A Vector is 32 bytes: two registers on a host whose vector registers have 16.
using Vector = float __attribute__((vector_size(32)));
using Unaligned = float __attribute__((vector_size(32), aligned(4), may_alias));
constexpr int kWidth = sizeof(Vector) / sizeof(float);

inline __attribute__((always_inline)) const Unaligned& at(const float* p) {
  return *reinterpret_cast<const Unaligned*>(p);
}
inline __attribute__((always_inline)) Unaligned& at(float* p) { return *reinterpret_cast<Unaligned*>(p); }

// The kRows × kVectors accumulators stay in registers, so the loops over them must be unrolled. k ascends.
template <int kRows, int kVectors>
inline __attribute__((always_inline)) void multiply_block(float* __restrict d, ptrdiff_t d_pitch,
                                                          const float* __restrict a, const float* __restrict b,
                                                          ptrdiff_t b_pitch, int k_count, bool accumulate) {
  Vector sum[kRows][kVectors] = {};
  if (accumulate) {
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sum[i][v] = at(d + i * d_pitch + v * kWidth);
  }
  for (int k = 0; k < k_count; ++k, b += b_pitch) {
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sum[i][v] += a[i * k_count + k] * at(b + v * kWidth);
  }
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) at(d + i * d_pitch + v * kWidth) = sum[i][v];
}

}  // namespace

HOPWELL_VECTOR_CLONES
void gemm(float* __restrict d, int d_pitch, const float* __restrict a, const float* __restrict b, int b_pitch,
          int m_count, int n_count, int k_count, bool accumulate) {
  constexpr int kRows = 4;
  for (int j = 0; j < n_count; j += 2 * kWidth)
    for (int i = 0; i < m_count; i += kRows) {
      float* block = d + ptrdiff_t{i} * d_pitch + j;
      const float* left = a + ptrdiff_t{i} * k_count;
      if (n_count - j >= 2 * kWidth)
        multiply_block<kRows, 2>(block, d_pitch, left, b + j, b_pitch, k_count, accumulate);
      else
        multiply_block<kRows, 1>(block, d_pitch, left, b + j, b_pitch, k_count, accumulate);
    }
}

}  // namespace hopwell::arch::emu
