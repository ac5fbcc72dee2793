// OpenMP over independent items, as every CPU kernel here uses it.
#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <new>

#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#endif

namespace hopwell::cpu {

// libgomp is not instrumented, so ThreadSanitizer does not see that a parallel region's start and end order what threads do: these
// two say so at the fork and at the join. The address is global because captured variables may not be read before the acquire.
#ifdef __SANITIZE_THREAD__
inline char tsan_fork, tsan_join;
inline void tsan_release(char& edge) { __tsan_release(&edge); }
inline void tsan_acquire(char& edge) { __tsan_acquire(&edge); }
#else
inline constexpr char tsan_fork = 0, tsan_join = 0;
inline void tsan_release(char) {}
inline void tsan_acquire(char) {}
#endif

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

// Calls body(item, state) for every item in [0, items), handed out in ascending order, from as many threads as pay; `make_state()`
// makes each thread's scratch. What a body throws is rethrown here. Bodies may call BLAS, which then runs on the calling thread only.
template <class MakeState, class Body>
void parallel_for(std::int64_t items, MakeState make_state, Body body) {
  if (items <= 0) return;
  std::exception_ptr error;
  std::atomic<bool> failed{false};
  std::atomic<std::int64_t> next{0};
  const int threads = static_cast<int>(std::min<std::int64_t>(omp_get_max_threads(), items));
  tsan_release(tsan_fork);
#pragma omp parallel num_threads(threads) default(shared)
  {
    tsan_acquire(tsan_fork);
    // A team of one is not an active parallel region: without this OpenBLAS would start threads of its own in it, and results
    // could depend on how many. The setting is this region's and ends with it.
    omp_set_num_threads(1);
    try {
      auto state = make_state();
      for (std::int64_t item; !failed && (item = next.fetch_add(1)) < items;) body(item, state);
    } catch (...) {
      if (!failed.exchange(true)) error = std::current_exception();
    }
    tsan_release(tsan_join);
  }
  tsan_acquire(tsan_join);
  if (error) std::rethrow_exception(error);
}

template <class Body>
void parallel_for(std::int64_t items, Body body) {
  parallel_for(items, [] { return 0; }, [&](std::int64_t item, int) { body(item); });
}

}  // namespace hopwell::cpu
