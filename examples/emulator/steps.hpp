#pragma once

#include <cstddef>

// The kernels of the tutorials. `bug` leaves one line out of each.

// ---- docs/tutorials/hopper_kernel.md ----

// out[i] = in[n - 1 - i], n a multiple of 1024.
void reverse_by_threads(const float* in, float* out, size_t n, bool bug);

// out[c][r] = in[r][c], multiples of 32.
void transpose(const float* in, float* out, int rows, int columns, bool bug);

// c[m][n] = Σ_k a[m][k] b[n][k], m, n and k < 64; bf16 as raw bits.
void warpgroup_tile(const unsigned short* a, const unsigned short* b, float* c, bool bug);

// ---- docs/tutorials/blackwell_kernel.md ----

// out[i] = in[n - 1 - i], n a multiple of 1024.
void reverse(const float* in, float* out, size_t n, bool bug);

// c[m][n] = Σ_k a[m][k] b[n][k], m < 128, n < 64, k < 64; bf16 as raw bits.
void tensor_core_tile(const unsigned short* a, const unsigned short* b, float* c, bool bug);

// The same for any k that is a multiple of 64: a copy engine, a tensor core and a ring of two stages between them.
void pipelined_gemm(const unsigned short* a, const unsigned short* b, float* c, int k, bool bug);
