// Hopper, step 3 (wgmma): C = A Bᵀ on the tensor core. The copy engine brings both operands, a warpgroup multiplies.
#include <hopwell/arch/launch.hpp>
#include <hopwell/arch/sm90/make_tensor_map.hpp>
#include <hopwell/arch/sm90/tma.hpp>
#include <hopwell/arch/sm90/wgmma.hpp>
#include "steps.hpp"

namespace {

using namespace hopwell::arch;

constexpr int kM = 64, kN = 64, kK = 64;

struct SharedStorage {
  alignas(1024) unsigned short a[kM * kK];  // rows of 128 bytes, 128B-swizzled by the copy engine
  alignas(1024) unsigned short b[kN * kK];
  mbarrier arrived;
};

struct Params {
  TensorMap a, b;
  float* c;
  bool bug;
};

__global__ void __launch_bounds__(128) kernel(const __grid_constant__ Params p) {
#if HOPWELL_HAS_SM90A
  auto& s = dynamic_smem<SharedStorage>();
  const int t = thread_index();
  if (t == 0) {
    mbarrier_init(s.arrived, 1);
    fence_mbarrier_init();
  }
  syncthreads();
  if (t == 0) {
    mbarrier_arrive_expect_tx(s.arrived, sizeof(s.a) + sizeof(s.b));
    tma_load(shared_address(s.a), p.a, {0, 0}, s.arrived);
    tma_load(shared_address(s.b), p.b, {0, 0}, s.arrived);
  }
  mbarrier_wait(s.arrived, 0);

  constexpr uint64_t kOperand = wgmma_descriptor({Swizzle::bytes128, 16, 1024});
  const uint64_t a = at_address(kOperand, shared_address(s.a)), b = at_address(kOperand, shared_address(s.b));
  float d[kN / 2];  // of this thread: 32 of the 64 × 64 results
  wgmma_fence();
  HOPWELL_UNROLL
  for (int k = 0; k < 4; ++k)  // K 16 an instruction: 32 bytes further in every row, in units of 16 bytes
    wgmma_ss(d, a + uint64_t(2 * k), b + uint64_t(2 * k), k > 0);
  wgmma_commit();
  if (!p.bug) wgmma_wait<0>(d);  // the products write d until then

  HOPWELL_UNROLL
  for (int i = 0; i < kN / 2; ++i) {  // warp w has rows 16 w to 16 w + 15
    const int row = t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + t % 4 * 2 + i % 2;
    p.c[row * kN + column] = d[i];
  }
#endif
}

TensorMap map_of(const unsigned short* address, int rows) {
  return make_tensor_map({.address = const_cast<unsigned short*>(address),
                          .element = TensorElement::bf16,
                          .rank = 2,
                          .extent = {kK, uint64_t(rows)},
                          .stride_bytes = {kK * 2},
                          .box = {kK, uint32_t(rows)},
                          .swizzle = Swizzle::bytes128});
}

}  // namespace

void warpgroup_tile(const unsigned short* a, const unsigned short* b, float* c, bool bug) {
  const Params p{map_of(a, kM), map_of(b, kN), c, bug};
  const LaunchShape shape{.grid = {1}, .threads = 128, .shared_bytes = sizeof(SharedStorage)};
#if HOPWELL_ON_DEVICE
  launch(kernel, shape, nullptr, p);
#else
  launch(kernel, shape, p);
#endif
}
