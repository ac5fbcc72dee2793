// Blackwell: the data flow of a sparse-MLA backward block, to measure the emulator on a realistic pipeline.
// One CTA, one query, 64 heads.
//
//     S = Q Kᵀ   dP = dO Vᵀ (V = K[:, :512])   P = exp2(S·scale·log2e − lse)   dS = P (dP − delta)·scale
//     dQ += dS K     dK[indices] += dSᵀ Q + Pᵀ dO
//
// All products are tcgen05.mma.ws with M 64, whose results fill all 128 lanes: the halves of N are stacked. Q, dO and K
// are read K-major for S and dP and MN-major for the rest, from the same shared memory. dK of a block is computed in
// two parts of 320 and 256 dimensions.
//
// Roles     warp 0        producer   Q and dO once, then 64 gathered rows of K a block
//           warp 1        issuer
//           warps 4-11    softmax, and adding dK to global memory
// Timeline  issuer    S dP │            │ dQ, dK 0-319 │        │ dK 320-575 │         │ S dP …
//           softmax        │ P dS → smem│              │ add dK │            │ add dK
// Budget    shared: 9 + 8 + 9 + 1 + 1 panels of 8,192 B = 229,376 + barriers
//           tensor memory: 288 dQ + 160 dK + 32 S + 32 dP = 512 columns
#include "arch/launch.hpp"
#include "arch/sm100/tcgen05.hpp"
#include "arch/sm100/tma.hpp"
#include "arch/sm80/convert.hpp"
#include "arch/sm80/memory.hpp"
#include "arch/sm90/make_tensor_map.hpp"
#include "kernels.hpp"

