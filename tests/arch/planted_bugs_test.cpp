// Planted bugs in instructions of Hopper and earlier GPUs.
#include "planted_bugs.hpp"

#include <cstdio>
#include <numeric>
#include <random>

#include "arch/sm80/async_copy.hpp"
#include "arch/sm80/matrix.hpp"
#include "arch/sm80/reduce.hpp"
#include "arch/sm90/tma.hpp"
#include "arch/sm90/wgmma.hpp"

namespace hopwell::arch {
namespace {

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
            {4, Kind::race, "cp.async of", "cp-read"},             // no barrier: copies of other threads
            {5, Kind::bounds, "src-size 20 exceeds cp-size 16", "cp-copy"},
            {6, Kind::race, "not ordered after the read by", "cp-copy"},  // overwrites data still being read
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

// Threads count together, read each other's counts, then count again.
void shared_counts(int bug) {
  auto& s = dynamic_smem<Shared>();
  const int t = thread_index();
  const uint32_t base = shared_address(s.words.data());
  const auto count = [&](int i) { red_add_shared(true, base + 4 * uint32_t(i), 1); };  // @count
  if (bug != 1) s.words[size_t(t)] = 0;                                                // @clear
  if (bug != 2) syncthreads();
  count(t % 8);
  if (bug == 3 && t == 77) s.words[3] = 1;  // @overwrite
  count((t + 64) % 128 / 16);
  if (bug != 4) syncthreads();
  volatile uint32_t v = s.words[size_t(t % 8)];  // @read-count
  (void)v;
  if (bug != 5) syncthreads();
  count(7 - t % 8);
  if (bug == 6) red_add_shared(true, base + 2, 1);      // @count-aligned
  red_add_shared(bug == 7, base + 4 * 8192 + 1024, 1);  // @count-beyond
}

TEST(Planted, SharedCounts) {
  plant(shape(128), shared_counts,
        {
            {1, Kind::uninitialized, "where nothing has been written", "count"},
            {2, Kind::race, "not ordered after the write by", "clear"},
            {3, Kind::race, "not ordered after the write by", "overwrite"},
            {4, Kind::race, "not ordered after the write by", "read-count"},
            {5, Kind::race, "not ordered after the read by", "count"},
            {6, Kind::bounds, "must be 4-byte aligned", "count-aligned"},
            {7, Kind::bounds, "outside of its", "count-beyond"},
        });
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

// Misaligned accesses of global memory. `words` is aligned to 16 bytes.
void misaligned_global(int bug) {
  auto* const words = &global[size_t(16 * thread_index())];
  const auto at = [&](int of, int bytes) { return reinterpret_cast<std::byte*>(words) + (bug == of ? bytes : 0); };
  const auto vector_at = [&](int of, int bytes) { return reinterpret_cast<Words4*>(at(of, bytes)); };
  Words4 v = load_vector<Words4>(at(1, 4));               // @mg-load
  store_vector(at(2, 8) + 16, v);                         // @mg-store
  store_vector(at(3, 4), Words2{{7, 8}});                 // @mg-store2
  v = load_relaxed_v4(vector_at(4, 8));                   // @mg-load-relaxed
  store_relaxed_v4(vector_at(5, 4), v);                   // @mg-store-relaxed
  *vector_at(6, 4) = *vector_at(0, 0);                    // @mg-copy
  *reinterpret_cast<uint32_t*>(at(7, 2)) = 1;             // @mg-word
  *reinterpret_cast<double*>(at(8, 4)) = 1;               // @mg-double
  *reinterpret_cast<uint16_t*>(at(9, 1)) = 1;             // @mg-half
  v = load_streaming(at(10, 2));                          // @mg-load-streaming
  store_streaming(at(11, 12), v);                         // @mg-store-streaming
  red_add_v2(reinterpret_cast<float*>(at(12, 4)), 1, 2);  // @mg-red
  const uint32_t destination = shared_address(&dynamic_smem<Shared>().words[size_t(4 * thread_index())]);
  cp_async(destination, at(13, 8), 0);  // @mg-nothing
  cp_async_wait_all();
}

TEST(Planted, AlignmentOfGlobalMemory) {
  plant(shape(32), misaligned_global,
        {
            {1, Kind::bounds, "must be 16-byte aligned", "mg-load"},
            {2, Kind::bounds, "must be 16-byte aligned", "mg-store"},
            {3, Kind::bounds, "must be 8-byte aligned", "mg-store2"},
            {4, Kind::bounds, "must be 16-byte aligned", "mg-load-relaxed"},
            {5, Kind::bounds, "must be 16-byte aligned", "mg-store-relaxed"},
            {6, Kind::bounds, "must be 8-byte aligned", "mg-copy"},
            {7, Kind::bounds, "must be 4-byte aligned", "mg-word"},
            {8, Kind::bounds, "must be 8-byte aligned", "mg-double"},
            {9, Kind::bounds, "must be 2-byte aligned", "mg-half"},
            {10, Kind::bounds, "must be 16-byte aligned", "mg-load-streaming"},
            {11, Kind::bounds, "must be 16-byte aligned", "mg-store-streaming"},
            {12, Kind::bounds, "must be 8-byte aligned", "mg-red"},
            {13, Kind::bounds, "must be 16-byte aligned", "mg-nothing"},
        });
}

// ---- TMA, mbarriers, wgmma ------------------------------------------------------------------------------------------

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
  if (bug == 10) operand |= uint64_t{1} << 46;  // version bit of another generation
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
  for (int bug : {3, 4, 16})  // the kind of the finding depends on which thread comes first
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

// Rules that PTX does not state but the hardware enforces: see certify/refused.cu.
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
  // A bulk copy to the peer of the data that this CTA has received.
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

// Threads that fall two or four phases behind and wait for a parity that has come around again.
void phases_behind(int bug) {
  auto& s = dynamic_smem<Shared>();
  const int t = thread_index();
  if (t == 0) {
    mbarrier_init(s.done, 1);
    fence_mbarrier_init();
  }
  syncthreads();
  for (uint32_t phase = 0; phase < 4; ++phase) {
    if (t == 0) mbarrier_arrive(s.done);
    mbarrier_wait(s.done, phase & 1);  // @pb-wait
    if (bug == 0 || (bug == 2 && phase < 2)) syncthreads();
  }
}

TEST(Planted, LappedThreads) {
  plant(shape(64), phases_behind,
        {
            {1, Kind::deadlock, "lapped: it has not seen the end of phase 0, and phases up to 3 are over", "pb-wait"},
            {2, Kind::deadlock, "lapped: it has not seen the end of phase 2, and phases up to 3 are over", "pb-wait"},
        });
}

}  // namespace
}  // namespace hopwell::arch

// Also fails if the total number of planted bugs over all tests is too small.
int main(int argc, char** argv) {
  using hopwell::arch::planted_in_all;
  std::mt19937 random(1);  // operands: bf16 around one
  for (uint32_t& w : hopwell::arch::global) w = uint32_t((0x3f00 + random() % 128) << 16 | (0xbf00 + random() % 128));
  testing::InitGoogleTest(&argc, argv);
  const bool all = testing::GTEST_FLAG(filter) == "*";
  const int failed = RUN_ALL_TESTS();
  std::printf("%d bugs planted and found\n", planted_in_all);
  return failed != 0 || (all && planted_in_all < 110) ? 1 : 0;
}
