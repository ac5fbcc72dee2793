// Interleaves threads and asynchronous operations by a seeded random choice.
#include <algorithm>
#include <utility>

#include "machine.hpp"

namespace hopwell::arch::emu {

constinit thread_local Machine* machine HOPWELL_OF_THIS_MODULE = nullptr;
constinit thread_local Thread* current HOPWELL_OF_THIS_MODULE = nullptr;

void Machine::block(const char* what, uint32_t address, int parity) {
  current->state = Thread::State::blocked;
  current->waits_for = what;
  current->wait_address = address;
  current->wait_parity = parity;
  current->fiber.suspend();
}

void Machine::make_ready(Thread* t, const void* stack) {
  ready_.push_back({t, stack});
  if (is_late(*t)) ++late_ready_;
}

void Machine::pause() {
  make_ready(current, __builtin_frame_address(0));
  current->fiber.suspend();
}

void Machine::wake(Thread* t) {
  t->state = Thread::State::ready;
  make_ready(t, t->fiber.stack_pointer());
}

void Machine::wake(std::vector<Thread*>& waiting) {
  for (Thread* t : waiting) wake(t);
  waiting.clear();
}

// ---- asynchronous operations ----------------------------------------------------------------------------------------

void Machine::submit(Operation op) {
  if (recorder) recorder->submitted(op, Recorder::Engine::copies);
  if (options.async == Async::eager) return op.perform();
  operations_.push_back(std::move(op));
}

void Machine::submit_tensor(uint32_t rank, Operation op) {
  std::deque<Operation>& queue = ctas[rank].tensor_queue;
  if (recorder) recorder->submitted(op, Recorder::Engine::tensor);
  if (options.async == Async::eager) return op.perform();
  queue.push_back(std::move(op));
}

void Machine::submit_group(Thread& t, GroupQueue& queue, Operation op) {
  if (recorder) recorder->submitted(op, Recorder::Engine::copies, &queue);
  if (options.async == Async::eager) return op.perform();
  if (queue.operations.empty()) group_queues_.emplace_back(&t, &queue);
  queue.operations.push_back(std::move(op));
}

// Picks any operation that is not behind an arrival that tracks it, or such an arrival itself when it is the first in
// the queue.
bool Machine::step_group(GroupQueue& queue) {
  size_t free = 0;
  while (free < queue.operations.size() && !queue.operations[free].waits_for_earlier) ++free;
  const size_t chosen = free == 0 ? 0 : random.below(free);
  Operation op = std::move(queue.operations[chosen]);
  queue.operations.erase(queue.operations.begin() + ptrdiff_t(chosen));
  group_queue_emptied_ |= queue.operations.empty();
  op.perform();
  return true;
}

void Machine::complete_groups(GroupQueue& queue, uint64_t before) {
  size_t kept = 0;
  for (size_t i = 0; i < queue.operations.size(); ++i) {
    Operation& op = queue.operations[i];
    if (op.group < before && (!op.waits_for_earlier || kept == 0)) {
      std::exchange(op.perform, nullptr)();
    } else {
      if (kept < i) queue.operations[kept] = std::move(op);
      ++kept;
    }
  }
  group_queue_emptied_ |= kept == 0 && !queue.operations.empty();  // removed at the next pass over group_queues_
  queue.operations.resize(kept);
  if (recorder) recorder->waited(&queue, before);
}

bool Machine::step_async() {
  if (std::exchange(group_queue_emptied_, false))
    std::erase_if(group_queues_, [](const auto& q) { return q.second->operations.empty(); });
  size_t tensor = 0;
  for (const Cta& cta : ctas) tensor += !cta.tensor_queue.empty();
  const size_t choices = operations_.size() + tensor + group_queues_.size();
  if (choices == 0) return false;
  size_t k = random.below(choices);
  if (k < operations_.size()) {
    Operation op = std::move(operations_[k]);
    operations_[k] = std::move(operations_.back());
    operations_.pop_back();
    op.perform();
    return true;
  }
  k -= operations_.size();
  for (Cta& cta : ctas)
    if (!cta.tensor_queue.empty() && k-- == 0) {
      Operation op = std::move(cta.tensor_queue.front());
      cta.tensor_queue.pop_front();
      op.perform();
      return true;
    }
  return step_group(*group_queues_[k].second);
}

// ---- the loop -------------------------------------------------------------------------------------------------------

// Prefetches the record and the stack of the next thread while the current one runs. With thousands of threads these do
// not fit into the L1 cache, and waiting for them would take a quarter of the run time. The next thread is known in
// advance, unless the current thread makes others ready or draws a random number itself.
void Machine::prefetch_next() const {
  if (ready_.empty()) return;
  Random ahead = random;
  if (options.async == Async::random) ahead.next();  // the draw that chooses between threads and engines
  const Ready& next = ready_[ahead.below(ready_.size())];
  const auto lines = [](const void* at, int count) {
    for (int i = 0; i < count; ++i) __builtin_prefetch(static_cast<const std::byte*>(at) + 64 * i, 1);
  };
  lines(next.thread, 3);
  lines(next.stack, 4);
}

void Machine::schedule() {
  uint64_t switches = 0, rounds = 0;
  while (live_ > 0 && !stopped) {
    if (poll && (++rounds & 63) == 0) poll();
    if (ready_.empty()) {
      if (!step_async()) report_deadlock();
      continue;
    }
    if (options.async == Async::random && (random.next() & 3) == 0 && step_async()) continue;
    const size_t k = random.below(ready_.size());
    Thread* const next = ready_[k].thread;
    if (is_late(*next)) {
      if (late_ready_ < ready_.size() && random.below(256) != 0) continue;
      --late_ready_;
    }
    ready_[k] = ready_.back();
    ready_.pop_back();
    prefetch_next();
    ++report.statistics.switches;
    if (++switches > options.max_switches) report_deadlock();
    current = next;
    next->fiber.resume();
    current = nullptr;
  }
  while (!stopped && step_async()) {
  }
}

namespace {

// "CTA 0 threads 0-31, 64"
std::string thread_list(std::vector<const Thread*> threads) {
  std::sort(threads.begin(), threads.end(), [](const Thread* a, const Thread* b) {
    return std::pair(a->cta->rank, a->linear) < std::pair(b->cta->rank, b->linear);
  });
  std::string out;
  for (size_t i = 0; i < threads.size();) {
    size_t end = i + 1;
    while (end < threads.size() && threads[end]->cta == threads[i]->cta &&
           threads[end]->linear == threads[end - 1]->linear + 1)
      ++end;
    const bool same_cta = i > 0 && threads[i]->cta == threads[i - 1]->cta;
    out += same_cta ? ", " : format("%sCTA %u thread ", i ? "; " : "", threads[i]->cta->rank);
    out +=
        end - i == 1 ? format("%d", threads[i]->linear) : format("%d-%d", threads[i]->linear, threads[end - 1]->linear);
    i = end;
  }
  return out;
}

// Text for a thread that waits for the end of a phase although that phase is over: the barrier has advanced two or more
// phases since, and the thread now waits for a later phase of the same parity.
std::string lapped(const Thread& t, const Mbarrier& b) {
  uint64_t wanted = 0;
  for (const NextPhase& next : t.next_phases)
    if (next.address == b.address) wanted = next.phase;
  if ((wanted & 1) != uint64_t(t.wait_parity)) ++wanted;
  if (wanted >= b.phase) return "";
  return format(", lapped: it has not seen the end of phase %llu, and phases up to %llu are over,",
                static_cast<unsigned long long>(wanted), static_cast<unsigned long long>(b.phase - 1));
}

// One line for a collective that some of its threads called and others did not, or "" if it is complete. `first` is its
// first thread. `n` is 128 for a warpgroup, else the number of threads of the warp.
std::string incomplete(const Rendezvous& r, const Thread* first, int n, SiteTable& sites) {
  if (r.arrived == 0) return "";
  std::vector<const Thread*> callers;
  std::map<std::string, std::vector<const Thread*>> others;
  for (int i = 0; i < n; ++i) {
    const Thread& t = first[i];
    if (n <= 32 && !(r.mask >> i & 1)) continue;
    const bool waits = t.state == Thread::State::blocked;
    const std::string place = " at " + to_string(sites.resolve(t.site));
    if (waits && t.waits_for == r.instruction)
      callers.push_back(&t);
    else if (t.state == Thread::State::done)
      others["exited"].push_back(&t);
    else
      others[(waits ? "waits in " + std::string(t.waits_for) : "runs " + std::string(t.instruction)) + place].push_back(
          &t);
  }
  std::string text =
      format("\n    all %d threads must call %s; only these did: ", r.needed, r.instruction) + thread_list(callers);
  for (const auto& [where, threads] : others) text += "; " + where + ": " + thread_list(threads);
  return text;
}

}  // namespace

// Lists the waiting threads. Threads that wait at the same place for the same event share a line.
void Machine::report_deadlock() {
  const bool livelock = !ready_.empty();
  std::vector<std::string> order;
  std::map<std::string, std::vector<const Thread*>> groups;
  CallSite first;
  for (const Thread& t : threads) {
    if (t.state == Thread::State::done || (livelock && t.state != Thread::State::ready)) continue;
    std::string line = livelock ? std::string("runs ") + t.instruction : t.waits_for;
    if (t.wait_parity >= 0) {
      const Mbarrier* b = find_mbarrier(t.wait_address);
      line += format(" parity %d on ", t.wait_parity) + place(t.wait_address);
      if (b)
        line += format(" (in phase %llu; %u of %u arrivals missing, %lld bytes outstanding)",
                       static_cast<unsigned long long>(b->phase), b->pending, b->count,
                       static_cast<long long>(b->transactions)) +
                lapped(t, *b);
      else
        line += " (no mbarrier there)";
    }
    const CallSite site = sites.resolve(t.site);
    if (first.file.empty()) first = site;
    line += " at " + to_string(site);
    if (groups[line].empty()) order.push_back(line);
    groups[line].push_back(&t);
  }
  std::string text =
      livelock ? format("still running after %llu switches:", static_cast<unsigned long long>(options.max_switches))
               : std::string("no thread can go on and no asynchronous operation is pending:");
  for (const std::string& line : order) text += "\n    " + line + ": " + thread_list(groups[line]);
  for (const Cta& cta : ctas) {
    const int size = int(cta.threads.size());
    for (int i = 0; i < int(cta.warps.size()); ++i)
      text +=
          incomplete(cta.warps[size_t(i)].rendezvous, cta.threads[size_t(32 * i)], std::min(32, size - 32 * i), sites);
    for (int i = 0; i < int(cta.warpgroups.size()); ++i)
      text += incomplete(cta.warpgroups[size_t(i)].rendezvous, cta.threads[size_t(128 * i)], 128, sites);
  }
  report.findings.push_back({Kind::deadlock, text, first, {}, 1});
  stopped = true;
}

}  // namespace hopwell::arch::emu
