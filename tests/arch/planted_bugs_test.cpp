// Planted bugs: small kernels, right when `bug` is 0, with one mistake otherwise. Every mistake must be found under
// every schedule, by a finding of the right kind that names the right line (the one that ends with "// @name").
#include "harness.hpp"

#include <array>
#include <numeric>
#include <random>
#include <vector>

#include "arch/sm100/tcgen05.hpp"
#include "arch/sm100/tma.hpp"
#include "arch/sm80/async_copy.hpp"
#include "arch/sm80/matrix.hpp"
#include "arch/sm90/make_tensor_map.hpp"
#include "arch/sm90/tma.hpp"
#include "arch/sm90/wgmma.hpp"

namespace hopwell::arch {
namespace {

using emu::Kind;

struct Planted {
  int bug;
  Kind kind;
  const char* words;
  const char* mark;
};
int planted_in_all = 0;

/// The right kernel is clean over 50 seeds; every planted bug is found, with its line.
void plant(const emu::LaunchShape& shape, const std::function<void(int)>& kernel, const std::vector<Planted>& bugs) {
  test::expect_clean(shape, [&] { kernel(0); });
  for (const Planted& b : bugs) {
    SCOPED_TRACE("bug " + std::to_string(b.bug));
    test::expect_finding(shape, [&] { kernel(b.bug); }, b.kind, b.words, b.mark);
    ++planted_in_all;
  }
}

struct Shared {
  alignas(1024) std::array<uint32_t, 8192> words;
  mbarrier full[2], empty[2], done;
  uint32_t tmem;
};
emu::LaunchShape shape(uint32_t threads, uint32_t ctas = 1) {
  return {{ctas, 1, 1}, {threads, 1, 1}, {ctas, 1, 1}, sizeof(Shared)};
}
alignas(128) std::array<uint32_t, 16384> global;  // whatever kernels load from and store to

// ---- cp.async, ldmatrix, warps --------------------------------------------------------------------------------------

void cp_async_ring(int bug) {
  auto& s = dynamic_smem<Shared>();
  const int t = thread_index();
  const auto copy = [&](int step) {
    const uint32_t destination = shared_address(&s.words[size_t(step % 2 * 512 + t * 4)]);
    if (step < 4) cp_async(destination, &global[size_t(step * 512 + t * 4)], bug == 5 ? 20 : 16);  // @cp-copy
    if (bug != 1) cp_async_commit();
  };
  copy(0);
  copy(1);
  for (int step = 0; step < 4; ++step) {
    if (bug == 2)
      cp_async_wait<2>();
    else if (bug != 3)
      cp_async_wait<1>();
    if (bug != 4) syncthreads();
    volatile uint32_t v = s.words[size_t(step % 2 * 512 + 511 - t)];  // @cp-read
    (void)v;
    if (bug != 6) syncthreads();
    copy(step + 2);
  }
  if (bug != 7) cp_async_wait_all();
}

TEST(Planted, CpAsync) {
  plant(shape(128), cp_async_ring,
        {
            {1, Kind::race, "no cp.async.wait_group", "cp-read"},  // copies never committed
            {2, Kind::race, "no cp.async.wait_group", "cp-read"},  // waits for one group too few
            {3, Kind::race, "no cp.async.wait_group", "cp-read"},  // no wait
            {4, Kind::race, "cp.async of", "cp-read"},             // no barrier: others' copies
            {5, Kind::bounds, "src-size 20 exceeds cp-size 16", "cp-copy"},
            {6, Kind::race, "not ordered after the read by", "cp-copy"},  // overwrites what others still read
        });
  const auto unwaited = [] {
    cp_async(shared_address(&dynamic_smem<Shared>().words[size_t(thread_index() * 4)]), &global[0]);
    cp_async_commit();
  };
  for (uint64_t seed = 0; seed < 6; ++seed) {
    emu::Options options = test::options_for(seed);
    options.async = emu::Async::late;
    EXPECT_TRUE(emu::launch(shape(32), options, unwaited).has(Kind::pending));
  }
}

void misaligned(int bug) {
  auto& s = dynamic_smem<Shared>();
  const uint32_t base = shared_address(s.words.data());
  const int t = thread_index();
  for (int i = t; i < 512; i += 32) s.words[size_t(i ^ 1)] = uint32_t(i);
  if (bug != 1) syncwarp();
  uint32_t r[4];
  ldmatrix(r, base + uint32_t(t) * 16 + (bug == 2 ? 8 : 0));  // @ldmatrix
  const uint32_t destination = base + 2048 + uint32_t(t) * 16 + (bug == 3 ? 4 : 0);
  cp_async(destination, &global[size_t(bug == 4 ? 4 * t + 1 : 4 * t)]);  // @cp-aligned
  cp_async_wait_all();
  if (bug == 5 && t == 0)
    syncwarp();  // @half-warp
  else if (bug == 5)
    shuffle(t, 0);                                              // @other-half
  if (bug == 6 && t < 16) syncwarp();                           // @sixteen
  if (bug == 7) cp_async(base + 4 * 8192 + 1024, &global[0]);   // @beyond
  if (bug == 8 && t == 0) s.words[0] = uint32_t(warp_index());  // @one-lane
}

TEST(Planted, AlignmentAndConvergence) {
  plant(shape(32), misaligned,
        {
            {1, Kind::race, "not ordered", "ldmatrix"},
            {2, Kind::bounds, "must be 16-byte aligned", "ldmatrix"},
            {3, Kind::bounds, "must be 16-byte aligned", "cp-aligned"},
            {4, Kind::bounds, "global address must be 16-byte aligned", "cp-aligned"},
            {6, Kind::deadlock, "bar.warp.sync", "sixteen"},
            {7, Kind::bounds, "outside of its", "beyond"},
            {8, Kind::deadlock, "shfl.sync", "one-lane"},
        });
  for (uint64_t seed = 0; seed < 6; ++seed)
    EXPECT_TRUE(emu::launch(shape(32), test::options_for(seed), [] { misaligned(5); }).has(Kind::divergence));
}

// ---- TMA, mbarriers, wgmma ------------------------------------------------------------------------------------------

TensorMap operand_map(uint32_t rows = 64) {
  return make_tensor_map({.address = global.data(),
                          .element = TensorElement::bf16,
                          .rank = 2,
                          .extent = {256, 128},
                          .stride_bytes = {512},
                          .box = {64, rows},
                          .swizzle = Swizzle::bytes128});
}

void wgmma_pipeline(int bug) {
  const TensorMap map = operand_map();
  auto& s = dynamic_smem<Shared>();
  const int t = thread_index();
  const uint32_t base = shared_address(s.words.data());
  if (t == 0) {
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(s.full[i], bug == 1 ? 2 : 1);  // @wg-init
      mbarrier_init(s.empty[i], 128);
    }
    if (bug != 2) fence_mbarrier_init();
  }
  if (bug != 3) syncthreads();
  if (t == 128) {
    for (int step = 0; step < 4; ++step) {
      const int stage = step % 2;
      if (bug != 4) mbarrier_wait(s.empty[stage], uint32_t(step / 2) ^ (bug == 5 ? 0u : 1u));     // @wg-empty
      mbarrier_arrive_expect_tx(s.full[stage], bug == 6 ? 8192 : bug == 7 ? 16384 + 64 : 16384);  // @wg-expect
      const uint32_t a = base + uint32_t(stage) * 16384, b = a + (bug == 9 ? 4096 : 8192);
      tma_load(a, map, {step * 64, 0}, s.full[stage]);   // @wg-load-a
      tma_load(b, map, {step * 64, 64}, s.full[stage]);  // @wg-load-b
    }
  }
  if (t >= 128) return;
  float d[32];
  uint64_t operand = wgmma_descriptor({Swizzle::bytes128, 16, 1024});
  if (bug == 10) operand |= uint64_t{1} << 46;  // the version bit of another generation
  for (int step = 0; step < 4; ++step) {
    const int stage = step % 2;
    if (bug != 11) mbarrier_wait(s.full[stage], uint32_t(step / 2));  // @wg-full
    if (bug != 12) wgmma_fence();
    const uint32_t tile = base + uint32_t(stage) * 16384;
    const uint64_t a = at_address(operand, tile + (bug == 13 ? 512u * 128 : 0)), b = at_address(operand, tile + 8192);
    wgmma_ss(d, a, b, step > 0);  // @wg-mma
    if (bug != 14) wgmma_commit();
    if (bug == 15) mbarrier_arrive(s.empty[stage]);
    if (bug != 16) wgmma_wait<0>(d);  // @wg-wait
    if (bug == 17) continue;
    if (bug != 15) mbarrier_arrive(s.empty[stage]);
  }
}

TEST(Planted, TmaAndWgmma) {
  plant(shape(256), wgmma_pipeline,
        {
            {1, Kind::deadlock, "1 of 2 arrivals missing", "wg-full"},
            {2, Kind::proxy, "no fence.mbarrier_init", "wg-load-a"},
            {5, Kind::deadlock, "mbarrier.try_wait", "wg-empty"},
            {6, Kind::race, "byte count is too small", "wg-mma"},
            {7, Kind::deadlock, "64 bytes outstanding", "wg-full"},
            {9, Kind::race, "a copy that completes on the mbarrier", "wg-load-b"},
            {10, Kind::descriptor, "bits 14-15, 30-31, 46-48", "wg-mma"},
            {11, Kind::race, "no wait on that mbarrier", "wg-mma"},
            {12, Kind::race, "no wgmma.fence", "wg-mma"},
            {13, Kind::bounds, "outside of its", "wg-mma"},
            {14, Kind::pending, "was not committed", "wg-wait"},
            {15, Kind::race, "not ordered after the read by wgmma", "wg-load-a"},
            {17, Kind::deadlock, "128 of 128 arrivals missing", "wg-empty"},
        });
  for (int bug : {3, 4, 16})  // which of the finding's kinds it is depends on who comes first
    for (uint64_t seed = 0; seed < 6; ++seed)
      EXPECT_FALSE(emu::launch(shape(256), test::options_for(seed), [&] { wgmma_pipeline(bug); }).clean()) << bug;
}

// Operands written by threads, a result stored by TMA.
void thread_written(int bug) {
  const TensorMap out = make_tensor_map({.address = global.data(),
                                         .element = TensorElement::f32,
                                         .rank = 2,
                                         .extent = {64, 32},
                                         .stride_bytes = {256},
                                         .box = {32, 32},
                                         .swizzle = bug == 9 ? Swizzle::none : Swizzle::bytes128});
  auto& s = dynamic_smem<Shared>();
  const int t = thread_index();
  const uint32_t base = shared_address(s.words.data());
  for (int i = t; i < 4096; i += 128) s.words[size_t(i)] = 0x3f803f80;  // @tw-write
  if (bug != 1) fence_proxy_async();
  if (bug != 2) syncthreads();
  const uint64_t operand = wgmma_descriptor({Swizzle::bytes128, 16, 1024});
  float d[32];
  wgmma_fence();
  wgmma_ss(d, at_address(operand, base), at_address(operand, base + 8192), false);  // @tw-mma
  wgmma_commit();
  wgmma_wait<0>(d);
  syncthreads();
  for (int i = 0; i < 8; ++i) s.words[size_t(i * 128 + t)] = bit_cast<uint32_t>(d[i]);  // @tw-result
  if (bug != 4) fence_proxy_async();
  if (bug != 5) syncthreads();
  if (t == 0) {
    tma_store(out, {0, 0}, base + (bug == 6 ? 64 : 0));  // @tw-store
    if (bug != 7) bulk_commit();
    if (bug != 8) bulk_wait_read<0>();
  }
  syncthreads();
  s.words[size_t(t)] = 0;  // @tw-reuse
}

TEST(Planted, ProxiesAndBulkStores) {
  plant(shape(128), thread_written,
        {
            {1, Kind::proxy, "no fence.proxy.async after the write by CTA 0 thread", "tw-mma"},
            {4, Kind::proxy, "no fence.proxy.async after the write", "tw-store"},
            {5, Kind::race, "not ordered after the write", "tw-store"},
            {6, Kind::bounds, "must be 128-byte aligned", "tw-store"},
            {7, Kind::race, "no cp.async.bulk.wait_group", "tw-reuse"},
            {8, Kind::race, "no cp.async.bulk.wait_group", "tw-reuse"},
        });
  for (uint64_t seed = 0; seed < 6; ++seed)
    EXPECT_FALSE(emu::launch(shape(128), test::options_for(seed), [] { thread_written(2); }).clean());
}

// What PTX does not say and the hardware refuses: see certify/refused.cu.
void coordinates_and_vectors(int bug) {
  const TensorMap map = make_tensor_map({.address = global.data() + 8192,
                                         .element = TensorElement::f32,
                                         .rank = 2,
                                         .extent = {64, 32},
                                         .stride_bytes = {256},
                                         .box = {32, 16}});
  auto& s = dynamic_smem<Shared>();
  const int t = thread_index();
  const uint32_t base = shared_address(s.words.data());
  if (t == 0) {
    mbarrier_init(s.done, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(s.done, 2048);
    tma_load(base, map, {bug == 1 ? 6 : -4, -1}, s.done);  // @cv-load
  }
  syncthreads();
  mbarrier_wait(s.done, 0);
  if (t == 0) {
    tma_store(map, {40, bug == 2 ? -1 : 20}, base);                    // @cv-store
    tma_reduce_add(map, {bug == 3 ? -4 : bug == 4 ? 2 : 4, 0}, base);  // @cv-reduce
    bulk_commit();
    bulk_wait<0>();
  }
  const uint32_t* mine = global.data() + 4 * t;
  store_streaming(global.data() + 1024 + 4 * t, load_streaming(mine + (bug == 5 ? 2 : 0)));             // @cv-vector
  red_add_v4(reinterpret_cast<float*>(global.data()) + 2048 + 4 * t + (bug == 6 ? 1 : 0), 1, 2, 3, 4);  // @cv-sum
}

TEST(Planted, CoordinatesAndVectors) {
  plant(shape(32), coordinates_and_vectors,
        {
            {1, Kind::bounds, "must start at a multiple of 16 bytes", "cv-load"},
            {2, Kind::bounds, "not before its beginning", "cv-store"},
            {3, Kind::bounds, "not before its beginning", "cv-reduce"},
            {4, Kind::bounds, "must start at a multiple of 16 bytes", "cv-reduce"},
            {5, Kind::bounds, "must be 16-byte aligned", "cv-vector"},
            {6, Kind::bounds, "must be 16-byte aligned", "cv-sum"},
        });
}

// ---- clusters -------------------------------------------------------------------------------------------------------

void cluster_exchange(int bug) {
  auto& s = dynamic_smem<Shared>();
  const int t = thread_index();
  const uint32_t rank = cluster_rank(), peer = rank ^ 1, base = shared_address(s.words.data());
  if (t == 0) {
    mbarrier_init(s.full[0], 32);
    mbarrier_init(s.full[1], 1);
    fence_mbarrier_init();
  }
  if (bug != 2) cluster_sync();
  // Stores to the peer, and arrivals there.
  store_cluster(map_to_rank(base + uint32_t(t) * 4, peer), uint32_t(t));  // @cl-store
  if (bug != 3) mbarrier_arrive_cluster(map_to_rank(shared_address(&s.full[0]), peer));
  if (bug == 4)
    mbarrier_wait(s.full[0], 0);
  else if (bug != 5)
    mbarrier_wait_cluster(s.full[0], 0);          // @cl-wait
  volatile uint32_t v = s.words[size_t(31 - t)];  // @cl-read
  (void)v;
  // A bulk copy to the peer, of what this CTA has got.
  if (bug != 6) fence_proxy_async();
  syncwarp();
  if (t == 0) mbarrier_arrive_expect_tx(s.full[1], bug == 7 ? 256 : 128);
  for (int i = t; i < 32; i += 32) s.words[size_t(1024 + i)] = 7;  // @cl-fill
  if (bug != 8) fence_proxy_async();
  if (bug != 9) cluster_sync();
  const uint32_t target = map_to_rank(base + 8192, peer), bytes = bug == 10 ? 120 : 128;
  const uint32_t signal = map_to_rank(shared_address(&s.full[1]), bug == 11 ? rank : peer);
  if (t == 0) bulk_copy_to_cta(target, base + 4096, bytes, signal);  // @cl-copy
  mbarrier_wait(s.full[1], 0);                                       // @cl-second
  if (bug == 12 && rank == 1) return;
  char* const remote = reinterpret_cast<char*>(&s.full[1]) + (rank ? -(1 << 24) : 1 << 24);
  if (bug == 13) mbarrier_wait(*reinterpret_cast<mbarrier*>(remote), 0);  // @cl-remote-wait
  if (bug == 14) store_cluster(map_to_rank(base, 5), 1);                  // @cl-rank5
  if (bug == 15) cluster_wait();                                          // @cl-no-arrive
  if (bug == 16) {
    cluster_arrive();
    cluster_arrive();  // @cl-two-arrivals
  }
  cluster_sync();
}

TEST(Planted, Clusters) {
  plant(shape(32, 2), cluster_exchange,
        {
            {3, Kind::deadlock, "32 of 32 arrivals missing", "cl-wait"},
            {4, Kind::race, "not ordered after the write by CTA", "cl-read"},  // acquires at CTA scope only
            {7, Kind::deadlock, "128 bytes outstanding", "cl-second"},
            {8, Kind::proxy, "no fence.proxy.async after the write", "cl-copy"},
            {9, Kind::race, "", "cl-copy"},
            {10, Kind::bounds, "must be a multiple of 16", "cl-copy"},
            {11, Kind::barrier, "the destination is in CTA", "cl-copy"},
            {13, Kind::barrier, "on another CTA's mbarrier", "cl-remote-wait"},
            {14, Kind::bounds, "", "cl-rank5"},
            {15, Kind::barrier, "without barrier.cluster.arrive", "cl-no-arrive"},
            {16, Kind::barrier, "a second arrive", "cl-two-arrivals"},
        });
  for (int bug : {2, 5})
    for (uint64_t seed = 0; seed < 6; ++seed)
      EXPECT_FALSE(emu::launch(shape(32, 2), test::options_for(seed), [&] { cluster_exchange(bug); }).clean()) << bug;
}

// ---- tensor memory --------------------------------------------------------------------------------------------------

void tensor_tile(int bug) {
  const TensorMap map = operand_map(), rows = operand_map(1);
  auto& s = dynamic_smem<Shared>();
  const int t = thread_index(), warp = t / 32;
  const uint32_t base = shared_address(s.words.data());
  if (t == 0) {
    mbarrier_init(s.full[0], 1);
    mbarrier_init(s.done, 1);
    fence_mbarrier_init();
  }
  if (warp == 1) {
    if (bug == 1) tmem_relinquish<1>();
    tmem_allocate<1>(s.tmem, bug == 2 ? 96 : 64);  // @tm-alloc
  }
  syncthreads();
  const uint32_t tmem = bug == 3 ? s.tmem + 64 : s.tmem;
  if (t == 0) {
    mbarrier_arrive_expect_tx(s.full[0], 2 * 8192);
    const uint32_t full = shared_address(&s.full[0]);
    if (bug == 4) tma_gather4<1>(base, map, 0, {0, 1, 2, 3}, full);  // @tm-gather
    for (int r = 0; r < 64; r += 4) tma_gather4<1>(base + uint32_t(r) * 128, rows, 0, {r, r + 1, r + 2, r + 3}, full);
    tma_load(base + 8192, map, {64, 0}, s.full[0]);
  }
  if (t == 64) {
    if (bug != 5) mbarrier_wait(s.full[0], 0);
    const uint64_t operand = tcgen05_descriptor({Swizzle::bytes128, 16, 1024}) ^ (bug == 6 ? uint64_t{1} << 46 : 0);
    const uint32_t instruction =
        instruction_descriptor({.m = bug == 7 ? 96 : 64, .n = bug == 8 ? 36 * 8 : 64}) | (bug == 9    ? 1u << 2
                                                                                          : bug == 10 ? 1u << 23
                                                                                                      : 0);
    const uint32_t advance = bug == 11 ? 256 : 0;  // into the middle of the swizzle pattern
    const uint64_t a = at_address(operand, base + advance), b = at_address(operand, base + 8192);
    tcgen05_mma_f16<1>(tmem + (bug == 12 ? 5u << 16 : 0), a, b, instruction, bug == 13);  // @tm-mma
    if (bug != 14) tcgen05_commit<1>(s.done);
    if (bug == 15) tcgen05_commit<1>(s.done);  // @tm-commit-twice
  }
  if (bug == 16 && t == 65) tcgen05_commit<1>(s.done);  // @tm-commit-other
  if (bug != 17) mbarrier_wait(s.done, 0);              // @tm-wait
  if (bug != 18) tcgen05_fence_after_thread_sync();
  uint32_t r[32];
  const int lane = bug == 19 ? 32 * (warp ^ 1) : 32 * warp;
  tmem_load<TmemShape::b16x256>(r, tmem_address(tmem, lane, bug == 20 ? 24 : 0));  // @tm-load
  if (bug != 21) tmem_wait_load(r);
  if (bug == 22) tmem_store<TmemShape::b32x32>(tmem_address(tmem, lane, 0), r);  // @tm-store
  if (bug == 22) tmem_load<TmemShape::b32x32>(r, tmem_address(tmem, lane, 0));   // @tm-reload
  if (bug == 22) tmem_wait_load(r);
  if (bug != 23) tcgen05_fence_before_thread_sync();
  if (bug != 24) syncthreads();
  if (bug == 25) return;
  if (warp == 1) tmem_deallocate<1>(bug == 26 ? tmem + 32 : tmem, bug == 27 ? 32 : 64);  // @tm-dealloc
  if (bug == 28 && t == 64) tcgen05_shift<1>(tmem);                                      // @tm-shift
}

TEST(Planted, TensorMemory) {
  plant(shape(128), tensor_tile,
        {
            {1, Kind::tensor_memory, "after tcgen05.relinquish_alloc_permit", "tm-alloc"},
            {2, Kind::tensor_memory, "must be a power of two", "tm-alloc"},
            {3, Kind::tensor_memory, "which is not allocated", "tm-mma"},
            {4, Kind::descriptor, "gather4 needs a box of one row", "tm-gather"},
            {5, Kind::race, "not ordered after", "tm-mma"},
            {6, Kind::descriptor, "bits 46-48 must be 0b001", "tm-mma"},
            {7, Kind::descriptor, "M = 96 is not possible", "tm-mma"},
            {8, Kind::descriptor, "N = 288 is not possible", "tm-mma"},
            {9, Kind::unsupported, "sparse products are not modelled", "tm-mma"},
            {10, Kind::descriptor, "reserved bits", "tm-mma"},
            {11, Kind::unsupported, "a start inside of the swizzle pattern", "tm-mma"},
            {12, Kind::tensor_memory, "the address of D names lane 5", "tm-mma"},
            {13, Kind::uninitialized, "nothing has been written", "tm-mma"},
            {14, Kind::deadlock, "1 of 1 arrivals missing", "tm-wait"},
            {16, Kind::barrier, "has issued no tensor-core operation", "tm-commit-other"},
            {18, Kind::race, "tcgen05.fence::after_thread_sync is missing", "tm-load"},
            {19, Kind::tensor_memory, "reaches lanes", "tm-load"},
            {20, Kind::tensor_memory, "which is not allocated", "tm-load"},
            {22, Kind::race, "no tcgen05.wait::st", "tm-reload"},
            {23, Kind::race, "no tcgen05.wait::ld and tcgen05.fence::before_thread_sync", "tm-dealloc"},
            {27, Kind::tensor_memory, "tensor memory allocated: no tcgen05.dealloc", "tm-alloc"},
            {28, Kind::unsupported, "tcgen05.shift", "tm-shift"},
        });
  for (int bug : {17, 21, 24, 25, 26})
    for (uint64_t seed = 0; seed < 6; ++seed)
      EXPECT_FALSE(emu::launch(shape(128), test::options_for(seed), [&] { tensor_tile(bug); }).clean()) << bug;
}

TEST(Planted, SixtyOrMore) {
  std::printf("%d bugs planted and found\n", planted_in_all);
  EXPECT_GE(planted_in_all, 60);
}

}  // namespace
}  // namespace hopwell::arch

int main(int argc, char** argv) {
  std::mt19937 random(1);  // operands: bf16 around one
  for (uint32_t& w : hopwell::arch::global) w = uint32_t((0x3f00 + random() % 128) << 16 | (0xbf00 + random() % 128));
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
