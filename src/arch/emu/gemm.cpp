#include "gemm.hpp"

#include <algorithm>
#include <cstddef>

// One binary runs on any x86-64, and uses wide vectors where there are some.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define HOPWELL_VECTOR_CLONES __attribute__((target_clones("avx512f", "avx2,fma", "default")))
#else
#define HOPWELL_VECTOR_CLONES
#endif

namespace hopwell::arch::emu {

HOPWELL_VECTOR_CLONES
void gemm(float* __restrict d, int d_pitch, const float* __restrict a, const float* __restrict b, int b_pitch,
          int m_count, int n_count, int k_count, bool accumulate) {
  constexpr int kBlock = 32;  // columns summed together in registers
  for (int j0 = 0; j0 < n_count; j0 += kBlock) {
    const int columns = std::min(kBlock, n_count - j0);
    for (int i = 0; i < m_count; ++i) {
      float* row = d + ptrdiff_t{i} * d_pitch + j0;
      const float* left = a + ptrdiff_t{i} * k_count;
      float sum[kBlock] = {};
      if (accumulate)
        for (int j = 0; j < columns; ++j) sum[j] = row[j];
      if (columns == kBlock) {
        for (int k = 0; k < k_count; ++k) {
          const float* right = b + ptrdiff_t{k} * b_pitch + j0;
          for (int j = 0; j < kBlock; ++j) sum[j] += left[k] * right[j];
        }
      } else {
        for (int k = 0; k < k_count; ++k)
          for (int j = 0; j < columns; ++j) sum[j] += left[k] * b[ptrdiff_t{k} * b_pitch + j0 + j];
      }
      for (int j = 0; j < columns; ++j) row[j] = sum[j];
    }
  }
}

}  // namespace hopwell::arch::emu
