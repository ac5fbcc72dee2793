// Matrices in registers: ldmatrix and mma.sync.
// "PTX:" anchors are sections of https://docs.nvidia.com/cuda/parallel-thread-execution/
#pragma once

#include "threads.hpp"

namespace hopwell::arch {

enum class Transpose : bool { no, yes };

/// ldmatrix.m8n8.x1/.x2/.x4: kCount 8×8 matrices of 16-bit elements. Lane 8 i + r supplies the address of row r of
/// matrix i (16 bytes, 16-byte aligned). Register i of lane l holds elements (l/4, 2(l%4) + {0,1}) of matrix i, or of
/// its transpose. PTX: #warp-level-matrix-instructions-ldmatrix
template <Transpose kTranspose = Transpose::no, int kCount>
HOPWELL_DEVICE void ldmatrix(uint32_t (&r)[kCount], uint32_t row_address,
                             [[maybe_unused]] Site site = Site::current()) {
  static_assert(kCount == 1 || kCount == 2 || kCount == 4);
#if HOPWELL_ON_DEVICE
  if constexpr (kTranspose == Transpose::no) {
    if constexpr (kCount == 1)
      asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r[0]) : "r"(row_address) : "memory");
    else if constexpr (kCount == 2)
      asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                   : "=r"(r[0]), "=r"(r[1])
                   : "r"(row_address)
                   : "memory");
    else
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                   : "r"(row_address)
                   : "memory");
  } else {
    if constexpr (kCount == 1)
      asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
                   : "=r"(r[0])
                   : "r"(row_address)
                   : "memory");
    else if constexpr (kCount == 2)
      asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                   : "=r"(r[0]), "=r"(r[1])
                   : "r"(row_address)
                   : "memory");
    else
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                   : "r"(row_address)
                   : "memory");
  }
#else
  emu::ldmatrix(r, kCount, kTranspose == Transpose::yes, row_address, site);
#endif
}

/// mma.sync.m16n8k16, fp32 accumulators: d += a b, a [16][16] row-major, b [16][8] column-major fragments.
/// PTX: #warp-level-matrix-instructions-mma
HOPWELL_DEVICE void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                      [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
  emu::mma_m16n8k16(d, a, b, emu::MmaType::bf16, site);
#endif
}
HOPWELL_DEVICE void mma_m16n8k16_fp16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                      [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
  emu::mma_m16n8k16(d, a, b, emu::MmaType::fp16, site);
#endif
}

}  // namespace hopwell::arch
