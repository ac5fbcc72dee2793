// Planted bugs in instructions that only Blackwell has.
#include "planted_bugs.hpp"

#include <numeric>

#include "arch/sm100/tcgen05.hpp"
#include "arch/sm100/tma.hpp"
#include "arch/sm80/async_copy.hpp"
#include "arch/sm90/tma.hpp"

namespace hopwell::arch {
namespace {

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
            {27, Kind::tensor_memory, "tensor memory allocated: tcgen05.dealloc is missing", "tm-alloc"},
            {28, Kind::unsupported, "tcgen05.shift", "tm-shift"},
        });
  for (int bug : {17, 21, 24, 25, 26})
    for (uint64_t seed = 0; seed < 6; ++seed)
      EXPECT_FALSE(emu::launch(shape(128), test::options_for(seed), [&] { tensor_tile(bug); }).clean()) << bug;
}

// Registers of a load without a wait: on the stack of the emulator's process.
HOPWELL_NO_INLINE uint32_t loaded_word(uint32_t address, bool wait) {
  uint32_t r[32];
  tmem_load<TmemShape::b32x32>(r, address);  // @fr-load
  if (wait) tmem_wait_load(r);
  return r[5];
}
HOPWELL_NO_INLINE uint32_t use_the_stack(int t) {
  volatile uint32_t other[64];
  for (uint32_t i = 0; i < 64; ++i) other[i] = i;
  tmem_wait_load();
  uint32_t wrong = 0;
  for (uint32_t i = 0; i < 64; ++i) wrong += other[i] != i;
  return wrong + uint32_t(t);
}

void unwaited_loads(int bug) {
  auto& s = dynamic_smem<Shared>();
  const int t = thread_index(), warp = t / 32;
  if (warp == 0) tmem_allocate<1>(s.tmem, 32);
  syncthreads();
  const uint32_t mine = tmem_address(s.tmem, 32 * warp, 0);
  uint32_t r[32];
  for (uint32_t i = 0; i < 32; ++i) r[i] = i;
  tmem_store<TmemShape::b32x32>(mine, r);
  tmem_wait_store();
  volatile uint32_t word = 0;
  for (int i = 0; i < (bug == 3 ? 2 : 1); ++i) word = word + loaded_word(mine, bug == 0 || bug > 3);
  if (bug == 1) tmem_wait_load();
  if (bug != 3) {
    EXPECT_EQ(use_the_stack(t), uint32_t(t));  // values for a dead frame must not be written
  }
  if (bug == 4) tmem_load<TmemShape::b32x32>(r, mine);  // @fr-last
  if (bug == 5) {
    tmem_load<TmemShape::b32x32>(r, mine);  // @fr-written
    r[7] = 1;
    tmem_wait_load(r);
  }
  tcgen05_fence_before_thread_sync();
  syncthreads();
  if (warp == 0) tmem_deallocate<1>(s.tmem, 32);
}

TEST(Planted, LoadsWithoutTheirWait) {
  plant(shape(128), unwaited_loads,
        {
            {1, Kind::pending, "no tcgen05.wait::ld after it", "fr-load"},  // the function returned
            {2, Kind::pending, "no tcgen05.wait::ld after it", "fr-load"},  // another function uses its stack
            {3, Kind::pending, "no tcgen05.wait::ld after it", "fr-load"},  // loaded again
            {4, Kind::pending, "exits with a tcgen05.ld", "fr-last"},
            {5, Kind::pending, "used for something else", "fr-written"},
        });
}

