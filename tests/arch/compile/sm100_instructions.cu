// One use of every instruction that only sm_100a has: a compile test (see compile_kernels.py). It is never run.
#include "arch/sm100/cluster_launch.hpp"
#include "arch/sm100/convert.hpp"
#include "arch/sm100/memory.hpp"
#include "arch/sm100/tcgen05.hpp"
#include "arch/sm100/tma.hpp"

namespace hopwell::arch {

// Every use of a collector buffer: A's buffer, and with .ws each of B's four buffers.
template <int kCtaGroup, CollectorUsage kUsage>
HOPWELL_DEVICE void collectors(uint32_t t, uint64_t d) {
#if HOPWELL_HAS_SM100A
  constexpr uint32_t kInstruction = instruction_descriptor({.m = 128, .n = 64});
  constexpr uint32_t kBlockScaled = nvfp4_instruction_descriptor(128 * kCtaGroup, 16);
  tcgen05_mma_f16<kCtaGroup, kUsage>(t, d, d, kInstruction, true);
  tcgen05_mma_f16_ts<kCtaGroup, kUsage>(t, t + 64, d, kInstruction, true);
  tcgen05_mma_nvfp4<kCtaGroup, kUsage>(t, d, d, kBlockScaled, t + 64, t + 68, true);
  tcgen05_mma_nvfp4_ts<kCtaGroup, kUsage>(t, t + 64, d, kBlockScaled, t + 72, t + 76, true);
  if constexpr (kCtaGroup == 1) {
    tcgen05_mma_ws_f16<kUsage, 0>(t, d, d, kInstruction, true);
    tcgen05_mma_ws_f16<kUsage, 1>(t, d, d, kInstruction, true);
    tcgen05_mma_ws_f16<kUsage, 2>(t, d, d, kInstruction, true);
    tcgen05_mma_ws_f16_ts<kUsage, 3>(t, t, d, kInstruction, true);
  }
#endif
}

struct Shared {
  alignas(1024) bf16 a[64 * 64];
  mbarrier bar;
  uint32_t tmem;
};

template <int kCtaGroup>
__global__ void instructions(const __grid_constant__ TensorMap map, uint32_t* out) {
#if HOPWELL_HAS_SM100A
  auto& s = dynamic_smem<Shared>();
  const uint32_t a = shared_address(s.a);
  tmem_allocate<kCtaGroup>(s.tmem, 128);
  tmem_relinquish<kCtaGroup>();
  tcgen05_fence_before_thread_sync();
  syncthreads();
  tcgen05_fence_after_thread_sync();
  const uint32_t t = s.tmem;
  const uint64_t d = at_address(tcgen05_descriptor({Swizzle::bytes128, 16, 1024}), a);
  if (elect_one()) {
    constexpr uint32_t kInstruction = instruction_descriptor({.m = 128, .n = 64});
    tcgen05_mma_f16<kCtaGroup>(t, d, d, kInstruction, false);
    tcgen05_mma_f16_ts<kCtaGroup>(t, t + 64, d, kInstruction, true);
    if constexpr (kCtaGroup == 1) {
      tcgen05_mma_ws_f16(t, d, d, kInstruction, true);
      tcgen05_mma_ws_f16_ts(t, t, d, kInstruction, true);
    } else {
      tma_load_pair(a, map, {1, 2}, in_even_cta(shared_address(&s.bar)));
    }
    tcgen05_mma_nvfp4<kCtaGroup>(t, d, d, nvfp4_instruction_descriptor(128, 64), t + 64, t + 68, true);
    tcgen05_mma_nvfp4_ts<kCtaGroup>(t, t + 64, d, nvfp4_instruction_descriptor(128, 64), t + 72, t + 76, true);
    collectors<kCtaGroup, CollectorUsage::fill>(t, d);
    collectors<kCtaGroup, CollectorUsage::use>(t, d);
    collectors<kCtaGroup, CollectorUsage::lastuse>(t, d);
    collectors<kCtaGroup, CollectorUsage::discard>(t, d);
    tcgen05_commit<kCtaGroup>(s.bar);
    tcgen05_commit_multicast<kCtaGroup>(s.bar, 3);
    tcgen05_copy<kCtaGroup, CopyShape::b128x256>(t, d);
    tcgen05_copy<kCtaGroup, CopyShape::b128x128>(t, d);
    tcgen05_copy<kCtaGroup, CopyShape::b64x128_02_13>(t, d);
    tcgen05_copy<kCtaGroup, CopyShape::b64x128_01_23>(t, d);
    tcgen05_copy<kCtaGroup, CopyShape::b32x128_x4>(t, d);
    tcgen05_copy<kCtaGroup, CopyShape::b4x256>(t, d);
    tcgen05_shift<kCtaGroup>(t);
    tma_gather4<kCtaGroup>(a, map, 0, {1, 2, 3, 4}, in_even_cta(shared_address(&s.bar)));
    const uint32_t even = in_even_cta(shared_address(&s.bar));
    tma_gather4<kCtaGroup>(a, map, 0, {1, 2, 3, 4}, even, evict_last_policy());
    tma_gather4_multicast<kCtaGroup>(a, map, 0, {1, 2, 3, 4}, even, 3);
    tma_gather4_multicast<kCtaGroup>(a, map, 0, {1, 2, 3, 4}, even, 3, evict_first_policy());
    tma_scatter4(map, 0, {1, 2, 3, 4}, a);
    clusterlaunchcontrol_try_cancel(a, s.bar);
  }
  const CancelResponse next = clusterlaunchcontrol_query_cancel(load_shared_v4(a));
  out[0] = uint32_t(next.canceled ? next.x + next.y + next.z : 0);
  uint32_t r[32], q[4];
  tmem_load<TmemShape::b32x32>(r, t);
  tmem_wait_load(r);
  for (int i = 0; i < 32; ++i) out[i] = r[i];
  const auto round_trip = [&](auto load, auto store) {
    load();
    tmem_wait_load(q);
    uint32_t pairs[4];
    unpack_e2m1(q[0], pairs);
    for (int i = 0; i < 4; ++i)
      out[i] +=
          q[i] + pairs[i] + pack_e2m1(float(q[i]), 1.f) + pack_e4m3(float(q[i]), 1.f) + unpack_e4m3(uint16_t(q[i]));
    store();
    tmem_wait_store();
  };
  round_trip([&] { tmem_load<TmemShape::b16x64>(q, t); }, [&] { tmem_store<TmemShape::b16x64>(t, q); });
  round_trip([&] { tmem_load<TmemShape::b16x128>(q, t); }, [&] { tmem_store<TmemShape::b16x128>(t, q); });
  round_trip([&] { tmem_load<TmemShape::b16x256>(q, t); }, [&] { tmem_store<TmemShape::b16x256>(t, q); });
  round_trip([&] { tmem_load<TmemShape::b16x32x2, 4>(q, t); }, [&] { tmem_store<TmemShape::b16x32x2, 4>(t, q); });
  tmem_store<TmemShape::b32x32>(t, r);
  tmem_wait_store();
  store_streaming(out + 32, Words8{{r[0], r[1], r[2], r[3], r[4], r[5], r[6], r[7]}});
  tmem_deallocate<kCtaGroup>(t, 128);
#endif
}

template __global__ void instructions<1>(const __grid_constant__ TensorMap map, uint32_t* out);
template __global__ void instructions<2>(const __grid_constant__ TensorMap map, uint32_t* out);

}  // namespace hopwell::arch
