#include <hopwell/interrupt.hpp>

#include <ctime>
#include <utility>

namespace hopwell {
namespace {

constexpr std::int64_t kInterval = 50'000'000;  // nanoseconds

thread_local InterruptCheck* current = nullptr;

// The coarse clock ticks every few milliseconds, and takes a few nanoseconds to read.
std::int64_t now() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC_COARSE, &time);
  return std::int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

}  // namespace

const char* Interrupted::what() const noexcept { return "interrupted"; }

InterruptCheck::InterruptCheck(bool (*wanted)())
    : wanted_(wanted), next_(now() + kInterval), outer_(std::exchange(current, this)) {}
InterruptCheck::~InterruptCheck() { current = outer_; }

void InterruptCheck::poll() {
  if (current == nullptr) return;
  const std::int64_t time = now();
  if (time < current->next_) return;
  current->next_ = time + kInterval;
  if (current->wanted_()) throw Interrupted();
}

}  // namespace hopwell
