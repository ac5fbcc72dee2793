#pragma once

// out = inᵀ, both [n][n], n a multiple of 32; `pitch` floats lie between rows of a tile in shared memory. `bug` leaves
// a barrier out.
void transpose(const float* in, float* out, int n, int pitch, bool bug);
