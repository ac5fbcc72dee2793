#include <gtest/gtest.h>
#include <hopwell/interrupt.hpp>

#include <atomic>
#include <chrono>
#include <thread>

#include "tile/cpu/parallel.hpp"

namespace hopwell {
namespace {

using namespace std::chrono_literals;

std::atomic<int> asked{0};
std::atomic<bool> answer{false};
bool wanted() {
  ++asked;
  return answer;
}

constexpr int kItems = 300;

class Interrupt : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    cpu::set_max_threads(GetParam());
    asked = 0;
    answer = false;
  }
  void TearDown() override { cpu::set_max_threads(before_); }

  // How many of 300 items of 1 ms are done.
  static int run() {
    std::atomic<int> done{0};
    try {
      cpu::parallel_for(kItems, [&](std::int64_t) {
        std::this_thread::sleep_for(1ms);
        ++done;
      });
    } catch (const Interrupted&) {
      return done;
    }
    EXPECT_EQ(done, kItems);
    return done;
  }

 private:
  int before_ = cpu::max_threads();
};

TEST_P(Interrupt, EndsALoop) {
  {
    const InterruptCheck check(wanted);
    answer = true;
    EXPECT_LT(run(), kItems);
    EXPECT_EQ(asked, 1);
  }
  EXPECT_EQ(run(), kItems);  // it is over with its scope
  EXPECT_EQ(asked, 1);
}

TEST_P(Interrupt, IsAskedFromTimeToTime) {
  const InterruptCheck check(wanted);
  EXPECT_EQ(run(), kItems);
  EXPECT_GT(asked, 0);
  EXPECT_LT(asked, kItems / 10);
}

TEST_P(Interrupt, BelongsToItsThread) {
  const InterruptCheck check(wanted);
  answer = true;
  int done = 0;
  std::thread([&] { done = run(); }).join();
  EXPECT_EQ(done, kItems);
}

TEST_P(Interrupt, EndsLongItemsOfAllThreads) {
  const InterruptCheck check(wanted);
  answer = true;
  const auto start = std::chrono::steady_clock::now();
  EXPECT_THROW(cpu::parallel_for(GetParam(),
                                 [&](std::int64_t) {
                                   for (int i = 0; i < 10'000; ++i) {
                                     std::this_thread::sleep_for(1ms);
                                     cpu::interruption_point();
                                   }
                                 }),
               Interrupted);
  EXPECT_LT(std::chrono::steady_clock::now() - start, 5s);
}

INSTANTIATE_TEST_SUITE_P(Threads, Interrupt, testing::Values(1, 3));

}  // namespace
}  // namespace hopwell
