// Step 1: the copy engine brings 1,024 numbers to shared memory, and threads write them out the other way round.
#include <hopwell/arch/launch.hpp>
#include <hopwell/arch/sm90/bulk_copy.hpp>
#include "steps.hpp"

namespace {

using namespace hopwell::arch;

constexpr int kTile = 1024;

struct SharedStorage {
  alignas(16) float numbers[kTile];
  mbarrier arrived;
};

__global__ void __launch_bounds__(128) kernel(const float* in, float* out, int tiles, bool bug) {
#if HOPWELL_HAS_SM90
  auto& s = dynamic_smem<SharedStorage>();
  const int t = thread_index();
  if (t == 0) {
    mbarrier_init(s.arrived, 1);
    fence_mbarrier_init();  // the copy engine will use it, too
  }
  syncthreads();

  if (t == 0) {
    mbarrier_arrive_expect_tx(s.arrived, sizeof(s.numbers));
    bulk_load(shared_address(s.numbers), in + kTile * block_index(), sizeof(s.numbers), s.arrived);
  }
  if (!bug) mbarrier_wait(s.arrived, 0);  // until all bytes are there

  float* mine = out + kTile * (tiles - 1 - block_index());
  for (int i = t; i < kTile; i += 128) mine[i] = s.numbers[kTile - 1 - i];
#endif
}

}  // namespace

void reverse(const float* in, float* out, size_t n, bool bug) {
  const int tiles = int(n / kTile);
  const LaunchShape shape{.grid = {uint32_t(tiles)}, .threads = 128, .shared_bytes = sizeof(SharedStorage)};
#if HOPWELL_ON_DEVICE
  launch(kernel, shape, nullptr, in, out, tiles, bug);
#else
  launch(kernel, shape, in, out, tiles, bug);
#endif
}
