// The emulated machine: one cluster of CTAs at a time, its threads, barriers and memories, and the scheduler.
// Internal to the emulator; kernels see only arch functions, which call what sm80.hpp, sm90.hpp and sm100.hpp beside
// this declare.
#pragma once

#include <array>
#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "clock.hpp"
#include "fiber.hpp"
#include "launch.hpp"
#include "members.hpp"
#include "options.hpp"
#include "recorder.hpp"
#include "report.hpp"
#include "shadow.hpp"
#include "work.hpp"

namespace hopwell::arch::emu {

/// A shared address is what `mapa` gives: the CTA's rank in the cluster above bit 24, the offset in its window below.
inline constexpr uint32_t kWindowBytes = 1u << 24;
/// Shared memory that the system keeps, below the dynamic part of the window.
inline constexpr uint32_t kReservedBytes = 1024;
/// What memory holds before anything is written and while an asynchronous write is on its way: NaN as fp32 and as bf16.
inline constexpr uint32_t kPoison = 0x7fe1dead;
inline constexpr int kTmemLanes = 128, kTmemColumns = 512;

constexpr uint32_t rank_of(uint32_t address) { return address / kWindowBytes; }
constexpr uint32_t offset_of(uint32_t address) { return address % kWindowBytes; }
constexpr uint32_t in_rank(uint32_t rank, uint32_t address) { return rank * kWindowBytes + offset_of(address); }

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 0x2545f4914f6cdd1du) { next(); }
  uint64_t next() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return state_ * 0x2545f4914f6cdd1du;
  }
  uint32_t below(size_t n) { return uint32_t((next() >> 32) * n >> 32); }
  int bit() { return int(next() >> 63); }
  bool chance(double p) { return double(next() >> 11) * 0x1.0p-53 < p; }

 private:
  uint64_t state_;
};

struct Cta;

/// Thrown to end a launch from the scheduler's own stack.
struct Stopped {};

/// A queued asynchronous operation. If it has an owner, it belongs to a commit group of the owner.
struct Operation {
  std::function<void()> perform;
  uint64_t group = 0;
  bool waits_for_earlier = false;  // an mbarrier arrival that tracks the operations queued before it
};

/// Commit groups of one thread (cp.async, or bulk copies).
struct GroupQueue {
  std::vector<Operation> operations;
  uint64_t open_group = 1;  // group that the next operation joins
  AgentId agent = kNoAgent;
  uint32_t issued = 0;  // steps of the agent

  /// The next step, of the open group.
  uint32_t issue() {
    if (last_steps_.empty() || last_steps_.back().group != open_group) last_steps_.push_back({open_group, 0});
    return last_steps_.back().step = ++issued;
  }
  uint32_t last_step_before(uint64_t group) const {
    auto it = last_steps_.rbegin();
    while (it != last_steps_.rend() && it->group >= group) ++it;
    return it == last_steps_.rend() ? 0 : it->step;
  }

 private:
  struct LastStep {
    uint64_t group;
    uint32_t step;
  };
  std::vector<LastStep> last_steps_;  // of groups that are not empty, in their order
};

/// A tcgen05.ld whose registers are poison until tcgen05.wait::ld.
struct PendingLoad {
  uint32_t* registers;
  uint32_t first, count;  // of the thread's loaded words
  SiteId site;
};

/// The first phase of an mbarrier whose end a thread has not seen yet.
struct NextPhase {
  uint32_t address;
  uint64_t phase;
};

struct Thread {
  enum class State : uint8_t { ready, blocked, done };
  Fiber fiber;
  std::byte* stack = nullptr;
  Cta* cta = nullptr;
  Index index;
  int linear = 0, warp = 0, lane = 0;
  uint64_t instructions = 0;
  AgentId agent = 0;
  State state = State::ready;

  const char* instruction = "";  // what runs now, for findings
  SiteId site = 0;
  const char* waits_for = "";  // the object that blocks it
  uint32_t wait_address = 0;
  int wait_parity = -1;
  std::vector<NextPhase> next_phases;

  Knowledge knows;
  VectorClock tensor;               // the part of knows.ordered that tcgen05 operations may rely on
  bool in_cluster_barrier = false;  // has arrived, has not waited yet
  uint64_t cluster_phase = 0;       // phase it arrived in

