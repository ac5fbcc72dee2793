// The arithmetic of every tensor-core operation.
#pragma once

namespace hopwell::arch::emu {

/// d[i][j] (+)= Σ_k a[i][k] b[k][j], summed in fp32 with k ascending. Rows are d_pitch, k_count and b_pitch apart;
/// m_count is a multiple of 4, n_count of 8.
void gemm(float* d, int d_pitch, const float* a, const float* b, int b_pitch, int m_count, int n_count, int k_count,
          bool accumulate);

}  // namespace hopwell::arch::emu
