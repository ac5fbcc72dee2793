// Small but complete kernels, one for the programming style of each GPU generation. Launched alike on a device and on
// the emulator.
#pragma once

#include <cstdint>

#include "arch/platform.hpp"

namespace hopwell::arch::kernels {

/// c[m][n] = Σ_k a[m][k] b[n][k]. m a multiple of 64, n of 128, k of 64; all row-major and dense.
void wgmma_gemm(const bf16* a, const bf16* b, float* c, int m, int n, int k);

/// c[i][n] = Σ_k a[rows[i]][k] b[n][k], i < 128 (one CTA) or 256 (a pair), n < 64. Rows outside of a count as zero. k a
/// multiple of 64.
void tcgen05_gather_gemm(int cta_group, const bf16* a, int a_rows, const int* rows, const bf16* b, float* c, int k);

/// c[m][n] = Σ_k a[m][k] sa[m][k/16] b[n][k] sb[n][k/16], m < 128, n < 64. a, b: e2m1, two per byte, low nibble first;
/// scales ue4m3 in tiles of 128 rows × 4 scales (512 bytes, see emu/geometry.hpp), one tile per 64 of k; b's rows
/// 64-127 are padding. k a multiple of 256.
void nvfp4_gemm(const uint8_t* a, const uint8_t* scale_a, const uint8_t* b, const uint8_t* scale_b, float* c, int k);

/// The data flow of a sparse-MLA backward block on Blackwell: 64 heads, latent dimension 576, blocks of 64 gathered
/// keys. See mla_backward_flow.cu.
struct MlaFlow {
  const bf16 *q, *d_out, *kv;     // [64][576], [64][512], [n_keys][576]
  const int* indices;             // [64 blocks]; entries outside of [0, n_keys) are invalid
  const float *lse_log2, *delta;  // [64]
  float *dq, *dkv;                // [64][576]; [n_keys][576], added to
  float scale;
  int blocks, n_keys;
};
void mla_backward_flow(const MlaFlow& flow);

}  // namespace hopwell::arch::kernels