namespace hopwell::arch::kernels {
namespace {

struct Config {
  static constexpr int kHeads = 64, kKeys = 64, kD = 576, kDv = 512, kThreads = 384;
  static constexpr uint32_t kPanel = 64 * 128;  // 64 rows of 64 columns, 128B-swizzled
};
struct TmemColumns {
  static constexpr uint32_t kDQ = 0, kDK = 288, kS = 448, kDP = 480;
};

struct SharedStorage {
  alignas(1024) uint8_t q[9][Config::kPanel], d_out[8][Config::kPanel], keys[9][Config::kPanel], p[Config::kPanel],
      ds[Config::kPanel];
  mbarrier q_full, keys_full, keys_empty, s_full, p_full, dk_full, dk_empty;
  uint32_t tmem;
};
static_assert(sizeof(SharedStorage) <= sm90::kMaxSharedBytes);

struct Params {
  TensorMap q, d_out, kv;
  MlaFlow flow;
  float scale_log2;
};

#if HOPWELL_HAS_SM100A

HOPWELL_DEVICE void produce(const Params& p, SharedStorage& s) {
  mbarrier_arrive_expect_tx(s.q_full, 17 * Config::kPanel);
  for (int c = 0; c < 9; ++c) tma_load(shared_address(s.q[c]), p.q, {64 * c, 0}, s.q_full);
  for (int c = 0; c < 8; ++c) tma_load(shared_address(s.d_out[c]), p.d_out, {64 * c, 0}, s.q_full);
  for (int block = 0; block < p.flow.blocks; ++block) {
    mbarrier_wait(s.keys_empty, uint32_t(block & 1) ^ 1);
    mbarrier_arrive_expect_tx(s.keys_full, 9 * Config::kPanel);
    for (int r = 0; r < Config::kKeys; r += 4) {
      const int* i = p.flow.indices + block * Config::kKeys + r;
      for (int c = 0; c < 9; ++c)
        tma_gather4<1>(shared_address(s.keys[c]) + uint32_t(r) * 128, p.kv, 64 * c, {i[0], i[1], i[2], i[3]},
                       shared_address(&s.keys_full));
    }
  }
}

constexpr uint64_t kByK = tcgen05_descriptor({Swizzle::bytes128, 16, 1024}),
                   kByMn = tcgen05_descriptor({Swizzle::bytes128, Config::kPanel, 1024});

// D [64 heads][64 keys] = A [heads][64 panels] · keysᵀ, both K-major.
HOPWELL_DEVICE void multiply_panels(uint32_t d, const uint8_t (*a)[Config::kPanel],
                                    const uint8_t (*keys)[Config::kPanel], int panels) {
  for (int c = 0; c < panels; ++c)
    for (uint32_t k = 0; k < 4; ++k)
      tcgen05_mma_ws_f16(d, at_address(kByK, shared_address(a[c]) + 32 * k),
                         at_address(kByK, shared_address(keys[c]) + 32 * k), instruction_descriptor({.m = 64, .n = 64}),
                         c > 0 || k > 0);
}

// D [64][n dimensions] (+)= A · B, reduced over 64 heads or keys; B is MN-major from panel `first` on, A [64][64] K- or
// MN-major.
HOPWELL_DEVICE void multiply_rows(uint32_t d, const uint8_t* a, Major a_major, const uint8_t (*b)[Config::kPanel],
                                  int first, int n, bool accumulate) {
  for (uint32_t k = 0; k < 4; ++k) {
    const uint64_t left = a_major == Major::k ? at_address(kByK, shared_address(a) + 32 * k)
                                              : at_address(kByMn, shared_address(a) + 2048 * k);
    tcgen05_mma_ws_f16(d, left, at_address(kByMn, shared_address(b[first]) + 2048 * k),
                       instruction_descriptor({.m = 64, .n = n, .a_major = a_major, .b_major = Major::mn}),
                       accumulate || k > 0);
  }
}

HOPWELL_DEVICE void issue(const Params& p, SharedStorage& s) {
  const uint32_t dq = s.tmem + TmemColumns::kDQ, dk = s.tmem + TmemColumns::kDK;
  mbarrier_wait(s.q_full, 0);
  for (int block = 0; block < p.flow.blocks; ++block) {
    const uint32_t parity = uint32_t(block & 1);
    mbarrier_wait(s.keys_full, parity);
    multiply_panels(s.tmem + TmemColumns::kS, s.q, s.keys, 9);
    multiply_panels(s.tmem + TmemColumns::kDP, s.d_out, s.keys, 8);
    tcgen05_commit<1>(s.s_full);
    mbarrier_wait(s.p_full, parity);  // also means that dK of the previous block has been read
    tcgen05_fence_after_thread_sync();
    multiply_rows(dq, s.ds, Major::k, s.keys, 0, 256, block > 0);
    multiply_rows(dq + 128, s.ds, Major::k, s.keys, 4, 256, block > 0);
    multiply_rows(dq + 256, s.ds, Major::k, s.keys, 8, 64, block > 0);
    tcgen05_commit<1>(s.keys_empty);
    multiply_rows(dk, s.ds, Major::mn, s.q, 0, 256, false);
    multiply_rows(dk + 128, s.ds, Major::mn, s.q, 4, 64, false);
    multiply_rows(dk, s.p, Major::mn, s.d_out, 0, 256, true);
    multiply_rows(dk + 128, s.p, Major::mn, s.d_out, 4, 64, true);
    tcgen05_commit<1>(s.dk_full);
    mbarrier_wait(s.dk_empty, parity);
    tcgen05_fence_after_thread_sync();
    multiply_rows(dk, s.ds, Major::mn, s.q, 5, 128, false);
    multiply_rows(dk + 64, s.ds, Major::mn, s.q, 7, 64, false);
    multiply_rows(dk + 96, s.ds, Major::mn, s.q, 8, 64, false);  // dimensions 512-575 have no value part
    multiply_rows(dk, s.p, Major::mn, s.d_out, 5, 128, true);
    multiply_rows(dk + 64, s.p, Major::mn, s.d_out, 7, 64, true);
    tcgen05_commit<1>(s.dk_full);
  }
}

struct Lane {
  int quarter, half, position;  // of tensor memory; half of the columns; 0-127
};

// Calls visit(dimension, value) for this thread's part of an accumulator of n dimensions that starts at dimension d0.
template <class Visit>
HOPWELL_DEVICE void each_element(const SharedStorage& s, Lane lane, uint32_t column, int n, int d0, Visit visit) {
  const int columns = n / 2, mine = columns / 2;
  for (int c = lane.half * mine; c < (lane.half + 1) * mine; c += 16) {
    uint32_t r[16];
    tmem_load<TmemShape::b32x32>(r, tmem_address(s.tmem + column, 32 * lane.quarter, c));
    tmem_wait_load(r);
    for (int i = 0; i < 16; ++i) visit(d0 + lane.position / 64 * columns + c + i, bit_cast<float>(r[i]));
  }
}

// Converts S and dP of 16 keys to P and dS, as bf16 in the swizzled panels.
HOPWELL_DEVICE void softmax(const Params& p, SharedStorage& s, Lane lane, const int* keys, float lse, float delta) {
  uint32_t scores[16], d_p[16];
  tmem_load<TmemShape::b32x32>(scores, tmem_address(s.tmem + TmemColumns::kS, 32 * lane.quarter, 16 * lane.half));
  tmem_load<TmemShape::b32x32>(d_p, tmem_address(s.tmem + TmemColumns::kDP, 32 * lane.quarter, 16 * lane.half));
  tmem_wait_load(scores);
  pin_registers(d_p);
  const int head = lane.position % 64, first = lane.position / 64 * 32 + 16 * lane.half;
  for (int v = 0; v < 2; ++v) {
    Words4 pv, dsv;
    for (int i = 0; i < 4; ++i) {
      float pe[2], dse[2];
      for (int e = 0; e < 2; ++e) {
        const int at = 8 * v + 2 * i + e, key = keys[first + at];
        pe[e] = key >= 0 && key < p.flow.n_keys ? exp2_approx(bit_cast<float>(scores[at]) * p.scale_log2 - lse) : 0.f;
        dse[e] = pe[e] * (bit_cast<float>(d_p[at]) - delta) * p.flow.scale;
      }
      pv.w[i] = pack_bf16(pe[0], pe[1]);
      dsv.w[i] = pack_bf16(dse[0], dse[1]);
    }
    const uint32_t offset = uint32_t(head * 128 + ((2 * first + 16 * v) ^ head % 8 * 16));
    store_shared_v4(shared_address(s.p) + offset, pv);
    store_shared_v4(shared_address(s.ds) + offset, dsv);
  }
}

HOPWELL_DEVICE void softmax_and_results(const Params& p, SharedStorage& s) {
  const int warp = warp_index();
  const Lane lane{warp % 4, (warp - 4) / 4, 32 * (warp % 4) + lane_index()};
  const int head = lane.position % 64;
  const float lse = p.flow.lse_log2[head], delta = p.flow.delta[head];
  for (int block = 0; block < p.flow.blocks; ++block) {
    const int* keys = p.flow.indices + block * Config::kKeys;
    mbarrier_wait(s.s_full, uint32_t(block & 1));
    tcgen05_fence_after_thread_sync();
    softmax(p, s, lane, keys, lse, delta);
    fence_proxy_async();
    mbarrier_arrive(s.p_full);
    const int key = keys[lane.position % 64];
    const auto add = [&](int dimension, float value) {
      if (key >= 0 && key < p.flow.n_keys) red_add(p.flow.dkv + int64_t{key} * Config::kD + dimension, value);
    };
    mbarrier_wait(s.dk_full, 0);
    tcgen05_fence_after_thread_sync();
    each_element(s, lane, TmemColumns::kDK, 256, 0, add);
    each_element(s, lane, TmemColumns::kDK + 128, 64, 256, add);
    tcgen05_fence_before_thread_sync();
    mbarrier_arrive(s.dk_empty);
    mbarrier_wait(s.dk_full, 1);
    tcgen05_fence_after_thread_sync();
    each_element(s, lane, TmemColumns::kDK, 128, 320, add);
    each_element(s, lane, TmemColumns::kDK + 64, 64, 448, add);
    each_element(s, lane, TmemColumns::kDK + 96, 64, 512, add);
    tcgen05_fence_before_thread_sync();
  }
  const auto store = [&](int dimension, float value) { p.flow.dq[head * Config::kD + dimension] = value; };
  each_element(s, lane, TmemColumns::kDQ, 256, 0, store);
  each_element(s, lane, TmemColumns::kDQ + 128, 256, 256, store);
  each_element(s, lane, TmemColumns::kDQ + 256, 64, 512, store);
  tcgen05_fence_before_thread_sync();
}

#endif

__global__ void __launch_bounds__(Config::kThreads, 1) kernel(const __grid_constant__ Params p) {
#if HOPWELL_HAS_SM100A
  auto& s = dynamic_smem<SharedStorage>();
  const int warp = warp_index();
  if (warp == 0 && elect_one()) {
    mbarrier_init(s.q_full, 1);
    mbarrier_init(s.keys_full, 1);
    mbarrier_init(s.keys_empty, 1);
    mbarrier_init(s.s_full, 1);
    mbarrier_init(s.p_full, 256);
    mbarrier_init(s.dk_full, 1);
    mbarrier_init(s.dk_empty, 256);
    fence_mbarrier_init();
  }
  if (warp == 1) {
    tmem_allocate<1>(s.tmem, 512);
    tmem_relinquish<1>();
  }
  syncthreads();
  if (warp == 0 && elect_one()) produce(p, s);
  if (warp == 1 && elect_one()) issue(p, s);
  if (warp >= 4) softmax_and_results(p, s);
  syncthreads();
  if (warp == 1) tmem_deallocate<1>(s.tmem, 512);
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

}  // namespace

void mla_backward_flow(const MlaFlow& flow) {
  const Params p{map_of(flow.q, Config::kD, 64, 64), map_of(flow.d_out, Config::kDv, 64, 64),
                 map_of(flow.kv, Config::kD, flow.n_keys, 1), flow, flow.scale * 1.44269504f};
  const LaunchShape shape{.grid = {1}, .threads = Config::kThreads, .shared_bytes = sizeof(SharedStorage)};
#if HOPWELL_ON_DEVICE
  launch(kernel, shape, nullptr, p);
#else
  launch(kernel, shape, p);
#endif
}

}  // namespace hopwell::arch::kernels
