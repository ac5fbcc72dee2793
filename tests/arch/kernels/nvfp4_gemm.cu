// Blackwell: an NVFP4 tile. Operands are e2m1 with one ue4m3 scale per 16 of K; the tensor core applies the scales.
//
//     c[m][n] = Σ_k a[m][k] sa[m][k/16] · b[n][k] sb[n][k/16]           fp32 out
//
// Tile      128 × 64 × 256: rows of 128 bytes; two stages. Scales travel global → shared → tensor memory, 512 bytes for
//           128 rows × 64 of K.
// Roles     warp 0      producer   waits for empty[stage]; boxes of A and B, scale tiles
//           warp 1      issuer     waits for full[stage]; for every 64 of K copies two scale tiles to tensor memory and
//                                  multiplies: copies and products of one thread run in order, without a wait
//           warps 4-7   epilogue   wait for done, tensor memory → global memory
// Budget    shared: 2 × (16,384 + 8,192 + 2,048 + 2,048); tensor memory: 64 of D + 16 + 16 of scales, of 128 columns
#include "arch/launch.hpp"
#include "arch/sm100/tcgen05.hpp"
#include "arch/sm90/make_tensor_map.hpp"
#include "arch/sm90/tma.hpp"
#include "kernels.hpp"

namespace hopwell::arch::kernels {
namespace {

struct Config {
  static constexpr int kM = 128, kN = 64, kK = 256, kRowBytes = kK / 2, kStages = 2, kThreads = 256;
  static constexpr uint32_t kScaleBytes = 4 * 512;  // per operand and stage
  static constexpr uint32_t kStageBytes = (kM + kN) * kRowBytes + 2 * kScaleBytes;
  static constexpr uint32_t kColumns = 128;
};
struct TmemColumns {
  static constexpr uint32_t kD = 0, kScaleA = 64, kScaleB = 80;  // 4 columns of scales for every 64 of K
};

struct SharedStorage {
  alignas(1024) uint8_t a[Config::kStages][Config::kM * Config::kRowBytes];
  alignas(1024) uint8_t b[Config::kStages][Config::kN * Config::kRowBytes];
  alignas(128) uint8_t scale_a[Config::kStages][Config::kScaleBytes];
  alignas(128) uint8_t scale_b[Config::kStages][Config::kScaleBytes];
  mbarrier full[Config::kStages], empty[Config::kStages], done;
  uint32_t tmem;
};

struct Params {
  TensorMap a, b;
  const uint8_t *scale_a, *scale_b;  // [k / 64][512]
  float* c;                          // [128][64]
  int steps;
};

#if HOPWELL_HAS_SM100A

HOPWELL_DEVICE void produce(const Params& p, SharedStorage& s) {
  for (int step = 0; step < p.steps; ++step) {
    const int stage = step % Config::kStages;
    mbarrier_wait(s.empty[stage], uint32_t(step / Config::kStages & 1) ^ 1);
    mbarrier_arrive_expect_tx(s.full[stage], Config::kStageBytes);
    tma_load(shared_address(s.a[stage]), p.a, {step * Config::kRowBytes, 0}, s.full[stage]);
    tma_load(shared_address(s.b[stage]), p.b, {step * Config::kRowBytes, 0}, s.full[stage]);
    bulk_load(shared_address(s.scale_a[stage]), p.scale_a + step * int(Config::kScaleBytes), Config::kScaleBytes,
              s.full[stage]);
    bulk_load(shared_address(s.scale_b[stage]), p.scale_b + step * int(Config::kScaleBytes), Config::kScaleBytes,
              s.full[stage]);
  }
}

HOPWELL_DEVICE void issue(const Params& p, SharedStorage& s) {
  constexpr uint64_t kOperand = tcgen05_descriptor({Swizzle::bytes128, 16, 1024});
  constexpr uint64_t kScales = tcgen05_descriptor({Swizzle::none, 16, 128});  // rows of 16 bytes, groups of 8 rows
  constexpr uint32_t kInstruction = nvfp4_instruction_descriptor(Config::kM, Config::kN);
  const uint32_t d = s.tmem + TmemColumns::kD;
  for (int step = 0; step < p.steps; ++step) {
    const int stage = step % Config::kStages;
    mbarrier_wait(s.full[stage], uint32_t(step / Config::kStages & 1));
    const uint64_t a = at_address(kOperand, shared_address(s.a[stage])),
                   b = at_address(kOperand, shared_address(s.b[stage]));
    for (int k = 0; k < 4; ++k) {
      const uint32_t scale_a = s.tmem + TmemColumns::kScaleA + uint32_t(4 * k),
                     scale_b = s.tmem + TmemColumns::kScaleB + uint32_t(4 * k);
      tcgen05_copy<1, CopyShape::b32x128_x4>(scale_a, at_address(kScales, shared_address(s.scale_a[stage] + 512 * k)));
      tcgen05_copy<1, CopyShape::b32x128_x4>(scale_b, at_address(kScales, shared_address(s.scale_b[stage] + 512 * k)));
      tcgen05_mma_nvfp4<1>(d, a + uint64_t(2 * k), b + uint64_t(2 * k), kInstruction, scale_a, scale_b, step + k > 0);
    }
    tcgen05_commit<1>(s.empty[stage]);
  }
  tcgen05_commit<1>(s.done);
}

HOPWELL_DEVICE void write_result(const Params& p, SharedStorage& s) {
  mbarrier_wait(s.done, 0);
  tcgen05_fence_after_thread_sync();
  const int quarter = warp_index() % 4, row = quarter * 32 + lane_index();
  for (int half = 0; half < 2; ++half) {
    uint32_t r[32];
    tmem_load<TmemShape::b32x32>(r, tmem_address(s.tmem, quarter * 32, half * 32));
    tmem_wait_load(r);
    for (int i = 0; i < 32; ++i) p.c[row * Config::kN + half * 32 + i] = bit_cast<float>(r[i]);
  }
  tcgen05_fence_before_thread_sync();
}

#endif

__global__ void __launch_bounds__(Config::kThreads, 1) kernel(const __grid_constant__ Params p) {
#if HOPWELL_HAS_SM100A
  auto& s = dynamic_smem<SharedStorage>();
  const int warp = warp_index();
  if (warp == 0 && elect_one()) {
    for (int i = 0; i < Config::kStages; ++i) {
      mbarrier_init(s.full[i], 1);
      mbarrier_init(s.empty[i], 1);
    }
    mbarrier_init(s.done, 1);
    fence_mbarrier_init();
  }
  if (warp == 1) {
    tmem_allocate<1>(s.tmem, Config::kColumns);
    tmem_relinquish<1>();
  }
  syncthreads();
  if (warp == 0 && elect_one()) produce(p, s);
  if (warp == 1 && elect_one()) issue(p, s);
  if (warp >= 4) write_result(p, s);
  syncthreads();
  if (warp == 1) tmem_deallocate<1>(s.tmem, Config::kColumns);
#endif
}

TensorMap map_of(const uint8_t* address, int row_bytes, uint32_t rows) {
  return make_tensor_map({.address = const_cast<uint8_t*>(address),
                          .element = TensorElement::u8,
                          .rank = 2,
                          .extent = {uint64_t(row_bytes), rows},
                          .stride_bytes = {uint64_t(row_bytes)},
                          .box = {Config::kRowBytes, rows},
                          .swizzle = Swizzle::bytes128});
}

}  // namespace

void nvfp4_gemm(const uint8_t* a, const uint8_t* scale_a, const uint8_t* b, const uint8_t* scale_b, float* c, int k) {
  const Params p{map_of(a, k / 2, Config::kM), map_of(b, k / 2, Config::kN), scale_a, scale_b, c, k / Config::kK};
  const LaunchShape shape{.grid = {1}, .threads = Config::kThreads, .shared_bytes = sizeof(SharedStorage)};
#if HOPWELL_ON_DEVICE
  launch(kernel, shape, nullptr, p);
#else
  launch(kernel, shape, p);
#endif
}

}  // namespace hopwell::arch::kernels
