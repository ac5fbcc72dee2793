// Step 2: C = A Bᵀ on the tensor core of Blackwell, with operands that threads write to shared memory.
// The same file compiles with nvcc for sm_100a and, in this example, with g++ for the emulator.
#include <hopwell/arch/launch.hpp>
#include <hopwell/arch/sm100/tcgen05.hpp>
#include "steps.hpp"

namespace {

using namespace hopwell::arch;

struct SharedStorage {
  alignas(1024) unsigned short a[128 * 64];  // rows of 128 bytes, 128B-swizzled
  alignas(1024) unsigned short b[64 * 64];
  mbarrier done;
  uint32_t tmem;  // address of our columns of tensor memory, which the hardware chooses
};

// Where the tensor core expects element (row, k): 16-byte chunks of a row are xor-ed with the row number.
HOPWELL_DEVICE int swizzled_index(int row, int k) { return row * 64 + ((k / 8 ^ row % 8) * 8 + k % 8); }

__global__ void __launch_bounds__(128) kernel(const unsigned short* a, const unsigned short* b, float* c, bool bug) {
#if HOPWELL_HAS_SM100A
  auto& s = dynamic_smem<SharedStorage>();
  const int t = thread_index(), warp = warp_index();
  if (t == 0) {
    mbarrier_init(s.done, 1);
    fence_mbarrier_init();
  }
  if (warp == 1) {
    tmem_allocate<1>(s.tmem, 64);
    tmem_relinquish<1>();
  }
  for (int i = t; i < 128 * 64; i += 128) s.a[swizzled_index(i / 64, i % 64)] = a[i];
  for (int i = t; i < 64 * 64; i += 128) s.b[swizzled_index(i / 64, i % 64)] = b[i];
  if (!bug) fence_proxy_async();  // the tensor core reads shared memory through another path than threads write it
  syncthreads();

  if (t == 0) {
    constexpr uint64_t kOperand = tcgen05_descriptor({Swizzle::bytes128, 16, 1024});
    for (uint32_t k = 0; k < 4; ++k)  // K 16 an instruction: 32 bytes further in every row
      tcgen05_mma_f16<1>(s.tmem, at_address(kOperand, shared_address(s.a) + 32 * k),
                         at_address(kOperand, shared_address(s.b) + 32 * k),
                         instruction_descriptor({.m = 128, .n = 64}), k > 0);
    tcgen05_commit<1>(s.done);
  }
  mbarrier_wait(s.done, 0);
  tcgen05_fence_after_thread_sync();

  for (int half = 0; half < 2; ++half) {  // warp w reads lanes 32 w to 32 w + 31, which hold those rows of C
    uint32_t r[32];
    tmem_load<TmemShape::b32x32>(r, tmem_address(s.tmem, 32 * warp, 32 * half));
    tmem_wait_load(r);
    for (int i = 0; i < 32; ++i) c[t * 64 + 32 * half + i] = bit_cast<float>(r[i]);
  }
  tcgen05_fence_before_thread_sync();
  syncthreads();
  if (warp == 1) tmem_deallocate<1>(s.tmem, 64);
#endif
}

}  // namespace

void tensor_core_tile(const unsigned short* a, const unsigned short* b, float* c, bool bug) {
  const LaunchShape shape{.grid = {1}, .threads = 128, .shared_bytes = sizeof(SharedStorage)};
#if HOPWELL_ON_DEVICE
  launch(kernel, shape, nullptr, a, b, c, bug);
#else
  launch(kernel, shape, a, b, c, bug);
#endif
}
