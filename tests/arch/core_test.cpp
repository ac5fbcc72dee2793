// The core: fibers, scheduler, clocks, shadow memory, barriers, mbarriers, reports. Kernels are functions of this file.
#include "harness.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <numeric>
#include <random>
#include <vector>

#include "arch/emu/fiber.hpp"
#include "arch/emu/shadow.hpp"
#include "arch/sm80/memory.hpp"
#include "arch/sm90/cluster.hpp"

namespace hopwell::arch {
namespace {

using emu::Kind;
using test::expect_clean;
using test::expect_finding;

struct Buffers {
  alignas(16) uint32_t words[1024];
  uint16_t halves[64];
  mbarrier ready, done;
};
constexpr size_t kShared = sizeof(Buffers);
emu::LaunchShape cta(uint32_t threads) { return {{1, 1, 1}, {threads, 1, 1}, {1, 1, 1}, kShared}; }

TEST(Fiber, SwitchesAndKeepsItsState) {
  struct State {
    emu::Fiber fiber;
    double sum = 0;
    int steps = 0;
  } state;
  emu::StackPool pool;
  state.fiber.create(
      pool.take(), emu::StackPool::kBytes,
      [](void* p) {
        State& s = *static_cast<State*>(p);
        alignas(32) double local[4] = {1, 2, 3, 4};  // needs an aligned stack
        for (;;) {
          s.sum += local[s.steps++ % 4];
          s.fiber.suspend();
        }
      },
      &state);
  for (int i = 0; i < 8; ++i) state.fiber.resume();
  EXPECT_EQ(state.steps, 8);
  EXPECT_EQ(state.sum, 20.0);
}

TEST(Clock, JoinAndCover) {
  emu::VectorClock a, b;
  a.raise(3, 7);
  b.raise(5, 2);
  b.raise(3, 4);
  EXPECT_FALSE(b.covers({5, 3}));
  b.join(a);
  EXPECT_TRUE(b.covers({7, 3}));
  EXPECT_TRUE(b.covers({2, 5}));
  EXPECT_FALSE(b.covers({1, 60}));
}

// Clocks share equal blocks. Each clock must still behave like a plain vector.
TEST(Clock, SharesLikePlainVectors) {
  constexpr size_t kClocks = 5, kAgents = 300;
  std::mt19937 random(1);
  std::array<emu::VectorClock, kClocks> clocks;
  std::array<std::array<uint32_t, kAgents>, kClocks> plain{};
  const auto below = [&](size_t n) { return size_t(random() % n); };
  for (int i = 0; i < 1000; ++i) {
    const size_t mine = below(kClocks), theirs = below(kClocks), action = below(20);
    const auto agent = emu::AgentId(below(kAgents));
    if (action < 12) {
      const auto step = uint32_t(random() % 100);
      clocks[mine].raise(agent, step);
      plain[mine][agent] = std::max(plain[mine][agent], step);
    } else if (action < 16) {
      clocks[mine].join(clocks[theirs]);
      for (size_t a = 0; a < kAgents; ++a) plain[mine][a] = std::max(plain[mine][a], plain[theirs][a]);
    } else if (action < 18) {
      clocks[mine] = clocks[theirs];
      plain[mine] = plain[theirs];
    } else if (action == 18) {
      clocks[mine].forget(agent);
      plain[mine][agent] = 0;
    } else if (below(8) == 0) {
      clocks[mine].clear();
      plain[mine] = {};
    }
    for (size_t c = 0; c < kClocks; ++c)
      for (size_t a = 0; a < kAgents; ++a) ASSERT_EQ(clocks[c][emu::AgentId(a)], plain[c][a]) << "action " << i;
  }
  clocks[0].clear();
  clocks[0].raise(3, 1);
  clocks[1].raise(3, 200);
  clocks[0].join(clocks[1]);
  EXPECT_EQ(clocks[0].block(0), clocks[1].block(0));
}

TEST(Shadow, NeighbouringHalvesAreRememberedApart) {
  emu::SharedCell cell;
  remember_write(cell, {1, 10, 0}, 0b0011, emu::Proxy::generic);
  remember_write(cell, {1, 11, 0}, 0b1100, emu::Proxy::generic);
  EXPECT_EQ(cell.writes[0].agent, 10);
  EXPECT_EQ(cell.writes[1].agent, 11);
  remember_write(cell, {1, 12, 0}, 0b1111, emu::Proxy::async);
  EXPECT_EQ(cell.writes[0].agent, 12);
  EXPECT_TRUE(cell.writes[1].empty());
}

// 16 bytes are one cell until a part of them is accessed alone, and again after all of them have been written.
TEST(Shadow, SixteenBytesSplitAndJoin) {
  emu::SharedShadow shadow;
  shadow.reset(64);
  const auto cells = [&](uint32_t begin, uint32_t bytes, bool write, emu::Epoch epoch) {
    std::vector<std::pair<uint32_t, int>> visited;
    shadow.visit(begin, bytes, write, [&](emu::SharedCell& cell, uint32_t offset, uint8_t mask) {
      visited.emplace_back(offset, mask);
      if (write) remember_write(cell, epoch, mask, emu::Proxy::generic);
    });
    return visited;
  };
  const auto writers = [&](uint32_t begin, uint32_t bytes) {
    std::vector<int> agents;
    shadow.visit(begin, bytes, false,
                 [&](emu::SharedCell& cell, uint32_t, uint8_t) { agents.push_back(cell.writes[0].agent); });
    return agents;
  };
  using Visited = std::vector<std::pair<uint32_t, int>>;
  EXPECT_EQ(cells(16, 32, true, {1, 7, 0}), (Visited{{16, 15}, {32, 15}}));
  EXPECT_EQ(cells(18, 4, true, {1, 8, 0}), (Visited{{16, 12}, {20, 3}}));
  EXPECT_EQ(writers(16, 32), (std::vector<int>{7, 7, 7, 7, 7}));  // an 8-byte write covers two cells
  EXPECT_EQ(cells(20, 4, true, {1, 9, 0}), (Visited{{20, 15}}));
  EXPECT_EQ(writers(16, 16), (std::vector<int>{7, 9, 7, 7}));
  EXPECT_EQ(cells(16, 16, true, {2, 5, 0}), (Visited{{16, 15}, {20, 15}, {24, 15}, {28, 15}}));
  EXPECT_EQ(writers(16, 16), std::vector<int>{5});
  EXPECT_EQ(cells(3, 10, false, {}), (Visited{{0, 8}, {4, 15}, {8, 15}, {12, 1}}));
}

// ---- ordinary accesses and the CTA barrier --------------------------------------------------------------------------

void rotate(bool barrier, uint32_t* out) {
  auto& s = dynamic_smem<Buffers>();
  const int t = thread_index();
  s.words[t] = uint32_t(t) * 3;  // @rotate-write
  if (barrier) syncthreads();
  out[t] = s.words[(t + 33) % 128];  // @rotate-read
}

TEST(Races, BarrierOrdersAndItsAbsenceIsFound) {
  std::vector<uint32_t> out(128);
  expect_clean(cta(128), [&] { rotate(true, out.data()); });
  for (uint32_t t = 0; t < 128; ++t) EXPECT_EQ(out[t], (t + 33) % 128 * 3);
  const auto racy = [&] { rotate(false, out.data()); };
  for (uint64_t seed = 0; seed < 6; ++seed) {
    const emu::Report report = emu::launch(cta(128), test::options_for(seed), racy);
    EXPECT_TRUE(report.has(Kind::race) || report.has(Kind::uninitialized)) << report.text();
  }
}

TEST(Races, WriteAfterRead) {
  const auto kernel = [](bool barrier) {
    auto& s = dynamic_smem<Buffers>();
    const int t = thread_index();
    s.words[t] = 1;
    syncthreads();
    volatile uint32_t v = s.words[(t + 1) % 64];  // @war-read
    (void)v;
    if (barrier) syncthreads();
    s.words[t] = 2;  // @war-write
  };
  expect_clean(cta(64), [&] { kernel(true); });
  expect_finding(
      cta(64), [&] { kernel(false); }, Kind::race, "not ordered after the read by CTA 0 thread", "war-write");
}

TEST(Races, UninitialisedReadNamesItsLine) {
  expect_finding(
      cta(32),
      [] {
        volatile uint32_t v = dynamic_smem<Buffers>().words[700];  // @uninitialised
        (void)v;
      },
      Kind::uninitialized, "nothing has been written", "uninitialised");
}

struct Stage {
  float keys[4][8];
  std::array<std::array<uint16_t, 8>, 2> scales;
  mbarrier full[2];
};
struct Stages {
  alignas(1024) float part[16];
  Stage stages[2];
  uint32_t result;
};
struct SecondHalf {
  int count;
};
struct Extended : SecondHalf {
  float rest[8];
};
union Either {
  float f;
  uint32_t bits;
};
struct WithUnion {
  int count;
  union {
    Either either;
    float values[4];
  };
};

// Reads one element that nothing has written; the finding's text names it.
template <class Storage, class Read>
std::string named_by_finding(Read read) {
  const emu::Report report =
      emu::launch({{1, 1, 1}, {32, 1, 1}, {1, 1, 1}, sizeof(Storage)}, test::options_for(0), [&] {
        if (thread_index() == 0) read(dynamic_smem<Storage>());
      });
  return report.findings.size() == 1 ? report.findings[0].text : report.text();
}
template <class T>
void read(const T& value) {
  volatile T v = value;
  (void)v;
}

TEST(Names, FindingsNameMembersOfTheSharedStruct) {
  const auto expect = [](const std::string& text, const std::string& name) {
    EXPECT_NE(text.find("reads shared " + name + " of CTA 0, where"), std::string::npos) << text;
  };
  expect(named_by_finding<Stages>([](Stages& s) { read(s.part[3]); }), "part[3]");
  expect(named_by_finding<Stages>([](Stages& s) { read(s.stages[1].keys[2][7]); }), "stages[1].keys[2][7]");
  expect(named_by_finding<Stages>([](Stages& s) { read(s.stages[1].scales[1][6]); }), "stages[1].scales[1][6]");
  expect(named_by_finding<Stages>([](Stages& s) { read(s.stages[0].full[1].opaque); }), "stages[0].full[1]");
  expect(named_by_finding<Stages>([](Stages& s) { read(s.result); }), "result");
}

TEST(Names, OffsetsStayWhereMembersHaveNoNames) {
  const auto expect_offset = [](const std::string& text, const char* offset) {
    EXPECT_NE(text.find("reads shared " + std::string(offset) + " of CTA 0"), std::string::npos) << text;
  };
  expect_offset(named_by_finding<Extended>([](Extended& s) { read(s.rest[1]); }), "+0x8");
  expect_offset(named_by_finding<WithUnion>([](WithUnion& s) { read(s.values[1]); }), "+0x8");
  // A kernel with two structs for one memory.
  expect_offset(named_by_finding<Stages>([](Stages& s) { dynamic_smem<Stage>(), read(s.part[2]); }), "+0x8");
}

TEST(Races, HalfWordsOfOneWordByTwoThreadsAreNoRace) {
  expect_clean(cta(64), [] {
    auto& s = dynamic_smem<Buffers>();
    s.halves[thread_index()] = uint16_t(thread_index());
    s.halves[thread_index()] = uint16_t(s.halves[thread_index()] + 1);
  });
}

TEST(Races, OutOfBounds) {
  expect_finding(
      cta(32),
      [] {
        if (thread_index() == 0) *(&dynamic_smem<Buffers>().words[0] + sizeof(Buffers) / 4) = 1;  // @bounds
      },
      Kind::bounds, "outside of its", "bounds");
}

TEST(Warp, SyncOrdersLanesButShuffleDoesNot) {
  const auto kernel = [](bool sync) {
    auto& s = dynamic_smem<Buffers>();
    const int lane = lane_index();
    s.words[lane] = uint32_t(lane);
    if (sync)
      syncwarp();
    else
      shuffle(lane, 0);
    volatile uint32_t v = s.words[31 - lane];  // @lanes
    (void)v;
  };
  expect_clean(cta(32), [&] { kernel(true); });
  expect_finding(cta(32), [&] { kernel(false); }, Kind::race, "not ordered", "lanes");
}

// Of two instructions with the site of one caller, each is left out separately.
TEST(Warp, LeftOutIsOneInstructionOfAPlace) {
  const auto meet = [](Site site = Site::current()) { syncwarp(~0U, site), syncthreads(site); };
  const auto kernel = [&] {
    auto& s = dynamic_smem<Buffers>();
    const int thread = thread_index();
    s.words[thread] = uint32_t(thread);
    meet();
    volatile uint32_t v = s.words[63 - thread];
    (void)v;
  };
  const auto calls = emu::launch(cta(64), test::options_for(0), kernel).synchronisation;
  ASSERT_EQ(calls.size(), 2U);
  EXPECT_EQ(calls[0].call.where, calls[1].call.where);
  for (const emu::SynchronisationCount& counted : calls) {
    EXPECT_EQ(counted.calls, 64U);
    emu::Options options = test::options_for(0);
    options.leave_out = counted.call;
    EXPECT_EQ(emu::launch(cta(64), options, kernel).clean(), counted.call.instruction == "bar.warp.sync");
  }
}

TEST(Warp, ShuffleAndBallot) {
  expect_clean(
      cta(64),
      [] {
        const int lane = lane_index();
        if (shuffle_xor(lane, 5) != (lane ^ 5) || shuffle(lane * 2, 7) != 14 || ballot(lane % 3 == 0) != 0x49249249u)
          __builtin_trap();
      },
      5);
}

// ---- barriers -------------------------------------------------------------------------------------------------------

TEST(Barrier, ProducerArrivesConsumerWaits) {
  expect_clean(cta(64), [] {
    auto& s = dynamic_smem<Buffers>();
    if (warp_index() == 0) {
      s.words[lane_index()] = 1;
      barrier_arrive(3, 64);
    } else {
      barrier_sync(3, 64);
      if (s.words[lane_index()] != 1) __builtin_trap();
    }
  });
}

TEST(Barrier, MissingPartnersAreADeadlockWithNames) {
  expect_finding(
      cta(64),
      [] {
        if (warp_index() == 1) barrier_sync(2, 64);  // @lonely
      },
      Kind::deadlock, "bar.sync at core_test.cpp", "lonely");
}

TEST(Report, NamesTheThreadsThatDidNotCallACollective) {
  const emu::Report report = emu::launch(cta(64), {}, [] {
    if (thread_index() == 3) warp_index();   // @branch
    if (thread_index() != 3) syncthreads();  // @others
  });
  const std::string branch = std::to_string(test::marked_line(__FILE__, "branch")),
                    others = std::to_string(test::marked_line(__FILE__, "others"));
  EXPECT_NE(
      report.text().find("all 32 threads must call shfl.sync; only these did: CTA 0 thread 3; waits in bar.sync 0 "
                         "(the whole CTA) at core_test.cpp:" +
                         others + ": CTA 0 thread 0-2, 4-31\n"),
      std::string::npos)
      << report.text();
  EXPECT_NE(report.text().find("shfl.sync at core_test.cpp:" + branch + ": CTA 0 thread 3"), std::string::npos);
}

TEST(Barrier, DifferentCounts) {
  expect_finding(
      cta(96),
      [] {
        barrier_sync(1, warp_index() == 0 ? 64 : 96);  // @counts
      },
      Kind::barrier, "used for", "counts");
}

// ---- mbarriers ------------------------------------------------------------------------------------------------------

void ring(int bug, uint32_t* out) {
  auto& s = dynamic_smem<Buffers>();
  const int t = thread_index();
  if (t == 0) {
    mbarrier_init(s.ready, bug == 3 ? 33 : 32);
    mbarrier_init(s.done, 32);
  }
  if (bug != 5) syncthreads();
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t parity = i & 1;
    if (warp_index() == 0) {
      if (bug != 1) mbarrier_wait(s.done, parity ^ (bug == 2 ? 0 : 1));  // @ring-empty
      s.words[t] = i * 100 + uint32_t(t);                                // @ring-write
      mbarrier_arrive(s.ready);                                          // @ring-arrive
    } else {
      if (bug != 4) mbarrier_wait(s.ready, parity);                       // @ring-full
      out[i * 32 + uint32_t(lane_index())] = s.words[31 - lane_index()];  // @ring-read
      mbarrier_arrive(s.done);
    }
  }
}

TEST(Mbarrier, Ring) {
  std::vector<uint32_t> out(128);
  expect_clean(cta(64), [&] { ring(0, out.data()); });
  for (uint32_t i = 0; i < 128; ++i) EXPECT_EQ(out[i], i / 32 * 100 + 31 - i % 32);
  expect_finding(cta(64), [&] { ring(1, out.data()); }, Kind::race, "not ordered after the read", "ring-write");
  expect_finding(cta(64), [&] { ring(2, out.data()); }, Kind::deadlock, "mbarrier.try_wait parity 0", "ring-empty");
  expect_finding(cta(64), [&] { ring(3, out.data()); }, Kind::deadlock, "1 of 33 arrivals missing", "ring-full");
  for (uint64_t seed = 0; seed < 6; ++seed)
    EXPECT_FALSE(emu::launch(cta(64), test::options_for(seed), [&] { ring(4, out.data()); }).clean());
  for (uint64_t seed = 0; seed < 6; ++seed)
    EXPECT_TRUE(emu::launch(cta(64), test::options_for(seed), [&] { ring(5, out.data()); }).has(Kind::barrier) ||
                emu::launch(cta(64), test::options_for(seed), [&] { ring(5, out.data()); }).has(Kind::race));
}

TEST(Mbarrier, CountsThatAreChanged) {
  std::vector<uint32_t> out(128);
  const auto kernel = [&] { ring(0, out.data()); };
  const auto barriers = emu::launch(cta(64), test::options_for(0), kernel).barriers;
  ASSERT_EQ(barriers.size(), 2U);
  EXPECT_EQ(barriers[0].name, "ready");
  EXPECT_EQ(barriers[1].name, "done");
  for (const emu::BarrierArray& barrier : barriers) {
    EXPECT_EQ(barrier.arrivals, 32U);
    for (const int by : {-1, 0, 1}) {
      emu::Options options = test::options_for(0);
      options.change_count = {barrier, by};
      EXPECT_EQ(emu::launch(cta(64), options, kernel).clean(), by == 0) << barrier.name << " " << by;
    }
  }
}

TEST(Mbarrier, Misuse) {
  expect_finding(
      cta(32),
      [] {
        mbarrier_arrive(dynamic_smem<Buffers>().ready);  // @no-init
      },
      Kind::barrier, "no mbarrier has been initialised", "no-init");
  expect_finding(
      cta(1),
      [] {
        auto& s = dynamic_smem<Buffers>();
        mbarrier_init(s.ready, 1);
        mbarrier_init(s.ready, 1);  // @init-twice
      },
      Kind::barrier, "mbarrier.inval must come first", "init-twice");
  expect_finding(
      cta(1),
      [] {
        auto& s = dynamic_smem<Buffers>();
        mbarrier_init(s.ready, 1);
        s.ready.opaque = 5;
        mbarrier_arrive(s.ready);  // @overwritten
      },
      Kind::barrier, "was overwritten", "overwritten");
}

// ---- determinism ----------------------------------------------------------------------------------------------------

// Two CTAs. The second arrives without a release after it has read or written the buffer of the first.
void relaxed_arrival(bool peer_writes, bool fenced, bool reads_then) {
  auto& s = dynamic_smem<Buffers>();
  const int t = thread_index();
  if (t == 0) {
    mbarrier_init(s.ready, 32);
    fence_mbarrier_init();
  }
  s.words[t] = 1;
  cluster_sync();
  const uint32_t word = map_to_rank(shared_address(&s.words[t]), 0);
  if (cluster_rank() == 1) {
    if (peer_writes) store_cluster(word, 2);
    if (!peer_writes) load_cluster(word);
    if (fenced) fence_proxy_async();
    mbarrier_arrive_cluster_relaxed(map_to_rank(shared_address(&s.ready), 0));
  } else {
    mbarrier_wait(s.ready, 0);
    volatile uint32_t& mine = s.words[31 - t];
    mine = reads_then ? mine + 1 : 3;  // @relaxed-read
  }
  cluster_sync();
}

TEST(Mbarrier, RelaxedArrivalFreesABufferAndPublishesNothing) {
  const emu::LaunchShape pair{{2, 1, 1}, {32, 1, 1}, {2, 1, 1}, kShared};
  expect_clean(pair, [] { relaxed_arrival(false, true, false); });
  expect_clean(pair, [] { relaxed_arrival(true, true, false); });
  expect_finding(pair, [] { relaxed_arrival(true, true, true); }, Kind::race, "reads", "relaxed-read");
}

TEST(Mbarrier, RelaxedArrivalWithoutAFenceOvertakesTheAccessesBeforeIt) {
  const emu::LaunchShape pair{{2, 1, 1}, {32, 1, 1}, {2, 1, 1}, kShared};
  expect_finding(pair, [] { relaxed_arrival(false, false, false); }, Kind::race, "writes", "relaxed-read");
  expect_finding(pair, [] { relaxed_arrival(true, false, false); }, Kind::race, "writes", "relaxed-read");
}

template <int kLow, int kHigh>
void share_registers() {
  const bool gives = warpgroup_index() == 0;
  if (gives) setmaxnreg_dec<kLow>();  // @fewer
  syncthreads();
  if (!gives) setmaxnreg_inc<kHigh>();  // @more
}

TEST(Registers, WarpgroupsShareWhatTheyWereLaunchedWith) {
  const emu::LaunchShape three{{1, 1, 1}, {384, 1, 1}, {1, 1, 1}, kShared};  // 168 registers per thread
  expect_clean(three, [] { share_registers<88, 208>(); });
  expect_finding(three, [] { share_registers<64, 224>(); }, emu::Kind::deadlock, "ask for 512 registers", "more");
  expect_finding(three, [] { share_registers<176, 160>(); }, emu::Kind::divergence, "176 registers after 168", "fewer");
}

TEST(Determinism, SameSeedSameScheduleSameReport) {
  std::vector<uint32_t> out(128);
  for (int bug : {0, 1, 2, 4}) {
    for (uint64_t seed = 0; seed < 4; ++seed) {
      const auto run = [&] { return emu::launch(cta(64), test::options_for(seed), [&] { ring(bug, out.data()); }); };
      const emu::Report a = run(), b = run();
      EXPECT_EQ(a.text(), b.text());
      EXPECT_EQ(a.statistics.switches, b.statistics.switches);
    }
  }
}

TEST(Launch, RejectsImpossibleShapes) {
  const auto nothing = [] {};
  EXPECT_THROW(emu::launch({{3, 1, 1}, {32, 1, 1}, {2, 1, 1}, 0}, {}, nothing), std::invalid_argument);
  EXPECT_THROW(emu::launch({{1, 1, 1}, {2048, 1, 1}, {1, 1, 1}, 0}, {}, nothing), std::invalid_argument);
  EXPECT_THROW(emu::launch({{1, 1, 1}, {32, 1, 1}, {1, 1, 1}, 300 << 10}, {}, nothing), std::invalid_argument);
}

TEST(Launch, APollThatThrowsEndsIt) {
  struct Ended {};
  static thread_local int polls;
  polls = 0;
  emu::poll = [] {
    if (++polls == 3) throw Ended();
  };
  const emu::LaunchShape shape{{1000, 1, 1}, {64, 1, 1}, {1, 1, 1}, 0};
  std::atomic<int> started{0};
  const auto kernel = [&] {
    ++started;
    syncthreads();
  };
  EXPECT_THROW((void)emu::launch(shape, {}, kernel), Ended);
  EXPECT_EQ(polls, 3);
  EXPECT_LT(started, 64'000);
  emu::poll = nullptr;
  started = 0;
  EXPECT_TRUE(emu::launch(shape, {}, kernel).clean());  // the next launch is not affected
  EXPECT_EQ(started, 64'000);
}

TEST(Launch, PollingForeverIsReported) {
  uint32_t flag = 0;
  emu::Options options;
  options.max_switches = 10000;
  const emu::Report report = emu::launch(cta(32), options, [&] {
    while (load_acquire(&flag) == 0) {
    }
  });
  EXPECT_TRUE(report.has(Kind::deadlock));
}

}  // namespace
}  // namespace hopwell::arch
