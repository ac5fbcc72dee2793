// Loops over independent items on threads of the library's own, for all CPU kernels. Between loops the threads sleep,
// so that they do not delay other threads of the process, such as PyTorch's.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <new>

namespace hopwell::cpu {

// A thread's scratch: uninitialised, cache-line aligned.
template <class T>
class Scratch {
 public:
  explicit Scratch(std::int64_t count)
      : data_(static_cast<T*>(::operator new(static_cast<std::size_t>(count) * sizeof(T), std::align_val_t{64}))) {}
  T* get() const { return data_.get(); }

 private:
  struct Free {
    void operator()(T* pointer) const { ::operator delete(pointer, std::align_val_t{64}); }
  };
  std::unique_ptr<T, Free> data_;
};

// How many threads a loop that starts here may have, the calling one included: as set, else HOPWELL_NUM_THREADS (an
// Error if that is no number), else OMP_NUM_THREADS, else as many as this process has processors. In a loop it is 1.
int max_threads();
void set_max_threads(int threads);  // at least 1, or 0: no longer set

// Calls body(context), which must not throw, on this thread and, if they come before it has returned, on up to
// `threads` - 1 others; returns when all have. The others compute in the default floating-point mode; this one computes
// in its caller's, which for an operator is the default mode too (runtime/float_mode.hpp).
void run_on_threads(int threads, void (*body)(void* context), void* context);

// Throws if this thread's loop has failed on another thread, or if the caller interrupts its call
// (hopwell/interrupt.hpp). parallel_for() comes here between items. An item that takes long comes here too, unless
// others wait for it (Turns).
void interruption_point();

// While it lives, interruption_point() on this thread looks at a loop's flag.
class LoopScope {
 public:
  explicit LoopScope(const std::atomic<bool>& failed);
  ~LoopScope();
  LoopScope(const LoopScope&) = delete;
  LoopScope& operator=(const LoopScope&) = delete;

 private:
  const std::atomic<bool>* outer_;
};

// Calls body(item, state) for every item in [0, items), handed out in ascending order, from at most
// `most_threads` threads; `make_state()` makes each thread's scratch. An exception of a body is rethrown here.
template <class MakeState, class Body>
void parallel_for(std::int64_t items, std::int64_t most_threads, MakeState make_state, Body body) {
  if (items <= 0) return;
  std::exception_ptr error;
  std::atomic<bool> failed{false};
  std::atomic<std::int64_t> next{0};
  auto work = [&] {
    const LoopScope scope(failed);
    try {
      auto state = make_state();
      for (;;) {
        interruption_point();  // before an item is handed out: one that is must be run, or Turns would wait for it
        const std::int64_t item = next.fetch_add(1);
        if (item >= items) break;
        body(item, state);
      }
    } catch (...) {
      if (!failed.exchange(true)) error = std::current_exception();
    }
  };
  run_on_threads(
      static_cast<int>(std::min<std::int64_t>({max_threads(), items, std::max<std::int64_t>(most_threads, 1)})),
      [](void* context) { (*static_cast<decltype(work)*>(context))(); }, &work);
  if (error) std::rethrow_exception(error);
}

template <class MakeState, class Body>
void parallel_for(std::int64_t items, MakeState make_state, Body body) {
  parallel_for(items, items, make_state, body);
}

template <class Body>
void parallel_for(std::int64_t items, Body body) {
  parallel_for(items, [] { return 0; }, [&](std::int64_t item, int) { body(item); });
}

}  // namespace hopwell::cpu
