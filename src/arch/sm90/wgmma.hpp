// wgmma: products of a warpgroup, asynchronous, fp32 accumulators in registers.
//
// Order of use: wgmma_fence(), some wgmma_ss / wgmma_rs, wgmma_commit(), wgmma_wait<n>(accumulators…). Between the
// product and the wait the accumulators and register operands must not be touched. "PTX:" anchors are sections of
// https://docs.nvidia.com/cuda/parallel-thread-execution/
#pragma once

#include "../descriptor.hpp"
#include "../sm80/threads.hpp"
#if HOPWELL_ON_DEVICE
#include "wgmma_shapes.inl"
#else
#include "../emu/sm90.hpp"
#endif

namespace hopwell::arch {

#if HOPWELL_HAS_SM90A

/// Interpretation of the operands: element type, contiguous index, and signs.
struct WgmmaOptions {
  WgmmaType type = WgmmaType::bf16;
  Major a_major = Major::k, b_major = Major::k;
  bool negate_a = false, negate_b = false;
};

/// wgmma.fence: orders the threads' own accesses to accumulators and register operands before the products that follow.
/// PTX: #asynchronous-warpgroup-level-matrix-instructions-wgmma-fence
HOPWELL_DEVICE void wgmma_fence([[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#else
  emu::wgmma_fence(site);
#endif
}

/// wgmma.mma_async.m64nNk16: d (+)= A [64][16] B [16][N], both operands in shared memory by descriptor. N = 2 × size of
/// d, a multiple of 8 up to 256. PTX: #asynchronous-warpgroup-level-matrix-instructions-wgmma-mma-async
template <WgmmaOptions kOptions = WgmmaOptions{}, int kHalfN>
HOPWELL_DEVICE void wgmma_ss(float (&d)[kHalfN], uint64_t a, uint64_t b, bool accumulate,
                             [[maybe_unused]] Site site = Site::current()) {
  static_assert(kHalfN % 4 == 0 && kHalfN <= 128 && kOptions.type != WgmmaType::e4m3);
#if HOPWELL_ON_DEVICE
  detail::WgmmaShape<2 * kHalfN>::template ss<kOptions.type, kOptions.negate_a ? -1 : 1, kOptions.negate_b ? -1 : 1,
                                              int(kOptions.a_major), int(kOptions.b_major)>(d, a, b, accumulate);
#else
  emu::wgmma(d, 2 * kHalfN, kOptions.type, nullptr, a, b, kOptions.a_major, kOptions.b_major, kOptions.negate_a,
             kOptions.negate_b, accumulate, site);
#endif
}

/// The same with A [64][16] in registers, as the fragments of mma.m16n8k16 for each warp's 16 rows. With e4m3 it is
/// m64nNk32: A [64][32] as the fragments of mma.m16n8k32, both operands K-major. generate_wgmma.py lists the available
/// forms. Hopper accumulates e4m3 products with fewer bits than fp32: see docs/emulator.md.
/// PTX: #asynchronous-warpgroup-level-matrix-instructions-wgmma-mma-async
template <WgmmaOptions kOptions = WgmmaOptions{}, int kHalfN>
HOPWELL_DEVICE void wgmma_rs(float (&d)[kHalfN], const uint32_t (&a)[4], uint64_t b, bool accumulate,
                             [[maybe_unused]] Site site = Site::current()) {
  static_assert(kHalfN % 4 == 0 && kHalfN <= 128 && kOptions.a_major == Major::k);
  static_assert(kOptions.type != WgmmaType::e4m3 || kOptions.b_major == Major::k);
#if HOPWELL_ON_DEVICE
  if constexpr (kOptions.type == WgmmaType::e4m3)
    detail::WgmmaShape<2 * kHalfN>::template rs_e4m3<kOptions.negate_a ? -1 : 1, kOptions.negate_b ? -1 : 1>(
        d, a, b, accumulate);
  else
    detail::WgmmaShape<2 * kHalfN>::template rs<kOptions.type, kOptions.negate_a ? -1 : 1, kOptions.negate_b ? -1 : 1,
                                                int(kOptions.b_major)>(d, a, b, accumulate);
#else
  emu::wgmma(d, 2 * kHalfN, kOptions.type, a, 0, b, Major::k, kOptions.b_major, kOptions.negate_a, kOptions.negate_b,
             accumulate, site);
#endif
}

/// wgmma.commit_group: closes a group of the products since the last one. PTX:
/// #asynchronous-warpgroup-level-matrix-instructions-wgmma-commit-group
HOPWELL_DEVICE void wgmma_commit([[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#else
  emu::wgmma_commit(site);
#endif
}

/// Keeps the compiler from moving register accesses across this point.
template <int kSize>
HOPWELL_DEVICE void pin_registers([[maybe_unused]] float (&d)[kSize]) {
#if HOPWELL_ON_DEVICE
  HOPWELL_UNROLL
  for (int i = 0; i < kSize; ++i) asm volatile("" : "+f"(d[i])::"memory");
#endif
}

/// The same for an integer. The compiler computes values from it after this point, so they occupy no register before.
HOPWELL_DEVICE void pin_registers([[maybe_unused]] uint32_t& x) {
#if HOPWELL_ON_DEVICE
  asm volatile("" : "+r"(x));
#endif
}

/// wgmma.wait_group: waits until at most the latest kPending groups are incomplete. `d`…: the accumulators that become
/// valid. PTX: #asynchronous-warpgroup-level-matrix-instructions-wgmma-wait-group
template <int kPending>
HOPWELL_DEVICE void wgmma_wait([[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#else
  emu::wgmma_wait(kPending, site);
#endif
}
template <int kPending, int kSize>
HOPWELL_DEVICE void wgmma_wait(float (&d)[kSize], Site site = Site::current()) {
  wgmma_wait<kPending>(site);
  pin_registers(d);
}
template <int kPending, int kSize0, int kSize1>
HOPWELL_DEVICE void wgmma_wait(float (&d0)[kSize0], float (&d1)[kSize1], Site site = Site::current()) {
  wgmma_wait<kPending>(site);
  pin_registers(d0);
  pin_registers(d1);
}

#endif

}  // namespace hopwell::arch
