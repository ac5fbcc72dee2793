// Blackwell: a GEMM tile with gathered rows of A, in tensor memory, by one CTA or by a pair.
//
//     c[i][n] = Σ_k a[rows[i]][k] b[n][k]           bf16 in, fp32 out
//
// Tile      128 × 64 × 64 of one CTA; 256 × 64 × 64 of a pair: each CTA gathers its 128 rows of A and loads 32 of the
//           64 rows of B
// Roles     warp 0        producer   waits for empty[stage]; gather4 of A, a box of B; bytes of both CTAs count on
//                                    the even CTA's full[stage]
//           warp 1        issuer     of the even CTA: waits for full[stage], four tcgen05.mma, commit → empty[stage] of
//                                    both CTAs
//           warps 4-7     epilogue   wait for done, tensor memory → global memory
// Budget    shared: 2 × (16,384 + 8,192) + barriers; tensor memory: 64 columns
#include "arch/launch.hpp"
#include "arch/sm100/tcgen05.hpp"
#include "arch/sm100/tma.hpp"
#include "arch/sm90/make_tensor_map.hpp"
#include "kernels.hpp"

namespace hopwell::arch::kernels {
namespace {

template <int kCtaGroup>
struct Config {
  static constexpr int kRows = 128, kN = 64, kK = 64, kStages = 2, kThreads = 256;
  static constexpr int kRowsB = kN / kCtaGroup;
  static constexpr uint32_t kStageBytes = uint32_t(kRows + kRowsB) * kK * 2 * kCtaGroup;  // for all CTAs of the group
  static constexpr uint32_t kColumns = 64;
};

template <int kCtaGroup>
struct SharedStorage {
  using C = Config<kCtaGroup>;
  alignas(1024) bf16 a[C::kStages][C::kRows * C::kK];
  alignas(1024) bf16 b[C::kStages][C::kRowsB * C::kK];
  mbarrier full[C::kStages], empty[C::kStages], done;
  uint32_t tmem;
};

struct Params {
  TensorMap a, b;
  const int* rows;  // [128 kCtaGroup]
  float* c;         // [128 kCtaGroup][64]
  int steps;
};

#if HOPWELL_HAS_SM100A

template <int kCtaGroup>
HOPWELL_DEVICE void meet_everyone() {
  if constexpr (kCtaGroup == 2)
    cluster_sync();
  else
    syncthreads();
}

template <int kCtaGroup>
HOPWELL_DEVICE void produce(const Params& p, SharedStorage<kCtaGroup>& s, int rank) {
  using C = Config<kCtaGroup>;
  for (int step = 0; step < p.steps; ++step) {
    const int stage = step % C::kStages;
    mbarrier_wait(s.empty[stage], uint32_t(step / C::kStages & 1) ^ 1);
    if (rank == 0) mbarrier_arrive_expect_tx(s.full[stage], C::kStageBytes);
    const uint32_t full = in_even_cta(shared_address(&s.full[stage]));
    for (int r = 0; r < C::kRows; r += 4) {
      const int* i = p.rows + rank * C::kRows + r;
      tma_gather4<kCtaGroup>(shared_address(s.a[stage]) + uint32_t(r) * C::kK * 2, p.a, step * C::kK,
                             {i[0], i[1], i[2], i[3]}, full);
    }
    const int corner[2] = {step * C::kK, rank * C::kRowsB};
    if constexpr (kCtaGroup == 2)
      tma_load_pair(shared_address(s.b[stage]), p.b, corner, full);
    else
      tma_load(shared_address(s.b[stage]), p.b, corner, s.full[stage]);
  }
}

template <int kCtaGroup>
HOPWELL_DEVICE void issue(const Params& p, SharedStorage<kCtaGroup>& s) {
  using C = Config<kCtaGroup>;
  constexpr uint64_t kOperand = tcgen05_descriptor({Swizzle::bytes128, 16, 1024});
  constexpr uint32_t kInstruction = instruction_descriptor({.m = C::kRows * kCtaGroup, .n = C::kN});
  for (int step = 0; step < p.steps; ++step) {
    const int stage = step % C::kStages;
    mbarrier_wait(s.full[stage], uint32_t(step / C::kStages & 1));
    const uint64_t a = at_address(kOperand, shared_address(s.a[stage])),
                   b = at_address(kOperand, shared_address(s.b[stage]));
    for (int k = 0; k < 4; ++k)
      tcgen05_mma_f16<kCtaGroup>(s.tmem, a + uint64_t(2 * k), b + uint64_t(2 * k), kInstruction, step + k > 0);
    if constexpr (kCtaGroup == 2)
      tcgen05_commit_multicast<2>(s.empty[stage], 3);
    else
      tcgen05_commit<1>(s.empty[stage]);
  }
  if constexpr (kCtaGroup == 2)
    tcgen05_commit_multicast<2>(s.done, 3);
  else
    tcgen05_commit<1>(s.done);
}

template <int kCtaGroup>
HOPWELL_DEVICE void write_result(const Params& p, SharedStorage<kCtaGroup>& s, int rank) {
  using C = Config<kCtaGroup>;
  mbarrier_wait(s.done, 0);
  tcgen05_fence_after_thread_sync();
  const int quarter = warp_index() % 4, row = rank * C::kRows + quarter * 32 + lane_index();
  for (int half = 0; half < 2; ++half) {
    uint32_t r[32];
    tmem_load<TmemShape::b32x32>(r, tmem_address(s.tmem, quarter * 32, half * 32));
    tmem_wait_load(r);
    for (int i = 0; i < 32; ++i) p.c[row * C::kN + half * 32 + i] = bit_cast<float>(r[i]);
  }
  tcgen05_fence_before_thread_sync();
}

#endif

template <int kCtaGroup>
__global__ void __launch_bounds__(256, 1) kernel(const __grid_constant__ Params p) {
#if HOPWELL_HAS_SM100A
  using C = Config<kCtaGroup>;
  auto& s = dynamic_smem<SharedStorage<kCtaGroup>>();
  const int warp = warp_index(), rank = kCtaGroup == 2 ? int(cluster_rank()) : 0;
  if (warp == 0 && elect_one()) {
    for (int i = 0; i < C::kStages; ++i) {
      mbarrier_init(s.full[i], 1);
      mbarrier_init(s.empty[i], 1);
    }
    mbarrier_init(s.done, 1);
    fence_mbarrier_init();
  }
  if (warp == 1) {
    tmem_allocate<kCtaGroup>(s.tmem, C::kColumns);
    tmem_relinquish<kCtaGroup>();
  }
  meet_everyone<kCtaGroup>();
  if (warp == 0 && elect_one()) produce(p, s, rank);
  if (warp == 1 && rank == 0 && elect_one()) issue(p, s);
  if (warp >= 4) write_result(p, s, rank);
  meet_everyone<kCtaGroup>();  // all threads have read tensor memory, and the peer's copies to this CTA are complete
  if (warp == 1) tmem_deallocate<kCtaGroup>(s.tmem, C::kColumns);
#endif
}

TensorMap map_of(const bf16* address, int columns, int rows, uint32_t box_rows) {
  return make_tensor_map({.address = const_cast<bf16*>(address),
                          .element = TensorElement::bf16,
                          .rank = 2,
                          .extent = {uint64_t(columns), uint64_t(rows)},
                          .stride_bytes = {uint64_t(columns) * 2},
                          .box = {64, box_rows},
                          .swizzle = Swizzle::bytes128});
}

template <int kCtaGroup>
void start(const Params& p) {
  const LaunchShape shape{
      .grid = {kCtaGroup}, .threads = 256, .cluster = kCtaGroup, .shared_bytes = sizeof(SharedStorage<kCtaGroup>)};
#if HOPWELL_ON_DEVICE
  launch(kernel<kCtaGroup>, shape, nullptr, p);
#else
  launch(kernel<kCtaGroup>, shape, p);
#endif
}

}  // namespace

void tcgen05_gather_gemm(int cta_group, const bf16* a, int a_rows, const int* rows, const bf16* b, float* c, int k) {
  const Params p{map_of(a, k, a_rows, 1), map_of(b, k, 64, uint32_t(64 / cta_group)), rows, c, k / 64};
  if (cta_group == 2)
    start<2>(p);
  else
    start<1>(p);
}

}  // namespace hopwell::arch::kernels
