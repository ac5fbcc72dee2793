// Matrix products of fp32 in row-major storage, on the calling thread, in which each element has a sum of its own: its
// bits depend on its row of A and its column of B alone, not on how many others there are or where it stands among
// them. BLAS promises no such thing, and OpenBLAS's kernels do not do it.
#pragma once

#include <cstdint>

#include "tile/cpu/parallel.hpp"

namespace hopwell::cpu {

// The products of one thread, with their scratch: 120 KiB. A thread makes it before its first item, for an item whose
// turn others wait for must not run out of memory.
class Products {
 public:
  Products();

  // C[m, n] = A[m, k] . B[n, k]^T; or C += if `add`, as of the others.
  void nt(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, std::int64_t lda, const float* b,
          std::int64_t ldb, bool add, float* c, std::int64_t ldc) const;

  // C[m, n] = A[m, k] . B[k, n]
  void nn(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, std::int64_t lda, const float* b,
          std::int64_t ldb, bool add, float* c, std::int64_t ldc) const;

  // C[m, n] = A[k, m]^T . B[k, n]
  void tn(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, std::int64_t lda, const float* b,
          std::int64_t ldb, bool add, float* c, std::int64_t ldc) const;

 private:
  Scratch<float> panel_;  // operands in the order in which they are read
};

}  // namespace hopwell::cpu