// Products that reuse operands in collector buffers.
void collectors(int bug) {
  auto& s = dynamic_smem<Shared>();
  const int t = thread_index();
  const uint32_t base = shared_address(s.words.data());
  for (int i = t; i < 8192; i += 64) s.words[size_t(i)] = 0x3f803f80;
  if (t == 0) {
    mbarrier_init(s.done, 1);
    fence_mbarrier_init();
  }
  fence_proxy_async();
  if (t < 32) tmem_allocate<1>(s.tmem, 256);
  syncthreads();
  if (t == 0) {
    using enum CollectorUsage;
    constexpr uint64_t kOperand = tcgen05_descriptor({Swizzle::bytes128, 16, 1024});
    constexpr uint32_t kInstruction = instruction_descriptor({.m = 64, .n = 64}),
                       kWider = instruction_descriptor({.m = 64, .n = 128});
    const uint64_t a = at_address(kOperand, base), b = at_address(kOperand, base + 16384),
                   other = at_address(kOperand, base + 8192);
    const uint32_t d = s.tmem;
    if (bug == 1)
      tcgen05_mma_f16<1>(d, a, b, kInstruction, false);
    else
      tcgen05_mma_f16<1, fill>(d, a, b, kInstruction, false);                 // @co-fill
    if (bug == 2) tcgen05_mma_f16<1>(d, other, b, kInstruction, true);        // @co-unnamed
    if (bug == 3) tcgen05_mma_f16<1, lastuse>(d, a, b, kInstruction, true);   // @co-last
    if (bug == 4) tcgen05_mma_ws_f16(d + 64, a, b, kInstruction, false);      // @co-family
    if (bug == 5) tcgen05_mma_f16<1, fill>(d, other, b, kInstruction, true);  // @co-refill
    if (bug == 6) tcgen05_mma_f16<1, discard>(d, a, b, kInstruction, true);   // @co-discard
    tcgen05_commit<1>(s.done);
    mbarrier_wait(s.done, 0);
    if (bug == 7) {
      s.words[5] = 0;
      fence_proxy_async();
    }
    const uint32_t instruction = bug == 8 ? kWider : kInstruction;
    const uint64_t last = bug == 9 ? other : a, left = bug == 12 ? other : a, right = bug == 13 ? other : b;
    tcgen05_mma_f16<1, use>(d, a, b, instruction, bug != 8);          // @co-use
    tcgen05_mma_f16<1, lastuse>(d, last, b, kInstruction, true);      // @co-other
    tcgen05_mma_ws_f16<fill, 1>(d + 128, a, b, kInstruction, false);  // @co-ws-fill
    tcgen05_mma_ws_f16(d + 192, a, b, kInstruction, false);           // discards b0, which is another buffer
    if (bug == 10) tcgen05_mma_ws_f16<discard, 1>(d + 192, a, b, kInstruction, true);  // @co-ws-discard
    if (bug == 11)
      tcgen05_mma_ws_f16<use, 2>(d + 128, a, b, kInstruction, true);  // @co-ws-two
    else
      tcgen05_mma_ws_f16<use, 1>(d + 128, left, right, kInstruction, true);  // @co-ws-use
    tcgen05_commit<1>(s.done);
    mbarrier_wait(s.done, 1);
  }
  syncthreads();
  if (t < 32) tmem_deallocate<1>(s.tmem, 256);
}

TEST(Planted, Collectors) {
  plant(shape(64), collectors,
        {
            {1, Kind::uninitialized, "collector buffer a, which no product has filled", "co-use"},
            {2, Kind::uninitialized, "given up or replaced by", "co-unnamed"},
            {3, Kind::uninitialized, "given up or replaced by", "co-last"},
            {4, Kind::uninitialized, "given up or replaced by", "co-family"},
            {5, Kind::descriptor, "which holds another operand", "co-refill"},
            {6, Kind::uninitialized, "given up or replaced by", "co-discard"},
            {7, Kind::race, "its operand in memory has changed since the fill", "co-use"},
            {9, Kind::descriptor, "which holds another operand", "co-other"},
            {10, Kind::uninitialized, "given up or replaced by", "co-ws-discard"},
            {11, Kind::uninitialized, "collector buffer b2, which no product has filled", "co-ws-two"},
            {13, Kind::descriptor, "B of collector buffer b1, which holds another operand", "co-ws-fill"},
        });
  for (int bug : {8, 12}) test::expect_clean(shape(64), [&] { collectors(bug); }, 6);  // the other operand may change
}

