// Every allocation of every operator on the CPU fails once, on one thread and on several. The call ends with
// HOPWELL_OUT_OF_MEMORY and frees its memory, and the next call is right.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>

#include "cases/case.hpp"
#include "tile/cpu/parallel.hpp"

namespace {

constexpr std::int64_t kNever = INT64_MAX;
std::atomic<std::int64_t> allocations{0}, live{0};
std::atomic<std::int64_t> first_to_fail{kNever}, last_to_fail{kNever};  // numbers of allocations, from 0

void* allocate(std::size_t size, std::size_t alignment) {
  const std::int64_t number = allocations.fetch_add(1);
  if (number >= first_to_fail && number <= last_to_fail) throw std::bad_alloc();
  void* memory = nullptr;
  if (posix_memalign(&memory, std::max(alignment, sizeof(void*)), size) != 0) throw std::bad_alloc();
  ++live;
  return memory;
}
void release(void* memory) {
  if (memory != nullptr) --live;
  std::free(memory);
}

}  // namespace

void* operator new(std::size_t size) { return allocate(size, alignof(std::max_align_t)); }
void* operator new(std::size_t size, std::align_val_t alignment) {
  return allocate(size, static_cast<std::size_t>(alignment));
}
void* operator new(std::size_t size, const std::nothrow_t&) noexcept {  // std::stable_sort's
  try {
    return operator new(size);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void operator delete(void* memory) noexcept { release(memory); }
void operator delete(void* memory, std::size_t) noexcept { release(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { release(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { release(memory); }

namespace hopwell::cases {
namespace {

// While it lives, allocations `first` to `last` from now on fail.
class Shortage {
 public:
  Shortage(std::int64_t first, std::int64_t last) {
    allocations = 0;
    last_to_fail = last;
    first_to_fail = first;
  }
  ~Shortage() { first_to_fail = kNever; }
};

// The status of a call whose allocations `first` to `last` fail. `made` is set to the number of its allocations.
hopwell_status status_of(const Instance& instance, std::int64_t first, std::int64_t last, std::int64_t& made) {
  const Shortage shortage(first, last);
  hopwell_status status = HOPWELL_OK;
  try {
    instance.call("cpu", nullptr);
  } catch (const Error& error) {
    status = error.status();
  }
  made = allocations;
  return status;
}

std::vector<std::vector<std::byte>> memory_of(const Instance& instance) {
  std::vector<std::vector<std::byte>> memory;
  for (const Array& array : instance.arrays) memory.push_back(array.memory());
  return memory;
}
void restore(Instance& instance, const std::vector<std::vector<std::byte>>& memory) {
  for (std::size_t i = 0; i < memory.size(); ++i) instance.arrays[i].restore(memory[i]);
}

// Fails allocation 0, 1, … of a call, alone or with all that follow, until a call makes so few that it succeeds.
void expect_errors(Instance& instance, bool once) {
  const auto before = memory_of(instance);
  instance.call("cpu", nullptr);
  const auto right = memory_of(instance);
  bool failed = true;
  for (std::int64_t number = 0; failed; ++number) {
    restore(instance, before);
    std::int64_t made = 0;
    const std::int64_t live_before = live;
    const hopwell_status status = status_of(instance, number, once ? number : kNever, made);
    EXPECT_EQ(live, live_before) << "allocation " << number << " failed";
    failed = made > number;
    ASSERT_EQ(status, failed ? HOPWELL_OUT_OF_MEMORY : HOPWELL_OK) << "allocation " << number << " of " << made;
  }
  EXPECT_TRUE(memory_of(instance) == right);
}

class OutOfMemory : public testing::TestWithParam<const Suite*> {};

TEST_P(OutOfMemory, IsAnError) {
  const Suite& suite = *GetParam();
  ASSERT_FALSE(suite.allocating.empty()) << "cases/" << suite.op << ".cpp: name such cases in suite.allocating";
  const int threads_before = cpu::max_threads();
  for (const std::string& name : suite.allocating) {
    SCOPED_TRACE(name);
    Random random(1);
    Instance instance = suite.case_named(name).make(random);
    for (const int threads : {1, 3}) {
      cpu::set_max_threads(threads);
      for (const bool once : {true, false}) expect_errors(instance, once);
    }
  }
  cpu::set_max_threads(threads_before);
}

INSTANTIATE_TEST_SUITE_P(Operators, OutOfMemory, testing::ValuesIn([] {
                           std::vector<const Suite*> all;
                           for (const Suite& suite : suites()) all.push_back(&suite);
                           return all;
                         }()),
                         [](const auto& suite) { return suite.param->op; });

TEST(OutOfMemory, ALoopRunsWithoutMoreThreads) {
  const int before = cpu::max_threads();
  cpu::set_max_threads(2);
  cpu::parallel_for(100, [](std::int64_t) {});
  cpu::set_max_threads(20);  // more than there are yet
  std::atomic<int> done{0};
  {
    const Shortage shortage(0, kNever);
    try {
      cpu::parallel_for(100, [&](std::int64_t) { ++done; });
    } catch (const std::bad_alloc&) {
      done = -1;
    }
  }
  cpu::set_max_threads(before);
  EXPECT_EQ(done, 100);
}

}  // namespace
}  // namespace hopwell::cases
