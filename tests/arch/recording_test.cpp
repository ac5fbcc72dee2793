// Recorded launches: activity of small kernels, counted by hand; times that follow from the chip's rates; the page.
#include "arch/emu/recording.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "arch/sm100/tcgen05.hpp"
#include "arch/sm80/async_copy.hpp"
#include "arch/sm90/bulk_copy.hpp"
#include "harness.hpp"

namespace hopwell::arch {
namespace {

using emu::kB200;
using emu::LaunchRecord;
using emu::Recording;

std::vector<float> random_floats(size_t n) {
  std::mt19937 random(std::random_device{}());
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<float> numbers(n);
  for (float& x : numbers) x = uniform(random);
  return numbers;
}

LaunchRecord recorded(const emu::LaunchShape& shape, const std::function<void()>& kernel, uint64_t seed = 1,
                      const emu::Rates& rates = kB200) {
  emu::Options options = test::options_for(seed);
  options.spurious_wakeups = 0;
  Recording recording(rates);
  const emu::Report report = emu::launch(shape, options, kernel);
  EXPECT_TRUE(report.clean()) << report.text();
  EXPECT_EQ(recording.launches.size(), 1U);
  return recording.launches.at(0);
}

uint64_t executed(const LaunchRecord& launch, const std::string& name) {
  for (const emu::InstructionCount& i : launch.instructions)
    if (i.name == name) return i.total();
  return 0;
}

const emu::SharedLine& at_mark(const LaunchRecord& launch, const std::string& mark) {
  static const emu::SharedLine none{};
  const uint32_t line = test::marked_line(__FILE__, mark);
  for (const emu::SharedLine& s : launch.shared)
    if (s.where.line == line) return s;
  ADD_FAILURE() << "no access at the line that ends with // @" << mark;
  return none;
}

// ---- bank conflicts -------------------------------------------------------------------------------------------------

// A tile of 32 × 32 floats through shared memory, by 8 warps.
void transpose(const float* in, float* out, int pitch) {
  float* tile = &dynamic_smem<float>();
  const int lane = lane_index(), warp = warp_index();
  for (int row = warp; row < 32; row += 8) tile[row * pitch + lane] = in[row * 32 + lane];  // @tile_rows
  syncthreads();
  for (int row = warp; row < 32; row += 8) out[row * 32 + lane] = tile[lane * pitch + row];  // @tile_columns
}

TEST(BankConflicts, OfATransposeAreItsPitchs) {
  const std::vector<float> in = random_floats(1024);
  for (const int pitch : {32, 33, 34}) {
    std::vector<float> out(1024);
    const LaunchRecord launch = recorded({{3, 1, 1}, {256, 1, 1}, {1, 1, 1}, size_t(32 * pitch * 4)},
                                         [&] { transpose(in.data(), out.data(), pitch); });
    for (size_t i = 0; i < 1024; ++i) ASSERT_EQ(out[i], in[i % 32 * 32 + i / 32]);
    // 32 rows per CTA, 3 CTAs. A column with pitch 32 is in one bank, with pitch 34 in 16 of the 32 banks.
    const uint64_t rows = 3 * 32, more = pitch == 32 ? 31 : pitch == 34 ? 1 : 0;
    const emu::SharedLine &store = at_mark(launch, "tile_rows"), &load = at_mark(launch, "tile_columns");
    EXPECT_EQ(store.instruction, "store");
    EXPECT_EQ(store.accesses, rows);
    EXPECT_EQ(store.bytes, rows * 128);
    EXPECT_EQ(store.wavefronts, rows);
    EXPECT_EQ(store.conflicts, 0U);
    EXPECT_EQ(load.instruction, "load");
    EXPECT_EQ(load.accesses, rows);
    EXPECT_EQ(load.wavefronts, rows * (1 + more)) << "pitch " << pitch;
    EXPECT_EQ(load.conflicts, rows * more) << "pitch " << pitch;
    EXPECT_EQ(launch.bank_conflicts(), rows * more);
    EXPECT_EQ(executed(launch, "load"), rows);
    EXPECT_EQ(executed(launch, "bar.sync"), 3 * 8U);
  }
}

TEST(BankConflicts, OfWideAccessesAreCountedByQuartersOfAWarp) {
  const LaunchRecord launch = recorded({{1, 1, 1}, {32, 1, 1}, {1, 1, 1}, 4096}, [] {
    volatile const float* const words = &dynamic_smem<float>();
    const uint32_t base = shared_address(&dynamic_smem<float>()), lane = uint32_t(lane_index());
    store_shared_v4(base + 16 * lane, {{1, 2, 3, 4}});  // @side_by_side
    syncwarp();
    store_shared_v4(base + 128 * lane, {{1, 2, 3, 4}});  // @same_banks
    syncwarp();
    (void)words[0];                        // @same_word
    if (lane < 8) (void)words[32 * lane];  // @few_lanes
    if (lane == 3) (void)words[1];         // @one_lane
  });
  EXPECT_EQ(at_mark(launch, "side_by_side").wavefronts, 4U);
  EXPECT_EQ(at_mark(launch, "side_by_side").conflicts, 0U);
  EXPECT_EQ(at_mark(launch, "same_banks").wavefronts, 32U);
  EXPECT_EQ(at_mark(launch, "same_banks").conflicts, 28U);
  EXPECT_EQ(at_mark(launch, "same_word").wavefronts, 1U);
  EXPECT_EQ(at_mark(launch, "few_lanes").conflicts, 7U);
  EXPECT_EQ(at_mark(launch, "few_lanes").bytes, 32U);
  EXPECT_EQ(at_mark(launch, "one_lane").wavefronts, 1U);
}

// ---- bytes, phases, times -------------------------------------------------------------------------------------------

constexpr int kSteps = 5, kStages = 2, kStepBytes = 4000 * 4;

struct Ring {
  alignas(16) std::array<std::array<float, 4000>, kStages> stages;
  std::array<mbarrier, kStages> full, empty;
};

// Warp 0 copies five blocks through two stages with the copy engine; warp 1 adds them up.
void sum_by_a_ring(const float* in, float* out) {
  auto& s = dynamic_smem<Ring>();
  const int lane = lane_index();
  if (thread_index() == 0) {
    for (size_t i = 0; i < kStages; ++i) mbarrier_init(s.full[i], 1), mbarrier_init(s.empty[i], 1);
    fence_mbarrier_init();
  }
  syncthreads();
  if (thread_index() == 0)
    for (int step = 0; step < kSteps; ++step) {
      const auto stage = size_t(step % kStages);
      mbarrier_wait(s.empty[stage], uint32_t(step / kStages & 1) ^ 1);
      mbarrier_arrive_expect_tx(s.full[stage], kStepBytes);
      bulk_load(shared_address(s.stages[stage].data()), in + 4000 * step, kStepBytes, s.full[stage]);
    }
  if (warp_index() == 1) {
    float sum = 0;
    for (int step = 0; step < kSteps; ++step) {
      const auto stage = size_t(step % kStages);
      mbarrier_wait(s.full[stage], uint32_t(step / kStages & 1));
      for (size_t i = size_t(lane); i < 4000; i += 32) sum += s.stages[stage][i];
      syncwarp();
      if (lane == 0) mbarrier_arrive(s.empty[stage]);
    }
    out[32 * block_index() + lane] = sum;
  }
}

constexpr emu::LaunchShape kRingShape{{2, 1, 1}, {64, 1, 1}, {1, 1, 1}, sizeof(Ring)};

LaunchRecord ring(uint64_t seed) {
  const std::vector<float> in = random_floats(4000 * kSteps);
  std::vector<float> out(64);
  LaunchRecord launch = recorded(kRingShape, [&] { sum_by_a_ring(in.data(), out.data()); }, seed);
  double sum = 0, expected = 0;
  for (size_t i = 0; i < 32; ++i) sum += double(out[i]);
  for (const float x : in) expected += double(x);
  EXPECT_NEAR(sum, expected, 1e-2);
  return launch;
}

TEST(Recording, CountsBytesInstructionsAndPhases) {
  const LaunchRecord launch = ring(1);
  EXPECT_EQ(launch.ctas, 2U);
  EXPECT_EQ(launch.total.copied_bytes, 2U * kSteps * kStepBytes);
  EXPECT_EQ(executed(launch, "cp.async.bulk (load)"), 2U * kSteps);
  EXPECT_EQ(executed(launch, "mbarrier.arrive.expect_tx"), 2U * kSteps);
  EXPECT_EQ(executed(launch, "mbarrier.arrive"), 2U * kSteps);
  EXPECT_EQ(executed(launch, "load"), 2U * kSteps * 125);
  std::vector<size_t> phases;
  for (const emu::BarrierRow& barrier : launch.barriers)
    if (barrier.name.starts_with("mbarrier")) phases.push_back(barrier.phases.size());
  EXPECT_EQ(phases, (std::vector<size_t>{3, 2, 3, 2}));  // full, full, empty, empty of the first cluster
  EXPECT_EQ(launch.findings, "no findings\n");
}

// The copies are sequential at the chip's rate until the ring is full; then each waits for the sum two steps before.
TEST(Recording, TimesFollowFromRatesAndBarriers) {
  const LaunchRecord launch = ring(2);
  const double copy = kStepBytes / kB200.gather_bytes;
  std::vector<emu::Span> copies;
  for (const emu::TimelineRow& row : launch.rows)
    if (row.name == "copies of warp 0") copies = row.busy;
  double busy = 0;
  for (const emu::Span& span : copies) busy += span.end - span.begin;
  EXPECT_NEAR(busy, kSteps * copy, 1e-6);
  const emu::BarrierRow *full = nullptr, *empty = nullptr;
  for (const emu::BarrierRow& barrier : launch.barriers) {
    if (barrier.name == "mbarrier full[0]") full = &barrier;
    if (barrier.name == "mbarrier empty[0]") empty = &barrier;
  }
  ASSERT_TRUE(full && empty);
  // A sum takes 125 loads and a few instructions: less than a copy, so copies never wait for long.
  EXPECT_NEAR(full->phases[1].end - full->phases[0].end, 2 * copy, 1);
  EXPECT_GT(empty->phases[0].end - full->phases[0].end, 125);
  EXPECT_LT(empty->phases[0].end - full->phases[0].end, 135);
  EXPECT_GE(launch.end, kSteps * copy + 125);
  EXPECT_LT(launch.end, kSteps * copy + 200);
}

TEST(Recording, TimesDoNotDependOnTheSchedule) {
  const double end = ring(0).end;
  for (uint64_t seed = 1; seed < 12; ++seed) EXPECT_EQ(ring(seed).end, end) << "seed " << seed;
}

// One lane copies, and its copies take longer than to issue them. The other lanes have no copies to wait for, but the
// warp executes wait_group as one.
TEST(Recording, AWarpWaitsForTheCopiesOfAnyLane) {
  const std::vector<float> in = random_floats(64);
  emu::Rates slow_copies = kB200;
  slow_copies.gather_bytes = 1;
  const auto kernel = [&] {
    const uint32_t base = shared_address(&dynamic_smem<float>()), lane = uint32_t(lane_index());
    if (lane == 0)
      for (uint32_t i = 0; i < 64; i += 4) cp_async<16>(base + 4 * i, &in[i]);
    cp_async_commit();
    cp_async_wait<0>();
    if (lane > 0)
      for (uint32_t i = 0; i < 100; ++i) store_shared_v4(base + 64 * 4 + 16 * lane, {{i, i, i, i}});
    syncwarp();
  };
  const LaunchRecord launch =
      recorded({{1, 1, 1}, {32, 1, 1}, {1, 1, 1}, 64 * 4 + 512}, kernel, /*seed=*/1, slow_copies);
  const emu::TimelineRow& warp = launch.rows.at(0);
  ASSERT_EQ(warp.name, "warp 0");
  const auto own = std::find_if(warp.waits.begin(), warp.waits.end(), [](const emu::Span& wait) {
    return wait.what.starts_with("waits for its own asynchronous operations");
  });
  ASSERT_NE(own, warp.waits.end());
  for (const emu::Span& busy : warp.busy)
    EXPECT_TRUE(busy.end <= own->begin || busy.begin >= own->end) << busy.begin << " to " << busy.end;
  EXPECT_LT(own->begin, 100) << "the other lanes' 100 stores are drawn into the wait";
}

TEST(Recording, MapsTensorMemory) {
  struct Shared {
    alignas(1024) std::array<uint32_t, 8192> words;
    mbarrier done;
    uint32_t tmem;
  };
  const LaunchRecord launch = recorded({{1, 1, 1}, {128, 1, 1}, {1, 1, 1}, sizeof(Shared)}, [] {
    auto& s = dynamic_smem<Shared>();
    const uint32_t base = shared_address(s.words.data());
    if (thread_index() == 0) {
      mbarrier_init(s.done, 1);
      fence_mbarrier_init();
    }
    if (warp_index() == 0) tmem_allocate<1>(s.tmem, 64);
    for (uint32_t i = uint32_t(thread_index()) * 4; i < 8192; i += 512) store_shared_v4(base + i * 4, {{0, 0, 0, 0}});
    fence_proxy_async();
    syncthreads();
    if (thread_index() == 0) {
      const uint64_t a = at_address(tcgen05_descriptor({Swizzle::bytes128, 16, 1024}), base);
      for (const bool add : {false, true, true})
        tcgen05_mma_f16<1>(s.tmem, a, a, instruction_descriptor({.m = 128, .n = 64}), add);
      tcgen05_commit<1>(s.done);
    }
    mbarrier_wait(s.done, 0);
    tcgen05_fence_after_thread_sync();
    uint32_t r[32];
    tmem_load<TmemShape::b32x32>(r, tmem_address(s.tmem, 32 * warp_index(), 0));
    tmem_wait_load(r);
    tcgen05_fence_before_thread_sync();
    syncthreads();
    if (warp_index() == 0) tmem_deallocate<1>(s.tmem, 64);
  });
  using Kind = emu::TensorMemoryUse::Kind;
  std::array<std::vector<emu::TensorMemoryUse>, 5> uses;
  for (const emu::TensorMemoryUse& use : launch.tensor_memory) uses[size_t(use.kind)].push_back(use);
  const auto of = [&](Kind kind) { return uses[size_t(kind)]; };
  ASSERT_EQ(of(Kind::allocated).size(), 1U);
  EXPECT_EQ(of(Kind::allocated)[0].columns, 64U);
  ASSERT_EQ(of(Kind::product).size(), 3U);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(of(Kind::product)[i].first_column, of(Kind::allocated)[0].first_column);
    EXPECT_EQ(of(Kind::product)[i].columns, 64U);
    EXPECT_DOUBLE_EQ(of(Kind::product)[i].end - of(Kind::product)[i].begin,
                     emu::product_cycles(kB200, {128, 64, 1, false, false}));
  }
  EXPECT_EQ(of(Kind::operand).size(), 2U);  // the accumulations
  ASSERT_EQ(of(Kind::read).size(), 4U);     // one per warp
  for (const emu::TensorMemoryUse& read : of(Kind::read)) {
    EXPECT_EQ(read.columns, 32U);
    EXPECT_GE(read.begin, of(Kind::product)[2].end);
    EXPECT_LE(read.end, of(Kind::allocated)[0].end);
  }
}

// ---- the page -------------------------------------------------------------------------------------------------------

// Whether every element that begins also ends, in order.
bool well_formed(const std::string& page) {
  std::vector<std::string> open;
  for (size_t at = page.find('<'); at != std::string::npos; at = page.find('<', at + 1)) {
    const size_t end = page.find('>', at);
    if (end == std::string::npos) return false;
    const std::string tag = page.substr(at + 1, end - at - 1);
    if (tag.starts_with("!") || tag.ends_with("/")) continue;
    const std::string name = tag.substr(tag.starts_with("/"), tag.find(' ') - tag.starts_with("/"));
    if (!tag.starts_with("/"))
      open.push_back(name);
    else if (open.empty() || open.back() != name)
      return false;
    else
      open.pop_back();
  }
  return open.empty();
}

TEST(Page, HasTheCountsOfEachLaunchAndIsWellFormed) {
  const std::vector<float> in = random_floats(4000 * kSteps);
  std::vector<float> out(1024);
  Recording recording;
  emu::launch(kRingShape, {}, [&] { sum_by_a_ring(in.data(), out.data()); });
  emu::launch({{1, 1, 1}, {256, 1, 1}, {1, 1, 1}, 4096}, {}, [&] { transpose(in.data(), out.data(), 32); });
  ASSERT_EQ(recording.launches.size(), 2U);
  const std::string page = emu::launch_page(recording.launches, recording.rates);
  EXPECT_TRUE(well_formed(page));
  EXPECT_FALSE(well_formed(page + "<p>"));
  for (const char* words : {"1. recording_test.cpp", "2. recording_test.cpp", "<td>160,000</td><td>80,000</td>",
                            "992 bank conflicts", "mbarrier full[0]", "copies of warp 0", "cp.async.bulk (load)"})
    EXPECT_NE(page.find(words), std::string::npos) << words;
}

TEST(Page, ShowsFindings) {
  Recording recording;
  emu::Session session({.seed = 1});
  emu::launch_in_session({{1, 1, 1}, {32, 1, 1}, {1, 1, 1}, 64}, [] {
    volatile const float* const words = &dynamic_smem<float>();
    (void)words[lane_index() % 16];
  });
  ASSERT_FALSE(session.report.clean());
  const std::string page = emu::launch_page(recording.launches, recording.rates);
  EXPECT_TRUE(well_formed(page));
  EXPECT_NE(page.find("[uninitialized]"), std::string::npos);
}

TEST(Page, IsWrittenWholeOrNotAtAll) {
  const auto folder = std::filesystem::temp_directory_path() / "hopwell-recording-test";
  std::filesystem::remove_all(folder);
  std::filesystem::create_directory(folder);
  const Recording recording;
  recording.write_html(folder / "page.html");
  std::ifstream file(folder / "page.html");
  EXPECT_TRUE(well_formed({std::istreambuf_iterator<char>(file), {}}));
  std::filesystem::create_directory(folder / "taken");
  for (const char* name : {"missing/page.html", "taken"}) try {
      recording.write_html(folder / name);
      ADD_FAILURE() << name;
    } catch (const std::runtime_error& error) {
      EXPECT_NE(std::string(error.what()).find("cannot write " + (folder / name).string()), std::string::npos);
    }
  size_t left = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) left += entry.exists();
  EXPECT_EQ(left, 2U);  // the page and the folder
  std::filesystem::remove_all(folder);
}

TEST(Recording, EndsWithItsScope) {
  const std::vector<float> in = random_floats(1024);
  std::vector<float> out(1024);
  const auto run = [&] {
    emu::launch({{1, 1, 1}, {256, 1, 1}, {1, 1, 1}, 4224}, {}, [&] { transpose(in.data(), out.data(), 33); });
  };
  Recording outer;
  {
    const Recording inner;
    run();
    EXPECT_EQ(inner.launches.size(), 1U);
  }
  EXPECT_EQ(emu::current_recording(), &outer);
  EXPECT_TRUE(outer.launches.empty());
  run();
  EXPECT_EQ(outer.launches.size(), 1U);
}

}  // namespace
}  // namespace hopwell::arch
