// Hopper, step 2 (TMA and an mbarrier): out = inᵀ. The copy engine loads a box of 32 × 32 numbers, threads transpose it
// in shared memory, and the copy engine stores it.
#include <hopwell/arch/launch.hpp>
#include <hopwell/arch/sm90/make_tensor_map.hpp>
#include <hopwell/arch/sm90/tma.hpp>
#include "steps.hpp"

namespace {

using namespace hopwell::arch;

constexpr int kBox = 32;

struct SharedStorage {
  alignas(128) float box[kBox][kBox];
  alignas(128) float transposed[kBox][kBox];
  mbarrier arrived;
};

struct Params {
  TensorMap in, out;
  bool bug;
};

__global__ void __launch_bounds__(128) kernel(const __grid_constant__ Params p) {
#if HOPWELL_HAS_SM90
  auto& s = dynamic_smem<SharedStorage>();
  const int t = thread_index();
  const BlockIndex tile = block_index_3d();
  if (t == 0) {
    mbarrier_init(s.arrived, 1);
    fence_mbarrier_init();  // the copy engine will use it, too
  }
  syncthreads();

  if (t == 0) {
    if (!p.bug) mbarrier_arrive_expect_tx(s.arrived, sizeof(s.box));
    tma_load(shared_address(s.box), p.in, {kBox * tile.x, kBox * tile.y}, s.arrived);
  }
  mbarrier_wait(s.arrived, 0);  // until one thread has arrived and all bytes are there

  for (int i = t; i < kBox * kBox; i += 128) s.transposed[i % kBox][i / kBox] = s.box[i / kBox][i % kBox];
  fence_proxy_async();  // the copy engine reads what threads have written
  syncthreads();
  if (t == 0) {
    tma_store(p.out, {kBox * tile.y, kBox * tile.x}, shared_address(s.transposed));
    bulk_commit();
    bulk_wait_read<0>();  // shared memory must live until the copy engine has read it
  }
#endif
}

TensorMap map_of(const float* address, int columns, int rows) {
  return make_tensor_map({.address = const_cast<float*>(address),
                          .element = TensorElement::f32,
                          .rank = 2,
                          .extent = {uint64_t(columns), uint64_t(rows)},
                          .stride_bytes = {uint64_t(columns) * 4},
                          .box = {kBox, kBox}});
}

}  // namespace

void transpose(const float* in, float* out, int rows, int columns, bool bug) {
  const Params p{map_of(in, columns, rows), map_of(out, rows, columns), bug};
  const LaunchShape shape{
      .grid = {uint32_t(columns / kBox), uint32_t(rows / kBox)}, .threads = 128, .shared_bytes = sizeof(SharedStorage)};
#if HOPWELL_ON_DEVICE
  launch(kernel, shape, nullptr, p);
#else
  launch(kernel, shape, p);
#endif
}
