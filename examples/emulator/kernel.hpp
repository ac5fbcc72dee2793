#pragma once

// c[m][n] = Σ_k a[m][k] b[n][k], m < 128, n < 64, k < 64; bf16 as raw bits. `forget_fence`: the bug to switch on.
void tcgen05_tile(const unsigned short* a, const unsigned short* b, float* c, bool forget_fence);