  GroupQueue copies, bulk;
  std::vector<Operation> unfinished_writes;  // of bulk stores whose source has been read
  AgentId tensor_agent = kNoAgent, tensor_issued_agent = kNoAgent;
  uint32_t tensor_step = 1;
  std::vector<PendingLoad> loads;
  std::vector<uint32_t> loaded;

  uint32_t step() const { return knows.ordered[agent]; }
  void tick() { knows.ordered.raise(agent, step() + 1); }
};

struct Mbarrier {
  uint32_t address = 0, count = 0, pending = 0;
  int64_t transactions = 0;  // bytes expected and not yet complete
  uint64_t phase = 0;
  Epoch init;
  bool init_fenced = false;     // visible to the async proxy and to the cluster
  Knowledge arriving, arrived;  // of the running phase; of all completed ones. CTA scope
  Knowledge arriving_cluster, arrived_cluster;
  std::vector<Thread*> waiters;
  uint64_t expected_bytes = 0, completed_bytes = 0;
  // Copies that complete here: one agent; a step is known complete when it and all steps before it are.
  AgentId agent = kNoAgent;
  uint32_t issued = 0;
  bool generic_writes = false;  // some of them are st.async, which writes by the generic proxy
  std::vector<uint32_t> open_steps;
};

struct NamedBarrier {
  int arrived = 0, needed = 0;
  std::vector<Thread*> waiting;
  Knowledge arriving;
};

/// A rendezvous of the lanes of a warp, or of the threads of a warpgroup.
struct Rendezvous {
  const char* instruction = nullptr;
  uint32_t mask = 0;
  int arrived = 0, needed = 0;
  std::array<void*, 128> argument{};
};

/// Steps that all threads of a warp or warpgroup know, for each agent. Knowledge only grows, so a result computed for
/// one operation is valid for later operations. If it does not suffice, it is computed again, at most once an
/// operation, and for a block of neighbouring agents, because many agents write an operand.
struct CommonKnowledge {
  struct Block {
    std::array<uint32_t, ClockBlock::kAgents> steps{};
    uint64_t operation = 0;  // in which it was last found
  };
  std::array<std::vector<Block>, 4> blocks;  // of the clocks that an Observer asks for
  uint64_t operation = 0;
};

struct WgmmaOperation;

struct Warpgroup {
  Rendezvous rendezvous;
  std::deque<std::unique_ptr<WgmmaOperation>> operations;
  uint64_t open_group = 1;
  uint32_t fences = 0;                                           // wgmma.fence executed so far
  std::unordered_map<const float*, uint32_t> fences_at_release;  // when accumulators went back to the threads
  AgentId agent = kNoAgent;
  CommonKnowledge common;
  int registers = 0;  // what setmaxnreg gave, 0: as launched
  ~Warpgroup();
  Warpgroup();
  Warpgroup(Warpgroup&&) noexcept;
};

/// A collector buffer of a tensor core: an operand that a product has left there.
struct Collector {
  uint64_t operand = 0;  // its matrix descriptor, or its address in tensor memory
  uint32_t form = 0;     // whether it is in tensor memory, its rows, its type and major-ness
  bool valid = false;
  Epoch filled, ended;        // the product that filled it, and the one that gave it up or replaced it
  std::vector<float> values;  // once the fill has been carried out
};

struct Warp {
  Rendezvous rendezvous;
  CommonKnowledge common;
  int elected_lane = 0;
  // tcgen05.ld and st of the warp: steps issued, and steps that wait::ld / wait::st has seen.
  AgentId load_agent = kNoAgent, store_agent = kNoAgent;
  uint32_t load_step = 1, store_step = 1, loads_waited = 0, stores_waited = 0;
};

struct Cta {
  uint32_t rank = 0;
  Index index;
  std::byte* shared = nullptr;  // start of its window
  std::vector<Thread*> threads;
  std::vector<Warp> warps;
  std::vector<Warpgroup> warpgroups;
  std::array<NamedBarrier, 16> barriers;
  SharedShadow shadow;
  int live = 0;
  MemberName names = nullptr;    // of the struct that the kernel asked dynamic_smem for
  bool several_structs = false;  // it asked for more than one, so an address has no one name

