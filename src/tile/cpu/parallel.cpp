#include "tile/cpu/parallel.hpp"

#include <pthread.h>

#include <functional>
#include <thread>

#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#endif

namespace hopwell::cpu {
namespace {

// libgomp is not instrumented, so ThreadSanitizer does not see that the start and the end of a parallel region order
// what threads do. These say so; without the sanitizer they are nothing.
enum class Edge { kFork, kJoin };
#ifdef __SANITIZE_THREAD__
char edges[2];
void release(Edge edge) { __tsan_release(&edges[static_cast<int>(edge)]); }
void acquire(Edge edge) { __tsan_acquire(&edges[static_cast<int>(edge)]); }
#else
void release(Edge) {}
void acquire(Edge) {}
#endif

struct Work {
  void (*body)(void* context);
  void* context;
};

void member(const Work& work) {
  acquire(Edge::kFork);
  // A team of one is not an active parallel region: without this OpenBLAS would start threads of its own in it, and
  // results could depend on how many. The setting is this region's and ends with it.
  omp_set_num_threads(1);
  work.body(work.context);
  release(Edge::kJoin);
}

// Not instrumented, since its threads fetch their arguments before they can acquire.
__attribute__((no_sanitize("thread"))) void team(int threads, const Work& work) {
#pragma omp parallel num_threads(threads)
  member(work);
}

// libgomp keeps the threads of a team for the thread that began it. In a forked child the one thread there is remembers
// a team whose threads stayed behind, and would wait for them for ever. A thread of its own for each region has no past.
thread_local bool came_through_fork = false;
const int at_fork = pthread_atfork(nullptr, nullptr, [] { came_through_fork = true; });

}  // namespace

void fork_join(int threads, void (*body)(void* context), void* context) {
  const Work work{body, context};
  release(Edge::kFork);
  if (came_through_fork && threads > 1)
    std::thread(team, threads, std::cref(work)).join();
  else
    team(threads, work);
  acquire(Edge::kJoin);
}

}  // namespace hopwell::cpu
