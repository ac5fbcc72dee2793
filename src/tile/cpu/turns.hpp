// Sums with a fixed order although many threads add to them.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>

namespace hopwell::cpu {

// Items 0, 1, 2, … pass each station in ascending order, on any threads. Different items may be at different stations
// at the same time. Every item must pass all stations, and items must be started in ascending order (as parallel_for
// does); otherwise the items after a missing one wait for ever.
class Turns {
 public:
  explicit Turns(std::int64_t stations) : next_(static_cast<std::size_t>(stations)) {}

  // Runs work() after all items before this one have passed the station. work() must not throw.
  template <class Work>
  void in_turn(std::int64_t station, std::int64_t item, Work work) {
    std::atomic<std::int64_t>& next = next_[static_cast<std::size_t>(station)].item;
    for (std::int64_t now; (now = next.load(std::memory_order_acquire)) != item;)
      next.wait(now, std::memory_order_acquire);
    work();
    next.store(item + 1, std::memory_order_release);
    next.notify_all();
  }

 private:
  struct alignas(64) Station {
    std::atomic<std::int64_t> item{0};
  };
  std::deque<Station> next_;
};

}  // namespace hopwell::cpu
