// Step 3: the same product for a long K. One thread feeds the copy engine, one the tensor core; four warps take the result.
// Between the first two is a ring of two stages.
#include <hopwell/arch/launch.hpp>
#include <hopwell/arch/sm100/tcgen05.hpp>
#include <hopwell/arch/sm90/make_tensor_map.hpp>
#include <hopwell/arch/sm90/tma.hpp>
#include "steps.hpp"

namespace {

using namespace hopwell::arch;

constexpr int kStages = 2, kM = 128, kN = 64, kK = 64;
constexpr uint32_t kStageBytes = (kM + kN) * kK * 2;

struct SharedStorage {
  alignas(1024) unsigned short a[kStages][kM * kK];  // 128B-swizzled by the copy engine
  alignas(1024) unsigned short b[kStages][kN * kK];
  mbarrier full[kStages], empty[kStages], done;
  uint32_t tmem;
};

struct Params {
  TensorMap a, b;
  float* c;
  int steps;
  bool bug;
};

#if HOPWELL_HAS_SM100A

HOPWELL_DEVICE void feed_copy_engine(const Params& p, SharedStorage& s) {
  for (int step = 0; step < p.steps; ++step) {
    const int stage = step % kStages;
    const uint32_t lap = uint32_t(step / kStages);
    if (!p.bug) mbarrier_wait(s.empty[stage], (lap & 1) ^ 1);  // at once in lap 0
    mbarrier_arrive_expect_tx(s.full[stage], kStageBytes);
    const int corner[2] = {step * kK, 0};
    tma_load(shared_address(s.a[stage]), p.a, corner, s.full[stage]);
    tma_load(shared_address(s.b[stage]), p.b, corner, s.full[stage]);
  }
}

HOPWELL_DEVICE void feed_tensor_core(const Params& p, SharedStorage& s) {
  constexpr uint64_t kOperand = tcgen05_descriptor({Swizzle::bytes128, 16, 1024});
  for (int step = 0; step < p.steps; ++step) {
    const int stage = step % kStages;
    mbarrier_wait(s.full[stage], uint32_t(step / kStages) & 1);
    for (uint32_t k = 0; k < 4; ++k)
      tcgen05_mma_f16<1>(s.tmem, at_address(kOperand, shared_address(s.a[stage]) + 32 * k),
                         at_address(kOperand, shared_address(s.b[stage]) + 32 * k),
                         instruction_descriptor({.m = kM, .n = kN}), step > 0 || k > 0);
    tcgen05_commit<1>(s.empty[stage]);  // when these products have read their operands
  }
  tcgen05_commit<1>(s.done);
}

HOPWELL_DEVICE void take_result(const Params& p, SharedStorage& s) {
  mbarrier_wait(s.done, 0);
  tcgen05_fence_after_thread_sync();
  const int quarter = warp_index() % 4, row = 32 * quarter + lane_index();
  for (int half = 0; half < 2; ++half) {
    uint32_t r[32];
    tmem_load<TmemShape::b32x32>(r, tmem_address(s.tmem, 32 * quarter, 32 * half));
    tmem_wait_load(r);
    for (int i = 0; i < 32; ++i) p.c[row * kN + 32 * half + i] = bit_cast<float>(r[i]);
  }
  tcgen05_fence_before_thread_sync();
}

#endif

__global__ void __launch_bounds__(256) kernel(const __grid_constant__ Params p) {
#if HOPWELL_HAS_SM100A
  auto& s = dynamic_smem<SharedStorage>();
  const int warp = warp_index();
  if (warp == 0 && lane_index() == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(s.full[i], 1);
      mbarrier_init(s.empty[i], 1);
    }
    mbarrier_init(s.done, 1);
    fence_mbarrier_init();
  }
  if (warp == 1) {
    tmem_allocate<1>(s.tmem, 64);
    tmem_relinquish<1>();
  }
  syncthreads();
  if (warp == 0 && lane_index() == 0) feed_copy_engine(p, s);
  if (warp == 1 && lane_index() == 0) feed_tensor_core(p, s);
  if (warp >= 4) take_result(p, s);
  syncthreads();  // nobody reads tensor memory any more
  if (warp == 1) tmem_deallocate<1>(s.tmem, 64);
#endif
}

TensorMap map_of(const unsigned short* address, int columns, int rows) {
  return make_tensor_map({.address = const_cast<unsigned short*>(address),
                          .element = TensorElement::bf16,
                          .rank = 2,
                          .extent = {uint64_t(columns), uint64_t(rows)},
                          .stride_bytes = {uint64_t(columns) * 2},
                          .box = {kK, uint32_t(rows)},
                          .swizzle = Swizzle::bytes128});
}

}  // namespace

void pipelined_gemm(const unsigned short* a, const unsigned short* b, float* c, int k, bool bug) {
  const Params p{map_of(a, k, kM), map_of(b, k, kN), c, k / kK, bug};
  const LaunchShape shape{.grid = {1}, .threads = 256, .shared_bytes = sizeof(SharedStorage)};
#if HOPWELL_ON_DEVICE
  launch(kernel, shape, nullptr, p);
#else
  launch(kernel, shape, p);
#endif
}