// A in tensor memory, in both halves of the lanes: for M 128 of a pair, and two products at once with .ws.
template <int kCtaGroup>
void a_in_both_halves(int bug) {
  auto& s = dynamic_smem<Shared>();
  const int t = thread_index(), warp = t / 32;
  const uint32_t base = shared_address(s.words.data());
  for (int i = t; i < 8192; i += 128) s.words[size_t(i)] = 0x3f803f80 + uint32_t(i / 32 % 64);
  if (t == 0) {
    mbarrier_init(s.done, 1);
    fence_mbarrier_init();
  }
  fence_proxy_async();
  if (warp == 0) tmem_allocate<kCtaGroup>(s.tmem, 128);
  const auto meet = [] {
    if (kCtaGroup == 2)
      cluster_sync();
    else
      syncthreads();
  };
  meet();
  const bool copied = bug == 5 || bug == 6;
  uint32_t r[8];
  for (uint32_t k = 0; k < 8; ++k) r[k] = 0x3f803f80 + uint32_t(t % 64) + (bug == 2 && t == 70 && k == 3 ? 1 : 0);
  if (!copied && !(bug == 1 && warp >= 2)) {
    tmem_store<TmemShape::b32x32>(tmem_address(s.tmem, 32 * warp, 64), r);  // @bh-store
    if (bug != 3) tmem_wait_store();
  }
  tcgen05_fence_before_thread_sync();
  meet();
  tcgen05_fence_after_thread_sync();
  if (t == 0 && cluster_rank() == 0) {
    constexpr uint64_t kRows = tcgen05_descriptor({Swizzle::none, 4096, 128});
    const uint64_t rows = at_address(kRows, base);
    if (copied) tcgen05_copy<kCtaGroup, CopyShape::b64x128_02_13>(s.tmem + 64, rows);
    if (bug == 5) tcgen05_copy<kCtaGroup, CopyShape::b64x128_02_13>(s.tmem + 68, rows);
    const uint64_t b = at_address(tcgen05_descriptor({Swizzle::bytes128, 16, 1024}), base + 16384);
    const uint32_t a = bug == 7 ? tmem_address(s.tmem, 64, 64) : s.tmem + 64;
    if constexpr (kCtaGroup == 2)
      tcgen05_mma_f16_ts<2>(s.tmem, a, b, instruction_descriptor({.m = 128, .n = 64}), false);  // @bh-pair
    else
      tcgen05_mma_ws_f16_ts(s.tmem, a, b, instruction_descriptor({.m = 64, .n = 64}), false);  // @bh-ws
    if constexpr (kCtaGroup == 2)
      tcgen05_commit_multicast<2>(s.done, 3);
    else
      tcgen05_commit<1>(s.done);
  }
  mbarrier_wait(s.done, 0);
  tcgen05_fence_after_thread_sync();
  meet();
  if (warp == 0) tmem_deallocate<kCtaGroup>(s.tmem, 128);
}

TEST(Planted, AInBothHalvesOfTheLanes) {
  plant(shape(128, 2), a_in_both_halves<2>,
        {
            {1, Kind::uninitialized, "its operand A reads lanes 64-79", "bh-pair"},
            {2, Kind::tensor_memory, "differs between lane 6 and lane 70", "bh-pair"},
            {3, Kind::race, "no tcgen05.wait::st", "bh-pair"},
            {6, Kind::uninitialized, "its operand A reads lanes 0-15", "bh-pair"},
            {7, Kind::tensor_memory, "the address of A names lane 64", "bh-pair"},
        });
  test::expect_clean(shape(128, 2), [] { a_in_both_halves<2>(5); }, 6);
  plant(shape(128), a_in_both_halves<1>,
        {
            {1, Kind::uninitialized, "its operand A reads lanes 64-79", "bh-ws"},
            {3, Kind::race, "no tcgen05.wait::st", "bh-ws"},
            {6, Kind::uninitialized, "its operand A reads lanes 0-15", "bh-ws"},
            {7, Kind::tensor_memory, "the address of A names lane 64", "bh-ws"},
        });
  for (int bug : {2, 5})
    test::expect_clean(shape(128), [&] { a_in_both_halves<1>(bug); }, 6);  // each half may have its own
}

