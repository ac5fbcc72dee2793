// Tiles of 32 × 32 numbers through shared memory: nvcc compiles this file for a GPU, any C++ compiler for the emulator.
#include "transpose.hpp"

#include <hopwell/arch/launch.hpp>
#include <hopwell/arch/sm80/threads.hpp>

namespace {

using namespace hopwell::arch;

__global__ void __launch_bounds__(256) kernel(const float* in, float* out, int n, int pitch, bool bug) {
  float* const tile = &dynamic_smem<float>();
  const int lane = lane_index(), warp = warp_index(), tiles = n / 32, x = block_index() % tiles,
            y = block_index() / tiles;
  for (int row = warp; row < 32; row += 8) tile[row * pitch + lane] = in[(32 * y + row) * n + 32 * x + lane];
  if (!bug) syncthreads();
  for (int row = warp; row < 32; row += 8) out[(32 * x + row) * n + 32 * y + lane] = tile[lane * pitch + row];
}

}  // namespace

void transpose(const float* in, float* out, int n, int pitch, bool bug) {
  const LaunchShape shape{
      .grid = {uint32_t(n / 32 * (n / 32))}, .threads = 256, .shared_bytes = size_t(32 * pitch) * sizeof(float)};
#if HOPWELL_ON_DEVICE
  launch(kernel, shape, nullptr, in, out, n, pitch, bug);
#else
  launch(kernel, shape, in, out, n, pitch, bug);
#endif
}
