// The arithmetic of every tensor-core operation.
#pragma once

namespace hopwell::arch::emu {

/// d[i][j] (+)= Σ_k a[i][k] b[k][j], summed in fp32 with k ascending. Row pitches in elements: d_pitch for d, k_count
/// for a, b_pitch for b. m_count is a multiple of 4, n_count of 8.
void gemm(float* d, int d_pitch, const float* a, const float* b, int b_pitch, int m_count, int n_count, int k_count,
          bool accumulate);

}  // namespace hopwell::arch::emu