// Gathers four rows for both CTAs of a cluster, twice into the same buffer.
void gather_for_both(int bug) {
  const TensorMap rows = operand_map(1);
  auto& s = dynamic_smem<Shared>();
  const int t = thread_index();
  const uint32_t rank = cluster_rank(), base = shared_address(s.words.data());
  if (t == 0) {
    mbarrier_init(s.full[0], 1);
    if (bug != 1) fence_mbarrier_init();
  }
  if (bug != 2) cluster_sync();
  for (uint32_t step = 0; step < 2; ++step) {
    if (t == 0) mbarrier_arrive_expect_tx(s.full[0], bug == 3 ? 512 : 1024);  // @gb-expect
    if (t == 0) {
      const uint32_t to = base + (bug == 4 ? 0 : rank * 512);
      const uint16_t mask = bug == 6 ? 7 : bug == 7 ? uint16_t(1u << rank) : 3;
      const uint32_t full = shared_address(&s.full[0]);
      const int column = bug == 5 ? 4 : 0, named[4] = {0, 5, -1, 3};
      tma_gather4_multicast<1>(to, rows, column, named, full, mask, evict_first_policy());  // @gb-gather
    }
    mbarrier_wait(s.full[0], step);            // @gb-wait
    volatile uint32_t v = s.words[size_t(t)];  // @gb-read
    (void)v;
    if (bug != 8) cluster_sync();
  }
}

TEST(Planted, GatherForBothCtas) {
  plant(shape(32, 2), gather_for_both,
        {
            {1, Kind::proxy, "no fence.mbarrier_init", "gb-gather"},
            {4, Kind::race, "not ordered after", "gb-gather"},
            {5, Kind::bounds, "must start at a multiple of 16 bytes", "gb-gather"},
            {6, Kind::bounds, "CTA mask 0x7 in a cluster of 2", "gb-gather"},
            {7, Kind::deadlock, "512 bytes outstanding", "gb-wait"},
            {8, Kind::race, "not ordered after the", "gb-gather"},
        });
  for (int bug : {2, 3})
    for (uint64_t seed = 0; seed < 6; ++seed)
      EXPECT_FALSE(emu::launch(shape(32, 2), test::options_for(seed), [&] { gather_for_both(bug); }).clean()) << bug;
}

// Block-scaled products of a few columns.
void narrow_block_scaled(int bug) {
  auto& s = dynamic_smem<Shared>();
  const int t = thread_index();
  const uint32_t base = shared_address(s.words.data());
  for (int i = t; i < 8192; i += 128) s.words[size_t(i)] = 0x38383838;
  if (t == 0) {
    mbarrier_init(s.done, 1);
    fence_mbarrier_init();
  }
  fence_proxy_async();
  if (t < 32) tmem_allocate<1>(s.tmem, 64);
  syncthreads();
  if (t == 0) {
    const uint64_t scales = at_address(tcgen05_descriptor({Swizzle::none, 16, 128}), base + 24576),
                   a = at_address(tcgen05_descriptor({Swizzle::bytes128, 16, 1024}), base),
                   b = at_address(tcgen05_descriptor({Swizzle::bytes128, 16, 1024}), base + 16384);
    const uint32_t d = s.tmem, scale_a = s.tmem + 32, scale_b = s.tmem + 36;
    tcgen05_copy<1, CopyShape::b32x128_x4>(scale_a, scales);
    if (bug != 1) tcgen05_copy<1, CopyShape::b32x128_x4>(scale_b, scales);
    const uint32_t instruction = nvfp4_instruction_descriptor(128, bug == 3   ? 0
                                                                   : bug == 4 ? 264
                                                                              : 8) |
                                 (bug == 5   ? 1u << 4
                                  : bug == 6 ? 1u << 23
                                             : 0);
    const uint32_t named_b = bug == 7 ? scale_b + 24 : scale_b;
    tcgen05_mma_nvfp4<1>(d, a, b, instruction, scale_a, named_b, bug == 8);  // @nb-mma
    tcgen05_commit<1>(s.done);
  }
  mbarrier_wait(s.done, 0);
  tcgen05_fence_after_thread_sync();
  syncthreads();
  if (t < 32) tmem_deallocate<1>(s.tmem, 64);
}

