// OpenMP over independent items, as every CPU kernel here uses it.
#pragma once

#include <omp.h>

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

// Calls body(context) on each of a team of threads and waits for them. In it BLAS runs on the calling thread only.
void fork_join(int threads, void (*body)(void* context), void* context);

// Calls body(item, state) for every item in [0, items), handed out in ascending order, from at most
// `most_threads` threads; `make_state()` makes each thread's scratch. What a body throws is rethrown here.
template <class MakeState, class Body>
void parallel_for(std::int64_t items, std::int64_t most_threads, MakeState make_state, Body body) {
  if (items <= 0) return;
  std::exception_ptr error;
  std::atomic<bool> failed{false};
  std::atomic<std::int64_t> next{0};
  auto work = [&] {
    try {
      auto state = make_state();
      for (std::int64_t item; !failed && (item = next.fetch_add(1)) < items;) body(item, state);
    } catch (...) {
      if (!failed.exchange(true)) error = std::current_exception();
    }
  };
  fork_join(
      static_cast<int>(std::min<std::int64_t>({omp_get_max_threads(), items, std::max<std::int64_t>(most_threads, 1)})),
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
