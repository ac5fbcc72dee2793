// Parallel loops in a forked child, which has none of its parent's threads.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <numeric>
#include <vector>

#include "tile/cpu/parallel.hpp"

namespace hopwell::cpu {
namespace {

// Whether work(), in a child of this process, returned true in less than `seconds` seconds.
template <class Work>
bool holds_in_a_child(Work work, unsigned seconds = 20) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(seconds);
    _exit(work() ? 0 : 1);
  }
  int status = -1;
  return waitpid(child, &status, 0) == child && status == 0;
}

bool counts_all_items() {
  std::vector<int> done(1000);
  parallel_for(1000, [&](std::int64_t item) { ++done[static_cast<std::size_t>(item)]; });
  return std::accumulate(done.begin(), done.end(), 0) == 1000;
}

class Fork : public testing::Test {
 protected:
  static constexpr int kThreads = 3;

  void SetUp() override {
#ifdef __SANITIZE_THREAD__
    GTEST_SKIP() << "ThreadSanitizer ends children that start threads";
#endif
    set_max_threads(kThreads);
    EXPECT_TRUE(counts_all_items());
  }
  void TearDown() override { set_max_threads(before_); }

 private:
  int before_ = max_threads();
};

TEST_F(Fork, LoopsRunInChildrenAndTheirChildren) {
  ASSERT_TRUE(counts_all_items());
  const auto child = [] { return counts_all_items() && holds_in_a_child(counts_all_items) && counts_all_items(); };
  EXPECT_TRUE(holds_in_a_child(child));
  EXPECT_TRUE(holds_in_a_child(child));
  EXPECT_TRUE(counts_all_items());
}

}  // namespace
}  // namespace hopwell::cpu