// A block-scaled product of a pair: scales of A for each CTA's rows, of B in both CTAs.
void block_scaled_pair(int bug) {
  auto& s = dynamic_smem<Shared>();
  const int t = thread_index(), rank = int(cluster_rank());
  const uint32_t base = shared_address(s.words.data());
  for (int i = t; i < 8192; i += 128) s.words[size_t(i)] = 0x38383838;
  if (bug == 1 && rank == 1 && t == 0) s.words[24576 / 4] = 0x30303030;
  if (t == 0) {
    mbarrier_init(s.done, 1);
    fence_mbarrier_init();
  }
  fence_proxy_async();
  if (t < 32) tmem_allocate<2>(s.tmem, 128);
  if (bug == 2)
    syncthreads();
  else
    cluster_sync();
  if (t == 0 && rank == 0) {
    constexpr uint64_t kOperand = tcgen05_descriptor({Swizzle::bytes128, 16, 1024});
    const uint64_t scales = at_address(tcgen05_descriptor({Swizzle::none, 16, 128}), base + 24576),
                   a = at_address(kOperand, base), b = at_address(kOperand, base + 16384);
    const uint32_t d = s.tmem, scale_a = s.tmem + 64, scale_b = s.tmem + 68;
    tcgen05_copy<2, CopyShape::b32x128_x4>(scale_b, scales);  // @bp-scales
    if (bug != 3) tcgen05_copy<2, CopyShape::b32x128_x4>(scale_a, scales);
    const uint32_t instruction = nvfp4_instruction_descriptor(bug == 4 ? 128 : 256, bug == 5 ? 24 : 64);
    tcgen05_mma_nvfp4<2>(d, a, b, instruction, scale_a, scale_b, bug == 6);  // @bp-mma
    if (bug == 7)
      tcgen05_commit<2>(s.done);
    else
      tcgen05_commit_multicast<2>(s.done, 3);
  }
  mbarrier_wait(s.done, 0);  // @bp-wait
  tcgen05_fence_after_thread_sync();
  cluster_sync();
  if (t < 32) tmem_deallocate<2>(s.tmem, 128);
}

TEST(Planted, BlockScaledPair) {
  plant(shape(128, 2), block_scaled_pair,
        {
            {1, Kind::tensor_memory, "the scales of row 0 of B", "bp-mma"},
            {3, Kind::uninitialized, "the scales of A reads lanes 0-15", "bp-mma"},
            {4, Kind::unsupported, "modelled for M = 128 a CTA", "bp-mma"},
            {5, Kind::descriptor, "N = 24 is not possible", "bp-mma"},
            {6, Kind::uninitialized, "the accumulation into D", "bp-mma"},
            {7, Kind::deadlock, "mbarrier", "bp-wait"},
        });
  for (uint64_t seed = 0; seed < 6; ++seed)  // which of the peer's data is missed first depends on the schedule
    EXPECT_FALSE(emu::launch(shape(128, 2), test::options_for(seed), [] { block_scaled_pair(2); }).clean()) << seed;
}

TEST(Planted, NarrowBlockScaled) {
  plant(shape(128), narrow_block_scaled,
        {
            {1, Kind::uninitialized, "the scales of B reads lanes 0-15", "nb-mma"},
            {3, Kind::descriptor, "N = 0 is not possible", "nb-mma"},
            {4, Kind::descriptor, "N = 264 is not possible", "nb-mma"},
            {5, Kind::descriptor, "the scale-factor ids of scale_vec::4X must be 0", "nb-mma"},
            {6, Kind::unsupported, "ue8m0 scales", "nb-mma"},
            {7, Kind::uninitialized, "the scales of B reads lanes 0-15", "nb-mma"},
            {8, Kind::uninitialized, "the accumulation into D", "nb-mma"},
        });
}

}  // namespace
}  // namespace hopwell::arch
