// Hopper, step 1 (cp.async, from Ampere on): every thread copies 32 bytes to shared memory, and threads write them out
// the other way round.
#include <hopwell/arch/launch.hpp>
#include <hopwell/arch/sm80/async_copy.hpp>
#include "steps.hpp"

namespace {

using namespace hopwell::arch;

constexpr int kTile = 1024;

struct SharedStorage {
  alignas(16) float numbers[kTile];
};

__global__ void __launch_bounds__(128) kernel(const float* in, float* out, int tiles, bool bug) {
  auto& s = dynamic_smem<SharedStorage>();
  const int t = thread_index();
  for (int i = 4 * t; i < kTile; i += 4 * 128)  // 16 bytes a copy
    cp_async(shared_address(&s.numbers[i]), in + kTile * block_index() + i);
  cp_async_commit();
  if (!bug) cp_async_wait<0>();  // until this thread's copies are there
  syncthreads();                 // until the copies of the other threads are, too

  float* mine = out + kTile * (tiles - 1 - block_index());
  for (int i = t; i < kTile; i += 128) mine[i] = s.numbers[kTile - 1 - i];
}

}  // namespace

void reverse_by_threads(const float* in, float* out, size_t n, bool bug) {
  const int tiles = int(n / kTile);
  const LaunchShape shape{.grid = {uint32_t(tiles)}, .threads = 128, .shared_bytes = sizeof(SharedStorage)};
#if HOPWELL_ON_DEVICE
  launch(kernel, shape, nullptr, in, out, tiles, bug);
#else
  launch(kernel, shape, in, out, tiles, bug);
#endif
}
