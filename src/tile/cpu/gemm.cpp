#include "tile/cpu/gemm.hpp"

#include <cblas.h>
#include <omp.h>
#include <pthread.h>

namespace hopwell::cpu {
namespace {

// OpenBLAS hands out its buffers under locks. A fork while another thread holds one would leave it locked in the child
// for ever, so a fork waits until no thread is in BLAS, and products that would begin meanwhile wait for the fork.
constexpr pthread_rwlock_t kOpen = PTHREAD_RWLOCK_WRITER_NONRECURSIVE_INITIALIZER_NP;
pthread_rwlock_t gate = kOpen;
const int at_fork =
    pthread_atfork([] { pthread_rwlock_wrlock(&gate); }, [] { pthread_rwlock_unlock(&gate); }, [] { gate = kOpen; });

void gemm(CBLAS_TRANSPOSE transpose_b, std::int64_t m, std::int64_t n, std::int64_t k, float alpha, const float* a,
          std::int64_t lda, const float* b, std::int64_t ldb, float beta, float* c, std::int64_t ldc) {
  const auto as_int = [](std::int64_t x) { return static_cast<blasint>(x); };
  pthread_rwlock_rdlock(&gate);
  const int openmp_threads = omp_get_max_threads();  // of this thread, in a runtime that its program may use too
  omp_set_num_threads(1);                            // the threads of a loop have enough to do
  cblas_sgemm(CblasRowMajor, CblasNoTrans, transpose_b, as_int(m), as_int(n), as_int(k), alpha, a, as_int(lda), b,
              as_int(ldb), beta, c, as_int(ldc));
  omp_set_num_threads(openmp_threads);
  pthread_rwlock_unlock(&gate);
}

}  // namespace

void gemm_nt(std::int64_t m, std::int64_t n, std::int64_t k, float alpha, const float* a, std::int64_t lda,
             const float* b, std::int64_t ldb, float beta, float* c, std::int64_t ldc) {
  gemm(CblasTrans, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

void gemm_nn(std::int64_t m, std::int64_t n, std::int64_t k, float alpha, const float* a, std::int64_t lda,
             const float* b, std::int64_t ldb, float beta, float* c, std::int64_t ldc) {
  gemm(CblasNoTrans, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

}  // namespace hopwell::cpu
