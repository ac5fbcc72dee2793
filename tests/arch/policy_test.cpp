// Points on which PTX is silent: a finding with the strict default, no finding with the switch turned off.
#include <gtest/gtest.h>

#include "arch/sm100/tcgen05.hpp"
#include "arch/sm80/async_copy.hpp"
#include "arch/sm90/bulk_copy.hpp"
#include "arch/sm90/wgmma.hpp"
#include "harness.hpp"

namespace hopwell::arch {
namespace {

using emu::Kind;

struct Shared {
  alignas(1024) uint32_t words[8192];
  mbarrier full, done;
  uint32_t tmem;
};
alignas(16) uint32_t zeros[4];

emu::LaunchShape shape(uint32_t ctas = 1) { return {{ctas, 1, 1}, {128, 1, 1}, {ctas, 1, 1}, sizeof(Shared)}; }

void expect_switch(const emu::LaunchShape& launch_shape, void (*kernel)(), Kind kind, void (*relax)(emu::Policy&)) {
  for (uint64_t seed = 0; seed < 6; ++seed) {
    emu::Options options = test::options_for(seed);
    const emu::Report strict = emu::launch(launch_shape, options, kernel);
    EXPECT_TRUE(strict.has(kind)) << "seed " << seed << "\n" << strict.text();
    relax(options.policy);
    const emu::Report lenient = emu::launch(launch_shape, options, kernel);
    EXPECT_TRUE(lenient.clean()) << "seed " << seed << "\n" << lenient.text();
  }
}

void multiply_from(Shared& s) {
  const uint64_t operand = wgmma_descriptor({Swizzle::bytes128, 16, 1024});
  float d[32];
  wgmma_fence();
  wgmma_ss(d, at_address(operand, shared_address(s.words)), at_address(operand, shared_address(s.words)), false);
  wgmma_commit();
  wgmma_wait<0>(d);
}

TEST(Policy, CpAsyncNeedsAProxyFence) {
  expect_switch(
      shape(),
      [] {
        auto& s = dynamic_smem<Shared>();
        for (int i = thread_index(); i < 512; i += 128) cp_async(shared_address(s.words) + uint32_t(i) * 16, zeros);
        cp_async_wait_all();
        syncthreads();
        multiply_from(s);
      },
      Kind::proxy, [](emu::Policy& p) { p.cp_async_needs_proxy_fence = false; });
}

TEST(Policy, ProxyFenceOnTheWritersSide) {
  expect_switch(
      shape(),
      [] {
        auto& s = dynamic_smem<Shared>();
        for (int i = thread_index(); i < 2048; i += 128) s.words[i] = 0;
        syncthreads();
        fence_proxy_async();  // by the readers, who know of the writes only through the barrier
        multiply_from(s);
      },
      Kind::proxy, [](emu::Policy& p) { p.proxy_fence_on_writer_side = false; });
}

TEST(Policy, RemoteArrivalNeedsAWaitAtClusterScope) {
  expect_switch(
      shape(2),
      [] {
        auto& s = dynamic_smem<Shared>();
        const int t = thread_index();
        if (t == 0) {
          mbarrier_init(s.full, 128);
          fence_mbarrier_init();
        }
        cluster_sync();
        const uint32_t peer = cluster_rank() ^ 1;
        store_cluster(map_to_rank(shared_address(&s.words[t]), peer), 1);
        mbarrier_arrive_cluster(map_to_rank(shared_address(&s.full), peer));
        mbarrier_wait(s.full, 0);
        volatile uint32_t v = s.words[127 - t];
        (void)v;
        cluster_sync();
      },
      Kind::race, [](emu::Policy& p) { p.remote_arrival_needs_cluster_wait = false; });
}

// The tensor core writes tensor memory, the warps read it and free it; with or without fences and the quarter in the
// address.
void tensor_round_trip(bool fence_before, bool fence_after, bool named_quarter) {
  auto& s = dynamic_smem<Shared>();
  const int t = thread_index(), warp = t / 32;
  for (int i = t; i < 8192; i += 128) s.words[i] = 0;
  if (t == 0) {
    mbarrier_init(s.done, 1);
    fence_mbarrier_init();
  }
  if (warp == 1) tmem_allocate<1>(s.tmem, 32);
  fence_proxy_async();
  syncthreads();
  if (t == 0) {
    const uint64_t operand = at_address(tcgen05_descriptor({Swizzle::bytes128, 16, 1024}), shared_address(s.words));
    tcgen05_mma_f16<1>(s.tmem, operand, operand, instruction_descriptor({.m = 128, .n = 32}), false);
    tcgen05_commit<1>(s.done);
  }
  mbarrier_wait(s.done, 0);
  tcgen05_fence_after_thread_sync();
  uint32_t r[32];
  tmem_load<TmemShape::b32x32>(r, tmem_address(s.tmem, named_quarter ? 32 * warp : 0, 0));
  tmem_wait_load(r);
  if (fence_before) tcgen05_fence_before_thread_sync();
  syncthreads();
  if (fence_after) tcgen05_fence_after_thread_sync();
  if (warp == 1) tmem_deallocate<1>(s.tmem, 32);
}

TEST(Policy, WaitLdNeedsAFenceBeforeTheBarrier) {
  expect_switch(
      shape(), [] { tensor_round_trip(false, true, true); }, Kind::race,
      [](emu::Policy& p) { p.tmem_wait_needs_fence_before = false; });
}

TEST(Policy, TheQuarterMustBeNamed) {
  expect_switch(
      shape(), [] { tensor_round_trip(true, true, false); }, Kind::tensor_memory,
      [](emu::Policy& p) { p.tmem_quarter_must_be_named = false; });
}

TEST(Policy, DeallocAfterAFenceOnlyIfAsked) {
  for (uint64_t seed = 0; seed < 6; ++seed) {
    emu::Options options = test::options_for(seed);
    EXPECT_TRUE(emu::launch(shape(), options, [] { tensor_round_trip(true, false, true); }).clean());
    options.policy.dealloc_needs_fence_after = true;
    EXPECT_TRUE(emu::launch(shape(), options, [] { tensor_round_trip(true, false, true); }).has(Kind::race));
    EXPECT_TRUE(emu::launch(shape(), options, [] { tensor_round_trip(true, true, true); }).clean());
  }
}

}  // namespace
}  // namespace hopwell::arch