  std::vector<uint32_t> tmem;  // [128 lanes][512 columns], once something is allocated
  std::vector<TensorCell> tmem_shadow;
  uint32_t tmem_used = 0;  // bit i: columns [32 i, 32 i + 32)
  bool tmem_relinquished = false;
  Epoch tmem_allocation;  // the last allocation, for the report of memory that was not freed
  int cta_group = 0;      // of its tcgen05 instructions; 0: none so far
  std::vector<Thread*> tmem_waiters;
  int pair_request = -1;  // columns that this CTA's warp wants in a cta_group::2 allocation
  uint32_t pair_column = 0;
  std::deque<Operation> tensor_queue;   // in order; of a CTA pair: kept by the even CTA
  std::array<Collector, 5> collectors;  // for A, and b0 to b3 of .ws; likewise
  int last_collector = -1;              // b0 to b3 of the last product, if that was .ws; for the model of time
};

/// The threads that must be ordered after an earlier access: a thread, or all threads of a warp or warpgroup. The
/// thread that knows least decides.
class Observer {
 public:
  explicit Observer(Thread& one) : first_(&one), members_(nullptr), count_(1), common_(nullptr) {}
  Observer(Thread* const* members, int count, CommonKnowledge& common)
      : first_(members[0]), members_(members), count_(count), common_(&common) {
    ++common.operation;
  }
  bool ordered(const Epoch& e) {
    return known(e, [](const Thread& t) -> const VectorClock& { return t.knows.ordered; }, 0);
  }
  bool proxied(const Epoch& e) {
    return known(e, [](const Thread& t) -> const VectorClock& { return t.knows.proxied; }, 1);
  }
  bool freed(const Epoch& e) {
    return known(e, [](const Thread& t) -> const VectorClock& { return t.knows.freed; }, 2);
  }
  bool tensor(const Epoch& e) {
    return known(e, [](const Thread& t) -> const VectorClock& { return t.tensor; }, 3);
  }
  Thread& thread() const { return *first_; }

 private:
  template <class Clock>
  bool known(const Epoch& e, Clock clock, size_t which) {
    if (count_ == 1) return clock(*first_).covers(e);
    std::vector<CommonKnowledge::Block>& blocks = common_->blocks[which];
    const size_t number = e.agent / ClockBlock::kAgents;
    if (blocks.size() <= number) blocks.resize(number + 1);
    CommonKnowledge::Block& block = blocks[number];
    const uint32_t& step = block.steps[e.agent % ClockBlock::kAgents];
    if (step < e.step && block.operation != common_->operation) {
      block.operation = common_->operation;
      block.steps.fill(~0u);
      static constexpr uint32_t kNothing[ClockBlock::kAgents] = {};
      const uint32_t* before = nullptr;
      for (int i = 0; i < count_; ++i) {
        const uint32_t* steps = clock(*members_[i]).block(number);
        if (!steps) steps = kNothing;
        if (steps != before) lower_steps(block.steps.data(), steps);
        before = steps;
      }
    }
    return step >= e.step;
  }
  Thread* first_;
  Thread* const* members_;
  int count_;
  CommonKnowledge* common_;
};

class Machine {
 public:
  Machine(const LaunchShape& shape, const Options& options, const std::function<void()>& kernel);
  ~Machine();
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;
  Report run();

  // ---- findings (findings.cpp) ----
  void find(Kind kind, const std::string& text, const Epoch* other = nullptr);
  [[noreturn]] void stop(Kind kind, const std::string& text);  // a misuse after which nothing sensible can follow
  std::string describe(const Thread& t) const;                 // "CTA 1 thread 37"
  std::string describe(const Epoch& e);                        // "cp.async of CTA 0 thread 5 at file.cu:12"
  std::string place(uint32_t address) const;                   // "shared part[3] of CTA 1"
  // The array of an mbarrier that the current thread initialises, which the report has from then on.
  const BarrierArray& barrier_array(uint32_t address, uint32_t arrivals);
  std::string place_in_cta(uint32_t address) const;  // "part[3]", or "+0x400" if that has no name

