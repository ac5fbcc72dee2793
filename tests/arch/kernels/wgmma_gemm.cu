// Hopper: a GEMM tile with a producer warpgroup, TMA, an mbarrier ring, wgmma, and a TMA store.
//
//     c[m][n] = Σ_k a[m][k] b[n][k]                 bf16 in, fp32 out
//
// Tile      64 × 128 × 64, three stages
// Roles     warpgroup 0   math       waits for full[stage], four wgmma of K 16, frees the stage one iteration later
//           warpgroup 1   producer   one thread: waits for empty[stage], two boxes by TMA
// Timeline  stage      0          1          2          0'
//           producer   a0 b0      a1 b1      a2 b2      waits empty[0]  a3 b3
//           math                  S0         S1 | free 0            S2 | free 1
// Budget    shared: 3 × (8,192 + 16,384) operands + 32,768 result + 48 barriers = 106,544 B; registers: 64 accumulators
#include "arch/launch.hpp"
#include "arch/sm90/make_tensor_map.hpp"
#include "arch/sm90/tma.hpp"
#include "arch/sm90/wgmma.hpp"
#include "kernels.hpp"

namespace hopwell::arch::kernels {
namespace {

struct Config {
  static constexpr int kM = 64, kN = 128, kK = 64, kStages = 3, kThreads = 256;
  static constexpr uint32_t kBytesA = kM * kK * 2, kBytesB = kN * kK * 2;
};

struct SharedStorage {
  alignas(1024) bf16 a[Config::kStages][Config::kM * Config::kK];  // 128B-swizzled rows of 64
  alignas(1024) bf16 b[Config::kStages][Config::kN * Config::kK];
  alignas(1024) float c[4][Config::kM * 32];  // result: panels of 32 columns, 128B-swizzled
  mbarrier full[Config::kStages], empty[Config::kStages];
};
static_assert(sizeof(SharedStorage) <= sm90::kMaxSharedBytes);

struct Params {
  TensorMap a, b, c;
  int steps;  // K / 64
};

#if HOPWELL_HAS_SM90A

HOPWELL_DEVICE void produce(const Params& p, SharedStorage& s) {
  setmaxnreg_dec<40>();
  if (thread_index() != 128) return;
  const BlockIndex tile = block_index_3d();
  for (int step = 0; step < p.steps; ++step) {
    const int stage = step % Config::kStages;
    mbarrier_wait(s.empty[stage], uint32_t(step / Config::kStages & 1) ^ 1);
    mbarrier_arrive_expect_tx(s.full[stage], Config::kBytesA + Config::kBytesB);
    tma_load(shared_address(s.a[stage]), p.a, {step * Config::kK, tile.y * Config::kM}, s.full[stage]);
    tma_load(shared_address(s.b[stage]), p.b, {step * Config::kK, tile.x * Config::kN}, s.full[stage]);
  }
}

// Copies accumulators to the swizzled result panels, and stores these by TMA.
HOPWELL_DEVICE void store_result(const Params& p, SharedStorage& s, const float (&d)[64]) {
  const int t = thread_index();
  HOPWELL_UNROLL
  for (int i = 0; i < 64; ++i) {
    const int row = t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8, col = i / 4 * 8 + t % 4 * 2 + i % 2;
    const int chunk = col % 32 / 4 ^ row % 8;
    s.c[col / 32][row * 32 + chunk * 4 + col % 4] = d[i];
  }
  fence_proxy_async();
  barrier_sync(1, 128);
  if (t != 0) return;
  const BlockIndex tile = block_index_3d();
  for (int panel = 0; panel < 4; ++panel)
    tma_store(p.c, {tile.x * Config::kN + panel * 32, tile.y * Config::kM}, shared_address(s.c[panel]));
  bulk_commit();
  bulk_wait_read<0>();
}

HOPWELL_DEVICE void multiply(const Params& p, SharedStorage& s) {
  setmaxnreg_inc<232>();
  constexpr uint64_t kOperand = wgmma_descriptor({Swizzle::bytes128, 16, 1024});
  float d[64];
  for (int step = 0; step < p.steps; ++step) {
    const int stage = step % Config::kStages;
    mbarrier_wait(s.full[stage], uint32_t(step / Config::kStages & 1));
    const uint64_t a = at_address(kOperand, shared_address(s.a[stage])),
                   b = at_address(kOperand, shared_address(s.b[stage]));
    wgmma_fence();
    HOPWELL_UNROLL
    for (int k = 0; k < 4; ++k)
      wgmma_ss(d, a + uint64_t(2 * k), b + uint64_t(2 * k), step + k > 0);  // 32 bytes further
    wgmma_commit();
    if (step == 0) continue;
    wgmma_wait<1>();
    mbarrier_arrive(s.empty[(step - 1) % Config::kStages]);
  }
  wgmma_wait<0>(d);
  store_result(p, s, d);
}

#endif

__global__ void __launch_bounds__(Config::kThreads, 1) kernel(const __grid_constant__ Params p) {
#if HOPWELL_HAS_SM90A
  auto& s = dynamic_smem<SharedStorage>();
  if (thread_index() == 0) {
    for (int i = 0; i < Config::kStages; ++i) {
      mbarrier_init(s.full[i], 1);
      mbarrier_init(s.empty[i], 128);
    }
    fence_mbarrier_init();
  }
  syncthreads();
  if (warpgroup_index() == 0)
    multiply(p, s);
  else
    produce(p, s);
#endif
}

TensorMap map_of(const void* address, TensorElement element, int columns, int rows, uint32_t box_columns,
                 uint32_t box_rows) {
  return make_tensor_map({.address = const_cast<void*>(address),
                          .element = element,
                          .rank = 2,
                          .extent = {uint64_t(columns), uint64_t(rows)},
                          .stride_bytes = {uint64_t(columns) * element_bytes(element)},
                          .box = {box_columns, box_rows},
                          .swizzle = Swizzle::bytes128});
}

}  // namespace

void wgmma_gemm(const bf16* a, const bf16* b, float* c, int m, int n, int k) {
  const Params p{map_of(a, TensorElement::bf16, k, m, Config::kK, Config::kM),
                 map_of(b, TensorElement::bf16, k, n, Config::kK, Config::kN),
                 map_of(c, TensorElement::f32, n, m, 32, Config::kM), k / Config::kK};
  const LaunchShape shape{.grid = {uint32_t(n / Config::kN), uint32_t(m / Config::kM)},
                          .threads = Config::kThreads,
                          .shared_bytes = sizeof(SharedStorage)};
#if HOPWELL_ON_DEVICE
  launch(kernel, shape, nullptr, p);
#else
  launch(kernel, shape, p);
#endif
}

}  // namespace hopwell::arch::kernels
