// Sets up clusters, runs them, and checks their state at the end.
#include "launch.hpp"

#include <sys/mman.h>

#include <unistd.h>
#include <algorithm>
#include <charconv>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <new>
#include <optional>
#include <stdexcept>
#include <string_view>

#include "machine.hpp"
#include "wgmma.hpp"

namespace hopwell::arch::emu {

constinit Watched watched;
thread_local void (*poll)() = nullptr;

namespace {
StackPool& stack_pool() {
  thread_local StackPool pool;
  return pool;
}

// Shared-memory windows of a cluster's CTAs, reused by the next launch, which usually needs the same number and size. A
// new mapping costs time, because the system clears it page by page. The bytes behind the end of a window are
// inaccessible.
class WindowPool {
 public:
  WindowPool() = default;
  WindowPool(const WindowPool&) = delete;
  WindowPool& operator=(const WindowPool&) = delete;
  ~WindowPool() { unmap(); }
  std::byte* take(size_t ranks, size_t bytes) {
    if (memory_ && ranks == ranks_ && bytes == bytes_) return memory_;
    unmap();
    void* memory = mmap(nullptr, ranks * kWindowBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    memory_ = static_cast<std::byte*>(memory), ranks_ = ranks, bytes_ = bytes;
    for (size_t rank = 0; rank < ranks; ++rank) mprotect(memory_ + rank * kWindowBytes, bytes, PROT_READ | PROT_WRITE);
    return memory_;
  }

 private:
  void unmap() {
    if (memory_) munmap(memory_, ranks_ * kWindowBytes);
    memory_ = nullptr;
  }
  std::byte* memory_ = nullptr;
  size_t ranks_ = 0, bytes_ = 0;
};

void require(bool condition, const std::string& what) {
  if (!condition) throw std::invalid_argument("emulated launch: " + what);
}
}  // namespace

Warpgroup::Warpgroup() = default;
Warpgroup::~Warpgroup() = default;
Warpgroup::Warpgroup(Warpgroup&&) noexcept = default;

Machine::Machine(const LaunchShape& launch_shape, const Options& launch_options,
                 const std::function<void()>& launch_kernel)
    : shape(launch_shape),
      options(launch_options),
      kernel(launch_kernel),
      work(current_work_count()),
      random(launch_options.seed),
      stacks_(stack_pool()) {
  const Extent &g = shape.grid, &b = shape.block, &c = shape.cluster;
  require(g.volume() > 0 && b.volume() > 0 && c.volume() > 0, "empty grid, block or cluster");
  require(b.volume() <= 1024, format("%u threads in a block; at most 1024", b.volume()));
  require(c.volume() <= 16, format("%u CTAs in a cluster; at most 16", c.volume()));
  require(g.x % c.x == 0 && g.y % c.y == 0 && g.z % c.z == 0, "the grid is not a multiple of the cluster");
  require(shape.shared_bytes <= 227 * 1024,
          format("%zu bytes of shared memory; at most %d", shape.shared_bytes, 227 * 1024));
  thread_local WindowPool windows;
  window = windows.take(c.volume(), (kReservedBytes + shape.shared_bytes + 4095) & ~size_t{4095});
  window_bytes = size_t{c.volume()} * kWindowBytes;
  const auto first = reinterpret_cast<uintptr_t>(window);
  work ? watched.add(0, UINTPTR_MAX) : watched.add(first, first + window_bytes);
  machine = this;
}

Machine::~Machine() {
  machine = nullptr;
  current = nullptr;
}

Report Machine::run() {
  for (uint32_t i = 0; i < shape.grid.volume() / shape.cluster.volume(); ++i) clusters_left.push_back(i);
  while (!clusters_left.empty() && !stopped) {
    const uint32_t number = clusters_left.front();
    clusters_left.pop_front();
    run_cluster(number);
  }
  return std::move(report);
}

void Machine::thread_main() {
  kernel();
  Thread& t = *current;
  t.instruction = "exit";
  if (!t.loads.empty()) {
    const Epoch issue{0, t.agent, t.loads.front().site};
    find(Kind::pending, "exits with a tcgen05.ld that no tcgen05.wait::ld waited for", &issue);
  }
  if (!t.copies.operations.empty()) find(Kind::pending, "exits with a cp.async that no cp.async.wait_group waited for");
  if (!t.bulk.operations.empty())
    find(Kind::pending,
         "exits with a bulk copy whose shared-memory source may be read after the exit: no cp.async.bulk.wait_group");
  if (!t.cta->warpgroups.empty() && size_t(t.linear / 128) < t.cta->warpgroups.size() &&
      !t.cta->warpgroups[size_t(t.linear / 128)].operations.empty())
    find(Kind::pending, "exits with wgmma operations that no wgmma.wait_group waited for");
  if (t.in_cluster_barrier) find(Kind::barrier, "exits between barrier.cluster.arrive and barrier.cluster.wait");
  t.state = Thread::State::done;
  --live_;
  --cluster_barrier.needed;
  finish_cluster_barrier();
  if (--t.cta->live == 0 && !t.cta->tensor_queue.empty())
    find(Kind::pending, "the CTA exits with tcgen05 operations pending: no tcgen05.commit and wait");
  t.fiber.suspend();
  __builtin_unreachable();
}

void Machine::run_cluster(uint32_t number) {
  const uint32_t n_ctas = shape.cluster.volume(), n_threads = shape.block.volume(), n_warps = (n_threads + 31) / 32;
  const uint32_t cx = shape.grid.x / shape.cluster.x, cy = shape.grid.y / shape.cluster.y;
  const Index first{number % cx * shape.cluster.x, number / cx % cy * shape.cluster.y,
                    number / cx / cy * shape.cluster.z};
  mbarriers.clear();
  agents.clear();
  reader_fenced_agents.clear();
  operations_.clear();
  group_queues_.clear();
  ready_.clear();
  late_ready_ = 0;
  cluster_barrier = {};
  cluster_barrier.needed = int(n_ctas * n_threads);
  cluster_arrived.clear();
  threads = std::vector<Thread>(size_t{n_ctas} * n_threads);
  ctas = std::vector<Cta>(n_ctas);
  if (work) work->start_cluster(n_ctas, n_warps);
  live_ = int(threads.size());
  for (uint32_t rank = 0; rank < n_ctas; ++rank) {
    Cta& cta = ctas[rank];
    cta.rank = rank;
    cta.index = {first.x + rank % shape.cluster.x, first.y + rank / shape.cluster.x % shape.cluster.y,
                 first.z + rank / shape.cluster.x / shape.cluster.y};
    cta.shared = window + size_t{rank} * kWindowBytes;
    poison(rank * kWindowBytes, uint32_t(kReservedBytes + shape.shared_bytes));
    if (options.check) cta.shadow.reset(kReservedBytes + shape.shared_bytes);
    cta.warps.resize(n_warps);
    for (Warp& warp : cta.warps) warp.elected_lane = int(random.below(std::min(32u, n_threads)));
    cta.warpgroups.resize(n_threads / 128);
    cta.live = int(n_threads);
    for (uint32_t i = 0; i < n_threads; ++i) {
      Thread& t = threads[size_t{rank} * n_threads + i];
      t.cta = &cta;
      t.linear = int(i);
      t.warp = int(i / 32);
      t.lane = int(i % 32);
      t.index = {i % shape.block.x, i / shape.block.x % shape.block.y, i / shape.block.x / shape.block.y};
      t.agent = new_agent("", "no barrier, mbarrier or other synchronisation in between", &t);
      t.knows.ordered.raise(t.agent, 1);
      t.stack = stacks_.take();
      // Different offsets: if all stacks ended at the same offset of their pages, they would compete for one set of the
      // L1 cache.
      t.fiber.create(t.stack, StackPool::kBytes - i % 64 * 64, [](void*) { machine->thread_main(); }, nullptr);
      cta.threads.push_back(&t);
      make_ready(&t, t.fiber.stack_pointer());
    }
  }
  if (recorder) recorder->start_cluster();
  std::exception_ptr interruption;
  try {
    schedule();
  } catch (const Stopped&) {
  } catch (...) {
    interruption = std::current_exception();
    stopped = true;
  }
  current = nullptr;
  if (recorder) recorder->end_cluster();
  for (Thread& t : threads)
    for (Operation& write : t.unfinished_writes) write.perform();
  if (!stopped) check_end_of_cluster();
  for (size_t first = 0; work && first < threads.size(); first += 32) {
    const size_t end = std::min(first + 32, threads.size());
    uint64_t slots = 0;
    for (size_t i = first; i < end; ++i) slots = std::max(slots, threads[i].instructions);
    work->of(threads[first].cta->rank, threads[first].warp).slots += slots;
  }
  for (size_t i = 0; work && work->kernel.empty() && i < threads.size(); ++i) {
    const std::string path = sites.resolve(threads[i].site).file;
    work->kernel = path.substr(path.find_last_of('/') + 1);
  }
  for (Thread& t : threads) stacks_.give_back(t.stack);
  if (interruption) std::rethrow_exception(interruption);
}

void Machine::check_end_of_cluster() {
  for (const auto& [address, b] : mbarriers)
    if (b.transactions != 0)
      find(
          Kind::transaction,
          format("at the end the mbarrier at %s waits for %lld more bytes: %llu expected in all, %llu arrived",
                 place(address).c_str(), static_cast<long long>(b.transactions),
                 static_cast<unsigned long long>(b.expected_bytes), static_cast<unsigned long long>(b.completed_bytes)),
          &b.init);
  for (const Cta& cta : ctas)
    if (cta.tmem_used)
      find(Kind::tensor_memory,
           format("CTA %u ends with %d columns of tensor memory allocated: tcgen05.dealloc is missing for the "
                  "allocation by ",
                  cta.rank, 32 * __builtin_popcount(cta.tmem_used)) +
               describe(cta.tmem_allocation),
           &cta.tmem_allocation);
}

Report launch(const LaunchShape& shape, const Options& options, const std::function<void()>& kernel) {
  if (machine) throw std::logic_error("emulated launch: inside of an emulated kernel");
  Recording* const recording = current_recording();
  if (!recording) return Machine(shape, options, kernel).run();
  const WorkCount count(recording->rates);
  Machine recorded(shape, options, kernel);
  Recorder recorder(recorded, count);
  recorded.recorder = &recorder;
  Report report = recorded.run();
  recording->launches.push_back(recorder.finish(report));
  return report;
}

namespace {
thread_local Session* session = nullptr;

void append(Report& all, Report&& one) {
  for (Finding& f : one.findings) all.findings.push_back(std::move(f));
  for (SynchronisationCount& s : one.synchronisation) {
    const auto same = std::find_if(all.synchronisation.begin(), all.synchronisation.end(),
                                   [&](const auto& a) { return a.call == s.call; });
    if (same == all.synchronisation.end())
      all.synchronisation.push_back(std::move(s));
    else
      same->calls += s.calls;
  }
  for (BarrierArray& b : one.barriers)
    if (std::find(all.barriers.begin(), all.barriers.end(), b) == all.barriers.end())
      all.barriers.push_back(std::move(b));
  all.statistics.switches += one.statistics.switches;
  all.statistics.shared_accesses += one.statistics.shared_accesses;
  all.statistics.tensor_operations += one.statistics.tensor_operations;
  all.statistics.bulk_copies += one.statistics.bulk_copies;
}
}  // namespace

Session::Session(Options session_options) : options(std::move(session_options)), outer_(session) { session = this; }
Session::~Session() { session = outer_; }

namespace {

// HOPWELL_EMULATOR_SEED: a number, which also picks the schedule. HOPWELL_EMULATOR_CHECKER=off: numbers and hangs only.
Options options_of_environment() {
  Options options;
  if (const char* seed = std::getenv("HOPWELL_EMULATOR_SEED")) {
    const char* end = seed + std::strlen(seed);
    const auto [rest, error] = std::from_chars(seed, end, options.seed);
    require(error == std::errc() && rest == end,
            format("HOPWELL_EMULATOR_SEED must be a number from 0 to 2^64 - 1; got %s", seed));
    options.async = Async(options.seed % 3);
  }
  if (const char* checker = std::getenv("HOPWELL_EMULATOR_CHECKER")) {
    const std::string_view text = checker;
    require(text == "on" || text == "off", format("HOPWELL_EMULATOR_CHECKER must be on or off; got %s", checker));
    options.check = text == "on";
  }
  return options;
}

// Value of the variable: CHIP:FILE, chip b200 or h200. HOPWELL_EMULATOR_MODEL appends the demand of each launch to the
// file, one line of JSON per launch. HOPWELL_EMULATOR_REPORT writes a page about all launches so far to the file.
struct FileOfEnvironment {
  Rates rates;
  std::string file;
};
std::optional<FileOfEnvironment> file_of_environment(const char* variable) {
  const char* value = std::getenv(variable);
  if (!value) return std::nullopt;
  const std::string_view text = value, chip = text.substr(0, text.find(':'));
  require(chip.size() + 1 < text.size() && (chip == "b200" || chip == "h200"),
          format("%s must be b200:FILE or h200:FILE; got %s", variable, value));
  return FileOfEnvironment{chip == "h200" ? kH200 : kB200, std::string(text.substr(chip.size() + 1))};
}

void append_line(const std::string& path, const std::string& line) {
  std::FILE* file = std::fopen(path.c_str(), "ab");
  const bool written = file && std::fputs((line + "\n").c_str(), file) >= 0;
  require((!file || std::fclose(file) == 0) && written, "cannot write " + path);
}

// Covers the launches of all host threads. The number of recorded launches is limited, so that a browser can open the
// page; later launches run without a recording.
Report launch_for_page(const FileOfEnvironment& page, const LaunchShape& shape, const std::function<void()>& kernel) {
  constexpr size_t kMostLaunches = 32;
  static std::mutex mutex;
  static std::vector<LaunchRecord> launches;
  static size_t left_out = 0;
  const std::lock_guard lock(mutex);
  std::optional<Recording> recording;
  if (launches.size() < kMostLaunches) recording.emplace(page.rates);
  Report report = launch(shape, options_of_environment(), kernel);
  if (recording)
    launches.push_back(std::move(recording->launches.front()));
  else
    ++left_out;
  write_launch_page(page.file, launches, page.rates, left_out);
  return report;
}

}  // namespace

void launch_in_session(const LaunchShape& shape, const std::function<void()>& kernel) {
  if (session) {
    append(session->report, launch(shape, session->options, kernel));
    if (session->options.throw_findings && !session->report.clean()) throw CheckFailed(session->report.text());
    return;
  }
  Report report;
  const std::optional<FileOfEnvironment> model = file_of_environment("HOPWELL_EMULATOR_MODEL"),
                                         page = file_of_environment("HOPWELL_EMULATOR_REPORT");
  require(!model || !page, "HOPWELL_EMULATOR_MODEL and HOPWELL_EMULATOR_REPORT are set; only one at a time can be");
  if (page) {
    report = launch_for_page(*page, shape, kernel);
  } else if (model) {
    const WorkCount count(model->rates);
    report = launch(shape, options_of_environment(), kernel);
    append_line(model->file, count.json());
  } else {
    report = launch(shape, options_of_environment(), kernel);
  }
  if (!report.clean()) throw CheckFailed(report.text());
}

namespace {
void on_fault(int, siginfo_t* info, void*) {
  char text[256];
  const int n = snprintf(text, sizeof text, "emulator: memory fault at %p, CTA %u thread %d, last instruction %s\n",
                         info->si_addr, current ? current->cta->rank : 0, current ? current->linear : -1,
                         current ? current->instruction : "none");
  if (write(2, text, size_t(n)) < 0) _exit(138);
  _exit(139);
}
}  // namespace

void install_fault_handler() {
  static std::byte alternate_stack[65536];
  stack_t stack{};
  stack.ss_sp = alternate_stack;
  stack.ss_size = sizeof alternate_stack;
  sigaltstack(&stack, nullptr);
  struct sigaction action{};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, nullptr);
}

}  // namespace hopwell::arch::emu
