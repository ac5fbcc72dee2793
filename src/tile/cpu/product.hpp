// Matrix products of fp32 in row-major storage, on the calling thread, in which each element has a sum of its own: its
// bits depend on its row of A and its column of B alone, not on how many others there are or where it stands among them.
// BLAS promises no such thing, and OpenBLAS's kernels do not do it.
#pragma once

#include <cstdint>

namespace hopwell::cpu {

// C[m, n] = A[m, k] . B[n, k]^T; or C += if `add`, as of the others.
void product_nt(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, std::int64_t lda, const float* b,
                std::int64_t ldb, bool add, float* c, std::int64_t ldc);

// C[m, n] = A[m, k] . B[k, n]
void product_nn(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, std::int64_t lda, const float* b,
                std::int64_t ldb, bool add, float* c, std::int64_t ldc);

// C[m, n] = A[k, m]^T . B[k, n]
void product_tn(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, std::int64_t lda, const float* b,
                std::int64_t ldb, bool add, float* c, std::int64_t ldc);

}  // namespace hopwell::cpu