  // ---- scheduling (scheduler.cpp) ----
  void block(const char* what, uint32_t address = 0, int parity = -1);
  void pause();
  void wake(Thread* t);
  void wake(std::vector<Thread*>& threads);
  void submit(Operation op);                        // in any order
  void submit_tensor(uint32_t rank, Operation op);  // in order with the other operations of that tensor core
  void submit_group(Thread& t, GroupQueue& queue, Operation op);
  void complete_groups(GroupQueue& queue, uint64_t before);  // performs the operations that a wait_group waits for
  void schedule();
  [[noreturn]] void thread_main();
  void finish_cluster_barrier();  // if every thread that still runs has arrived

  // ---- agents and clocks ----
  /// `remedy`: the instruction that is missing if a later access is not ordered after an access of this agent. A
  /// description ends with `thread`, if it is not null; its text is only made for a finding.
  AgentId new_agent(std::string description, const char* remedy, const Thread* thread = nullptr);
  void release(Thread& t, Knowledge& into) {
    if (options.check) {
      into.join(t.knows);
      t.tick();
    }
  }
  /// Releases memory for overwriting, and publishes nothing. A thread's reads and writes count only after a fence of
  /// this thread has waited for them, because an arrival without a release overtakes loads in flight. Accesses of
  /// asynchronous engines count after this thread has waited for them.
  void release_freed(Thread& t, Knowledge& into) {
    if (options.check) {
      into.proxied.join(t.knows.proxied);
      into.freed.join(t.knows.freed);
      into.freed.join(t.knows.proxied);
      for (auto agent = static_cast<AgentId>(threads.size()); agent < agents.size(); ++agent)
        into.freed.raise(agent, t.knows.ordered[agent]);
      t.tick();
    }
  }
  void acquire(Thread& t, const Knowledge& from) {
    if (options.check) t.knows.join(from);
  }

  // ---- shared memory (shared_memory.cpp) ----
  bool inside(uint32_t address, uint32_t bytes) const {
    return rank_of(address) < ctas.size() && offset_of(address) >= kReservedBytes &&
           offset_of(address) + bytes <= kReservedBytes + shape.shared_bytes;
  }
  std::byte* memory(uint32_t address) { return window + address; }
  template <class T>
  T load(uint32_t address) {
    T v;
    __builtin_memcpy(&v, memory(address), sizeof v);
    return v;
  }
  template <class T>
  void store(uint32_t address, T v) {
    __builtin_memcpy(memory(address), &v, sizeof v);
  }
  /// An access by the generic proxy in program order of thread t.
  void generic_access(Thread& t, uint32_t address, uint32_t bytes, Access access, SiteId site);
  /// An access by an asynchronous engine, checked and remembered when it is issued: from then on it may happen.
  void async_access(Observer& who, Epoch epoch, uint32_t address, uint32_t bytes, bool write, Proxy proxy,
                    const char* what);
  void poison(uint32_t address, uint32_t bytes);
  void require_shared(uint32_t address, uint32_t bytes, uint32_t alignment, const char* what);  // stops if not

  // ---- mbarriers (mbarrier.cpp) ----
  Mbarrier& mbarrier_at(uint32_t address, bool async);
  Mbarrier* find_mbarrier(uint32_t address) {
    auto it = mbarriers.find(address);
    return it == mbarriers.end() ? nullptr : &it->second;
  }
  void finish_phase(Mbarrier& b);
  Epoch begin_transaction(Mbarrier& b);
  void complete_transaction(uint32_t address, uint32_t step, uint32_t bytes);

  // ---- collectives (warp.inl) ----
  /// Meets the other lanes of `mask`; the last to arrive runs `action(rendezvous)` for all. Gives what that has put in
  /// the place of this thread's argument.
  template <class Action>
  void* warp_collective(const char* instruction, uint32_t mask, void* argument, Action action);
  template <class Action>
  void warpgroup_collective(const char* instruction, void* argument, Action action);

