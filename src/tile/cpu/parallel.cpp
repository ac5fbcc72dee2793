#include "tile/cpu/parallel.hpp"

#include <pthread.h>
#include <sched.h>

#include <charconv>
#include <condition_variable>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <hopwell/error.hpp>
#include <hopwell/interrupt.hpp>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/float_mode.hpp"

namespace hopwell::cpu {
namespace {

thread_local bool in_loop = false;
thread_local const std::atomic<bool>* failed_flag = nullptr;  // of the loop that this thread is in

// A loop, on the stack of the thread that runs it.
struct Loop {
  void (*body)(void* context);
  void* context;
  int wanted;      // helpers that may still come
  int inside = 0;  // that are at it
};

// Threads that help others with their loops. They are never joined: they sleep until the process ends.
class Helpers {
 public:
  void run(Loop& loop) {
    std::unique_lock lock(mutex_);
    start(loop.wanted);
    loops_.push_back(&loop);
    for (int i = std::min(loop.wanted, idle_); i > 0; --i) wanted_.notify_one();
    lock.unlock();
    in_loop = true;
    loop.body(loop.context);
    in_loop = false;
    lock.lock();
    std::erase(loops_, &loop);  // a thread that arrives later finds no item
    left_.wait(lock, [&] { return loop.inside == 0; });
  }

 private:
  // With the lock held. Fewer than asked for will do, if the system has no more.
  void start(int count) noexcept {
    if (count_ >= count) return;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the program's own threads
    try {
      for (; count_ < count; ++count_) std::thread([this] { help(); }).detach();
    } catch (const std::exception&) {  // no thread or no memory for one: fewer threads run the loop
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  [[noreturn]] void help() {
    in_loop = true;
    const runtime::DefaultFloatMode mode;  // a thread begins with the mode of the one that started it
    std::unique_lock lock(mutex_);
    for (;;) {
      ++idle_;
      wanted_.wait(lock, [&] { return !loops_.empty(); });
      --idle_;
      Loop& loop = *loops_.front();
      if (--loop.wanted == 0) loops_.erase(loops_.begin());
      ++loop.inside;
      lock.unlock();
      loop.body(loop.context);
      lock.lock();
      if (--loop.inside == 0) left_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable wanted_, left_;
  std::vector<Loop*> loops_;  // that want helpers
  int count_ = 0, idle_ = 0;
};

// No destructor runs at the end of the process, when helpers may still look at it. A forked child has none of its
// parent's helpers, and perhaps a lock that one held: it begins with others.
alignas(Helpers) std::byte memory[sizeof(Helpers)];
Helpers* helpers = new (memory) Helpers;
const int at_fork = pthread_atfork(nullptr, nullptr, [] { helpers = new (memory) Helpers; });

constexpr int kMostThreads = 1 << 10;

// Ours must be a number; 0: it is not set.
int own_threads() {
  const char* text = std::getenv("HOPWELL_NUM_THREADS");
  if (text == nullptr || *text == '\0') return 0;
  int threads = -1;
  const char* end = text + std::strlen(text);
  const auto [rest, error] = std::from_chars(text, end, threads);
  if (error != std::errc() || rest != end || threads < 0)
    throw Error(HOPWELL_INVALID_ARGUMENT,
                std::string("HOPWELL_NUM_THREADS must be a number from 1 to 2147483647, or 0 for the default; got '") +
                    text + "'");
  return std::min(threads, kMostThreads);
}

// OpenMP's variable may hold several numbers, and the first counts. OpenMP itself complains of a bad one, which is
// ignored here.
int openmp_threads() {
  const char* text = std::getenv("OMP_NUM_THREADS");
  int threads = 0;
  if (text != nullptr) std::from_chars(text + std::strspn(text, " "), text + std::strcspn(text, ","), threads);
  return std::clamp(threads, 0, kMostThreads);
}

int default_threads() {
  if (const int threads = own_threads(); threads > 0) return threads;
  if (const int threads = openmp_threads(); threads > 0) return threads;
  cpu_set_t processors;
  if (sched_getaffinity(0, sizeof processors, &processors) == 0) return std::max(CPU_COUNT(&processors), 1);
  return static_cast<int>(std::max(std::thread::hardware_concurrency(), 1U));
}

std::atomic<int> threads_set{0};

}  // namespace

int max_threads() {
  if (in_loop) return 1;
  if (const int threads = threads_set.load(std::memory_order_relaxed); threads > 0) return threads;
  static const int unless_set = default_threads();
  return unless_set;
}

void set_max_threads(int threads) { threads_set.store(threads, std::memory_order_relaxed); }

LoopScope::LoopScope(const std::atomic<bool>& failed) : outer_(std::exchange(failed_flag, &failed)) {}
LoopScope::~LoopScope() { failed_flag = outer_; }

void interruption_point() {
  struct Failed {};  // parallel_for() has the first error already
  if (failed_flag != nullptr && failed_flag->load(std::memory_order_relaxed)) throw Failed();
  InterruptCheck::poll();
}

void run_on_threads(int threads, void (*body)(void* context), void* context) {
  if (threads <= 1 || in_loop) return body(context);
  Loop loop{.body = body, .context = context, .wanted = threads - 1};
  helpers->run(loop);
}

}  // namespace hopwell::cpu
