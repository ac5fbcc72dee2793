// The time model: cycles of products compared with measurements, and the demand of small kernels counted by hand.
#include "arch/emu/work.hpp"

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "arch/sm100/tcgen05.hpp"
#include "arch/sm100/tma.hpp"
#include "arch/sm80/async_copy.hpp"
#include "arch/sm90/make_tensor_map.hpp"
#include "harness.hpp"

namespace hopwell::arch {
namespace {

using emu::kB200;
using emu::WorkCount;

// N 64, 80, 96, 112, 128, 256, measured by others (0: not measured). The pair has three cycles that the bytes do not
// explain.
TEST(ProductCycles, AreThoseThatWereMeasured) {
  constexpr std::array kN = {64, 80, 96, 112, 128, 256};
  const struct {
    int m, cta_group;
    bool ws, a_in_tmem;
    std::array<double, 6> cycles;
    double tolerance;
  } forms[] = {
      {128, 1, false, false, {48, 52, 56, 60, 64, 128}, 0}, {128, 1, false, true, {32, 40, 48, 56, 64, 128}, 0},
      {64, 1, false, false, {32, 40, 48, 56, 64, 128}, 4},  {64, 1, false, true, {32, 40, 48, 56, 64, 128}, 0},
      {256, 2, false, false, {43, 45, 49, 56, 64, 128}, 3}, {256, 2, false, true, {32, 40, 48, 56, 64, 128}, 0},
      {128, 2, false, false, {25, 27, 29, 30, 32, 64}, 1},  {128, 2, false, true, {18, 20, 24, 28, 32, 64}, 2},
      {64, 1, true, false, {32, 0, 0, 0, 50, 80}, 2},       {64, 1, true, true, {28, 0, 0, 0, 44, 76}, 0},
  };
  for (const auto& f : forms)
    for (size_t i = 0; i < kN.size(); ++i) {
      if (f.cycles[i] == 0) continue;
      EXPECT_NEAR(emu::product_cycles(kB200, {f.m, kN[i], f.cta_group, f.ws, f.a_in_tmem}), f.cycles[i], f.tolerance)
          << "M " << f.m << " N " << kN[i] << " group " << f.cta_group << (f.ws ? " ws" : "")
          << (f.a_in_tmem ? " ts" : "");
    }
}

// .ws with N 64, 128, 256: one collector buffer for each B, two alternating (0: not measured), and B already in its
// buffer; measured by others (docs/performance/blackwell.md).
TEST(ProductCycles, OfWeightStationaryProductsAreThoseThatWereMeasured) {
  constexpr std::array kN = {64, 128, 256};
  const struct {
    int m;
    bool a_in_tmem;
    std::array<double, 3> one, alternating, collected;
  } forms[] = {
      {32, false, {28.2, 44.2, 76.2}, {}, {15.3, 18.3, 32.3}},
      {32, true, {28.2, 44.2, 76.2}, {}, {9.2, 16.2, 32.2}},
      {64, false, {32.2, 48.3, 80.3}, {}, {23.3, 32.3, 64.3}},
      {64, true, {28.2, 44.2, 76.2}, {16.5, 32.5, 64.5}, {16.2, 32.2, 64.2}},
      {128, false, {48.3, 74.3, 138.3}, {}, {39.3, 64.3, 128.3}},
      {128, true, {42.2, 74.2, 138.2}, {}, {32.2, 64.2, 128.2}},
  };
  for (const auto& f : forms)
    for (size_t i = 0; i < kN.size(); ++i) {
      const emu::ProductForm once{f.m, kN[i], 1, true, f.a_in_tmem, false, false};
      emu::ProductForm turns = once, collected = once;
      turns.alternates = true, collected.collected = true;
      EXPECT_NEAR(emu::product_cycles(kB200, once), f.one[i], 0.5) << f.m << " " << kN[i];
      EXPECT_NEAR(emu::product_cycles(kB200, collected), f.collected[i], 2.4) << f.m << " " << kN[i];
      if (f.alternating[i] > 0)
        EXPECT_NEAR(emu::product_cycles(kB200, turns), f.alternating[i], 0.6) << f.m << " " << kN[i];
    }
}

struct Shared {
  alignas(1024) std::array<uint32_t, 8192> words;
  mbarrier full, done;
  uint32_t tmem;
};

// Two CTAs, each: 128 threads copy 16 bytes each, four rows are gathered, two products, 8 columns read, one addition
// per thread.
void everything(const TensorMap& map, const uint32_t* from, float* to) {
  auto& s = dynamic_smem<Shared>();
  const int t = thread_index(), warp = t / 32;
  const uint32_t base = shared_address(s.words.data());
  if (t == 0) {
    mbarrier_init(s.full, 1);
    mbarrier_init(s.done, 1);
    fence_mbarrier_init();
  }
  if (warp == 0) tmem_allocate<1>(s.tmem, 64);
  cp_async(base + uint32_t(t) * 16, from + 4 * t);
  cp_async_commit();
  cp_async_wait_all();
  fence_proxy_async();
  syncthreads();
  for (uint32_t i = uint32_t(t) * 4 + 512; i < 8192; i += 512) store_shared_v4(base + i * 4, {{1, 1, 1, 1}});
  fence_proxy_async();
  syncthreads();
  if (t == 32) {
    mbarrier_arrive_expect_tx(s.full, 512);
    tma_gather4<1>(base + 16384, map, 0, {3, 1, 1, 0}, shared_address(&s.full));
    mbarrier_wait(s.full, 0);
    const uint64_t a = at_address(tcgen05_descriptor({Swizzle::bytes128, 16, 1024}), base);
    constexpr uint32_t kInstruction = instruction_descriptor({.m = 128, .n = 64});
    tcgen05_mma_f16<1, CollectorUsage::fill>(s.tmem, a, a, kInstruction, false);
    tcgen05_mma_f16<1, CollectorUsage::lastuse>(s.tmem, a, a, kInstruction, true);
    tcgen05_commit<1>(s.done);
  }
  mbarrier_wait(s.done, 0);
  tcgen05_fence_after_thread_sync();
  uint32_t r[8];
  tmem_load<TmemShape::b32x32>(r, tmem_address(s.tmem, 32 * warp, 0));
  tmem_wait_load(r);
  red_add_v4(to + 4 * t, bit_cast<float>(r[0]), 0, 0, 0);
  tcgen05_fence_before_thread_sync();
  syncthreads();
  if (warp == 0) tmem_deallocate<1>(s.tmem, 64);
}

TEST(WorkCount, CountsWhatAKernelAsksFor) {
  alignas(128) static std::array<uint32_t, 8192> global;
  std::vector<float> sums(512);
  const TensorMap map = make_tensor_map({.address = global.data(),
                                         .element = TensorElement::bf16,
                                         .rank = 2,
                                         .extent = {64, 128},
                                         .stride_bytes = {128},
                                         .box = {64, 1},
                                         .swizzle = Swizzle::bytes128});
  WorkCount count(kB200);
  test::expect_clean(
      {{2, 1, 1}, {128, 1, 1}, {1, 1, 1}, sizeof(Shared)}, [&] { everything(map, global.data() + 4096, sums.data()); },
      1);
  ASSERT_EQ(count.ctas, 2U * test::schedules(1));
  const emu::Work all = count.total();
  const uint64_t n = count.ctas;
  EXPECT_EQ(all.products, 2 * n);
  EXPECT_EQ(all.operand_bytes, n * (128 + 2 * 64) * 32);  // A once, because the second product finds it
  EXPECT_EQ(all.collected_bytes, n * 128 * 32);
  EXPECT_DOUBLE_EQ(all.tensor_cycles, double(n * (48 + 32)));
  EXPECT_DOUBLE_EQ(all.full_rate_cycles, double(2 * n * 32));
  EXPECT_DOUBLE_EQ(all.flops, double(2 * n) * 2 * 128 * 64 * 16);
  EXPECT_EQ(all.copied_bytes, n * (2048 + 512));
  EXPECT_EQ(all.gathers, n);
  EXPECT_EQ(all.tmem_loaded, n * 128 * 8 * 4);
  EXPECT_EQ(all.added_bytes, n * 128 * 16);
  EXPECT_GE(all.shared_bytes, n * 30720);
  EXPECT_LE(all.shared_bytes, n * 30720 + n * 4096);  // and the address of tensor memory, which all threads read
  // From HBM: 2,048 bytes copied, three rows of 128 gathered, 2,048 bytes of sums written.
  EXPECT_GE(count.memory_bytes(), 2048U + 3 * 128 + 2048);
  EXPECT_LE(count.memory_bytes(), 2048U + 3 * 128 + 2048 + 512);  // and parameters and constants
  EXPECT_EQ(count.of(0, 1).products, 2 * n);                      // the issuing warp
  EXPECT_EQ(count.of(0, 2).products, 0U);
  EXPECT_GT(count.of(0, 2).slots, 0U);
  const std::string products = "\"products\": " + std::to_string(all.products) + ",";
  EXPECT_NE(count.json().find(products), std::string::npos) << count.json();
}

TEST(Demands, AreBytesOverRates) {
  emu::Work work;
  work.copied_bytes = 12800;
  work.added_bytes = 2560;
  const auto cycles = [&](const emu::Rates& rates, const char* unit) {
    for (const emu::Demand& demand : emu::demands(work, rates))
      if (demand.unit == std::string_view(unit)) return demand.cycles;
    return 0.0;
  };
  EXPECT_DOUBLE_EQ(cycles(kB200, "shared memory"), 100);
  EXPECT_DOUBLE_EQ(cycles(emu::kH200, "shared memory"), 140);  // added bytes pass through its banks twice
  EXPECT_DOUBLE_EQ(cycles(kB200, "additions"), 2560 / 22.0);
  EXPECT_DOUBLE_EQ(cycles(kB200, "gather"), 256);
}

TEST(WorkCount, CountsNothingOnceItIsGone) {
  {
    const WorkCount count(kB200);
  }
  EXPECT_EQ(emu::current_work_count(), nullptr);
}

}  // namespace
}  // namespace hopwell::arch