  // ---- state ----
  LaunchShape shape;
  Options options;
  const std::function<void()>& kernel;
  Report report;
  WorkCount* work = nullptr;     // if somebody counts
  Recorder* recorder = nullptr;  // if somebody records
  SiteTable sites;
  Random random;
  std::byte* window = nullptr;
  size_t window_bytes = 0;  // of all CTAs of a cluster
  std::vector<Cta> ctas;
  std::vector<Thread> threads;
  std::map<uint32_t, Mbarrier> mbarriers;
  NamedBarrier cluster_barrier;
  uint64_t cluster_phase = 0;
  Knowledge cluster_arrived;
  struct Agent {
    std::string description;
    const char* remedy;
    const Thread* thread;
    bool tensor_core = false;
  };
  std::vector<Agent> agents;
  bool is_tensor_agent(AgentId agent) const { return agents[agent].tensor_core; }
  std::vector<AgentId> reader_fenced_agents;  // their generic-proxy writes can be fenced only by who learns of them
  std::deque<uint32_t> clusters_left;         // linear numbers of clusters not yet started
  bool stopped = false;
  bool reading_only = false;  // inside of wait_group.read: writes stay behind

 private:
  void run_cluster(uint32_t number);
  void check_end_of_cluster();
  struct Ready {
    Thread* thread;
    const void* stack;  // about where its stack ends
  };
  void make_ready(Thread* t, const void* stack);
  bool is_late(const Thread& t) const {
    return options.late_cta >= 0 && t.cta->rank == uint32_t(options.late_cta) && ctas.size() > 1;
  }
  void prefetch_next() const;
  bool step_async();
  bool step_group(GroupQueue& queue);
  void report_deadlock();
  template <class Action>
  void* meet(Rendezvous& r, const char* instruction, uint32_t mask, int needed, int position, Thread* const* members,
             int n, void* argument, Action action);
  std::vector<Ready> ready_;
  size_t late_ready_ = 0;  // of these, threads of the late CTA
  std::vector<Operation> operations_;
  std::vector<std::pair<Thread*, GroupQueue*>> group_queues_;  // those that hold operations
  bool group_queue_emptied_ = false;                           // since they were last looked at
  int live_ = 0;
  StackPool& stacks_;
  friend bool enter_synchronisation(const char*, const Site&);
  struct SynchronisationEntry {
    std::string_view instruction;
    size_t index;  // in report.synchronisation
    bool left_out;
  };
  std::vector<std::vector<SynchronisationEntry>> synchronisation_;  // by site
  std::unordered_map<uint64_t, size_t> known_findings_;
};

/// Where the windows of this process have been, of all its host threads, or all addresses once somebody has counted
/// work. The compiler's hooks look here first: most accesses are to a stack or to global memory, and finding the own
/// machine costs more.
struct Watched {
  std::atomic<uintptr_t> begin{UINTPTR_MAX}, end{0};
  void add(uintptr_t first, uintptr_t last) {
    for (uintptr_t was = begin; first < was && !begin.compare_exchange_weak(was, first);) {
    }
    for (uintptr_t was = end; last > was && !end.compare_exchange_weak(was, last);) {
    }
  }
  bool has(uintptr_t address) const {
    return address >= begin.load(std::memory_order_relaxed) && address < end.load(std::memory_order_relaxed);
  }
};
extern constinit Watched watched;

/// Of the launch that runs on this host thread, and of its running fiber; null outside.
// Every instruction and every ordinary access of a kernel asks for them, so there is no initialiser to look for
// (constinit). Not initial-exec: a library that Python loads after others finds no room in the static TLS block. With
// local-dynamic one look-up serves both.
#define HOPWELL_OF_THIS_MODULE __attribute__((tls_model("local-dynamic")))
extern constinit thread_local Machine* machine HOPWELL_OF_THIS_MODULE;
extern constinit thread_local Thread* current HOPWELL_OF_THIS_MODULE;

/// Enters an instruction: findings name it and its place.
inline void enter(const char* instruction, const Site& site) {
  ++current->instructions;
  current->instruction = instruction;
  current->site = machine->sites.intern(site);
  if (machine->recorder) [[unlikely]]
    machine->recorder->executed(*current);
}
/// Enters a synchronisation instruction; true if mutation testing leaves it out.
bool enter_synchronisation(const char* instruction, const Site& site);

/// Adds to the counts of the current thread's warp, if the launch is counted.
template <class Add>
void count_work(Add add) {
  if (machine->work) add(machine->work->of(current->cta->rank, current->warp));
}

std::string format(const char* pattern, ...) __attribute__((format(printf, 1, 2)));

}  // namespace hopwell::arch::emu

#include "warp.inl"
