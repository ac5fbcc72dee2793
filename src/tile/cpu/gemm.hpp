// fp32 matrix products through BLAS, row-major, on the calling thread.
#pragma once

#include <cstdint>

namespace hopwell::cpu {

// c[m, n] = alpha * a[m, k] . b[n, k]^T + beta * c
void gemm_nt(std::int64_t m, std::int64_t n, std::int64_t k, float alpha, const float* a, std::int64_t lda,
             const float* b, std::int64_t ldb, float beta, float* c, std::int64_t ldc);

// c[m, n] = alpha * a[m, k] . b[k, n] + beta * c
void gemm_nn(std::int64_t m, std::int64_t n, std::int64_t k, float alpha, const float* a, std::int64_t lda,
             const float* b, std::int64_t ldb, float beta, float* c, std::int64_t ldc);

}  // namespace hopwell::cpu
