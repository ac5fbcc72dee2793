#include "recorder.hpp"

#include <algorithm>
#include <set>
#include <string_view>
#include <tuple>

#include "machine.hpp"

namespace hopwell::arch::emu {

namespace {

thread_local Recording* innermost = nullptr;

// Passes through the banks. One pass serves 32 lanes of up to 4 bytes, 16 lanes of 8 bytes or 8 lanes of 16 bytes.
// Lanes that touch the same word of a bank share a pass.
struct Passes {
  uint32_t wavefronts = 0, conflicts = 0;
};
template <class Addresses>
Passes passes_of(uint32_t mask, const Addresses& address, const Addresses& bytes) {
  uint32_t widest = 4;
  for (size_t lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1) widest = std::max(widest, bytes[lane]);
  const size_t lanes = widest <= 4 ? 32 : widest <= 8 ? 16 : 8;
  Passes passes;
  for (size_t first = 0; first < 32; first += lanes) {
    std::array<std::set<uint32_t>, 32> words;  // by bank
    size_t most = 0;
    for (size_t lane = first; lane < first + lanes; ++lane)
      for (uint32_t word = address[lane] / 4; mask >> lane & 1 && word * 4 < address[lane] + bytes[lane]; ++word) {
        words[word % 32].insert(word);
        most = std::max(most, words[word % 32].size());
      }
    passes.wavefronts += uint32_t(most);
    passes.conflicts += uint32_t(most ? most - 1 : 0);
  }
  return passes;
}

// Merges the entries of one source line, because an expression may access memory several times.
void merge_lines(std::vector<SharedLine>& lines) {
  const auto key = [](const SharedLine& l) { return std::tie(l.where.file, l.where.line, l.instruction); };
  std::sort(lines.begin(), lines.end(), [&](const SharedLine& a, const SharedLine& b) { return key(a) < key(b); });
  std::vector<SharedLine> merged;
  for (SharedLine& line : lines) {
    if (merged.empty() || key(merged.back()) != key(line)) {
      merged.push_back(std::move(line));
      continue;
    }
    merged.back().accesses += line.accesses;
    merged.back().bytes += line.bytes;
    merged.back().wavefronts += line.wavefronts;
    merged.back().conflicts += line.conflicts;
  }
  lines = std::move(merged);
}

// The time model counts a product of a warpgroup for the warp that arrives last, which may be any of the four.
void merge_warpgroups(std::vector<Role>& roles) {
  std::vector<Role> merged;
  for (Role& role : roles) {
    if (merged.empty() || merged.back().rank != role.rank || merged.back().last_warp / 4 != role.first_warp / 4) {
      merged.push_back(std::move(role));
      continue;
    }
    merged.back().last_warp = role.last_warp;
    for (size_t unit = 0; unit < role.demands.size(); ++unit)
      merged.back().demands[unit].cycles += role.demands[unit].cycles;
  }
  roles = std::move(merged);
}

// Suspends `current`, so that accesses of the recorder are not counted for the kernel. A file with kernels may also
// contain code of std::string, compiled with the memory-access hooks, and the linker may use that copy for this file
// too.
struct Aside {
  Thread* const thread = std::exchange(current, nullptr);
  ~Aside() { current = thread; }
};

bool is_ordinary_access(const char* instruction) {
  return instruction == std::string_view("load") || instruction == std::string_view("store");
}

}  // namespace

Recording::Recording(const Rates& chip) : rates(chip), outer_(innermost) { innermost = this; }
Recording::~Recording() { innermost = outer_; }
Recording* current_recording() { return innermost; }

uint64_t InstructionCount::total() const {
  uint64_t sum = 0;
  for (const uint64_t n : of_warp) sum += n;
  return sum;
}

uint64_t LaunchRecord::bank_conflicts() const {
  uint64_t sum = 0;
  for (const SharedLine& line : shared) sum += line.conflicts;
  return sum;
}

Recorder::Recorder(Machine& machine, const WorkCount& count) : machine_(machine), count_(count) {
  record_.shape = machine.shape;
  record_.warps_a_cta = (machine.shape.block.volume() + 31) / 32;
}

Recorder::~Recorder() = default;

void Recorder::start_cluster() {
  lanes_.assign(machine_.threads.size(), {});
  open_accesses_.clear();
  open_accesses_.resize(machine_.ctas.size() * record_.warps_a_cta);
}

void Recorder::end_cluster() {
  for (size_t warp = 0; warp < open_accesses_.size(); ++warp) together(warp);
  for (const auto& [name, by_thread] : executed_) {
    std::vector<uint64_t>& of_warp = instructions_[name];
    of_warp.resize(open_accesses_.size());
    std::vector<uint64_t> most(of_warp.size());
    for (const Thread& t : machine_.threads)
      most[warp_of(t)] = std::max(most[warp_of(t)], by_thread[size_t(&t - machine_.threads.data())]);
    for (size_t warp = 0; warp < of_warp.size(); ++warp) of_warp[warp] += most[warp];
  }
  executed_.clear();
  if (timed_) draw_rows();
  timed_ = false;
}

LaunchRecord Recorder::finish(const Report& report) {
  record_.kernel = count_.kernel;
  record_.ctas = count_.ctas;
  record_.total = count_.total();
  record_.units = count_.units();
  record_.roles = count_.roles();
  record_.memory_bytes = count_.memory_bytes();
  for (auto& [name, of_warp] : instructions_) record_.instructions.push_back({name, std::move(of_warp)});
  for (auto& [key, line] : lines_) record_.shared.push_back(std::move(line));
  merge_lines(record_.shared);
  if (instructions_.contains("wgmma.mma_async")) merge_warpgroups(record_.roles);
  record_.findings = report.text();
  return std::move(record_);
}

// ---- counts ---------------------------------------------------------------------------------------------------------

size_t Recorder::warp_of(const Thread& t) const { return t.cta->rank * record_.warps_a_cta + size_t(t.warp); }

void Recorder::executed(const Thread& t) {
  const Aside aside;
  std::vector<uint64_t>& of_thread = executed_[t.instruction];
  of_thread.resize(machine_.threads.size());
  ++of_thread[size_t(&t - machine_.threads.data())];
}

void Recorder::shared_access(Thread& t, uint32_t address, uint32_t bytes, SiteId site) {
  const Aside aside;
  thread_shared_bytes_ += bytes;
  if (is_ordinary_access(t.instruction)) executed(t);
  if (rank_of(address) != t.cta->rank) return;  // over the cluster network
  AccessesOfLine& line = open_accesses_[warp_of(t)][{site, t.instruction}];
  const auto lane = size_t(t.lane);
  const size_t place = line.done[lane]++ - line.first_open;
  if (place >= line.open.size()) line.open.resize(place + 1);
  WarpAccess& access = line.open[place];
  access.mask |= 1u << lane;
  access.address[lane] = offset_of(address);
  access.bytes[lane] = bytes;
}

SharedLine& Recorder::line_of(SiteId site, const char* instruction) {
  const auto [it, added] = lines_.try_emplace({site, instruction});
  if (added) it->second.instruction = instruction, it->second.where = machine_.sites.resolve(site);
  return it->second;
}

// All lanes of a warp are at the same instruction, so their earlier accesses are complete.
void Recorder::together(size_t warp) {
  for (const auto& [key, accesses] : open_accesses_[warp]) {
    SharedLine& line = line_of(key.first, key.second);
    for (const WarpAccess& access : accesses.open) {
      const Passes passes = passes_of(access.mask, access.address, access.bytes);
      ++line.accesses;
      line.wavefronts += passes.wavefronts;
      line.conflicts += passes.conflicts;
      for (const uint32_t bytes : access.bytes) line.bytes += bytes;
    }
  }
  open_accesses_[warp].clear();
}

// ---- the clocks of threads and engines ------------------------------------------------------------------------------

Recorder::Lane& Recorder::lane_of(const Thread& t) { return lanes_[size_t(&t - machine_.threads.data())]; }

void Recorder::be_busy(Lane& lane, double cycles) {
  if (cycles <= 0) return;
  if (!lane.busy.empty() && lane.busy.back().end == lane.clock)
    lane.busy.back().end += cycles;
  else
    lane.busy.push_back({lane.clock, lane.clock + cycles});
  lane.clock = lane.busy.back().end;
}

double Recorder::now(Thread& t) {
  Lane& lane = lane_of(t);
  be_busy(lane, double(t.instructions - lane.seen));
  lane.seen = t.instructions;
  see(lane.clock);
  return lane.clock;
}

void Recorder::go_on(Thread& t, double when, uint64_t barrier) {
  const double before = now(t);
  if (when <= before) return;
  Lane& lane = lane_of(t);
  lane.waits.push_back({before, when, barrier, t.site});
  lane.clock = when;
}

Work Recorder::work_since_last() {
  const Work total = count_.total();
  Work since;
  since.tensor_cycles = total.tensor_cycles - seen_.tensor_cycles;
  since.tmem_copied = total.tmem_copied - seen_.tmem_copied;
  since.tmem_loaded = total.tmem_loaded - seen_.tmem_loaded;
  since.tmem_stored = total.tmem_stored - seen_.tmem_stored;
  since.copied_bytes = total.copied_bytes - seen_.copied_bytes;
  since.gathers = total.gathers - seen_.gathers;
  since.added_bytes = total.added_bytes - seen_.added_bytes;
  since.shared_bytes = total.shared_bytes - thread_shared_bytes_ - seen_.shared_bytes;
  seen_ = total;
  seen_.shared_bytes -= thread_shared_bytes_;
  return since;
}

double Recorder::run_on(Engine engine, const Thread& issuer, double earliest, size_t warp) {
  const Work work = work_since_last();
  const Rates& rates = count_.rates;
  const auto cycles = [](uint64_t amount, double rate) { return rate > 0 ? double(amount) / rate : 0; };
  const double cost =
      engine == Engine::tensor
          ? work.tensor_cycles + cycles(work.tmem_copied, rates.tmem_copy_bytes)
          : std::max({cycles(work.copied_bytes, rates.gather_bytes), double(work.gathers) * rates.gather4_cycles,
                      cycles(work.shared_bytes, rates.shared_bytes)}) +
                cycles(work.added_bytes, rates.added_bytes);
  EngineRow& row = engines_[{engine, warp}];
  const double begin = std::max(earliest, row.free);
  row.free = begin + cost;
  see(row.free);
  place_tensor_memory(begin, row.free);
  if (cost <= 0) return row.free;  // a commit
  if (!row.runs.empty() && row.runs.back().end == begin && row.runs.back().site == issuer.site)
    row.runs.back().end = row.free, ++row.runs.back().operations;
  else
    row.runs.push_back({begin, row.free, issuer.instruction, issuer.site, 1});
  return row.free;
}

void Recorder::submitted(Operation& op, Engine engine, const void* queue) {
  if (!timed_) return;
  const Aside aside;
  const double end = run_on(engine, *aside.thread, now(*aside.thread), warp_of(*aside.thread));
  if (queue) groups_[queue].emplace_back(op.group, end);
  op.perform = [this, perform = std::move(op.perform), end] {
    const double before = std::exchange(operation_end_, end);
    perform();
    operation_end_ = before;
  };
}

void Recorder::issued(Engine engine, const void* queue, uint64_t group) {
  if (!timed_) return;
  const Aside aside;
  Thread* const* const members = &aside.thread->cta->threads[size_t(aside.thread->linear / 128 * 128)];
  double latest = 0;
  for (size_t i = 0; i < 128; ++i) latest = std::max(latest, now(*members[i]));
  groups_[queue].emplace_back(group, run_on(engine, *aside.thread, latest, warp_of(*members[0])));
}

void Recorder::waited(const void* queue, uint64_t before) {
  if (!timed_) return;
  const Aside aside;
  double latest = 0;
  for (const auto& [group, end] : groups_[queue])
    if (group < before) latest = std::max(latest, end);
  std::erase_if(groups_[queue], [&](const auto& of_group) { return of_group.first < before; });
  go_on(*aside.thread, latest, queue == &aside.thread->copies ? kOwnCopies : kOwnOperations);
}

// ---- barriers -------------------------------------------------------------------------------------------------------

void Recorder::arrived(uint64_t barrier) {
  const Aside aside;
  if (!timed_ || (operation_end_ < 0 && !aside.thread)) return;
  double& arriving = barriers_[barrier].arriving;
  arriving = std::max(arriving, operation_end_ < 0 ? now(*aside.thread) : operation_end_);
}

void Recorder::phase_ended(uint64_t barrier) {
  if (!timed_) return;
  const Aside aside;
  Barrier& b = barriers_[barrier];
  const double end = std::max(b.arriving, b.ended);
  b.phases.push_back({b.ended, end});
  b.ended = end;
  b.arriving = 0;
}

// A named barrier synchronises whole warps.
void Recorder::phase_ended(uint64_t barrier, const std::vector<Thread*>& waiting, Thread* last) {
  const Aside aside;
  phase_ended(barrier);
  const auto go = [&](Thread& t) {
    if (t.lane == 0) together(warp_of(t));
    passed(t, barrier);
  };
  for (Thread* t : waiting) go(*t);
  if (last) go(*last);
}

void Recorder::passed(Thread& t, uint64_t barrier) {
  if (!timed_) return;
  const Aside aside;
  go_on(t, barriers_[barrier].ended, barrier);
}

void Recorder::met(Thread* const* members, int count, uint32_t mask) {
  const Aside aside;
  if (count <= 32 && __builtin_popcount(mask) == count) together(warp_of(*members[0]));
  if (!timed_) return;
  const auto each = [&](auto act) {
    for (int i = 0; i < count; ++i)
      if (count > 32 || mask >> i & 1) act(*members[i]);
  };
  double latest = 0;
  each([&](Thread& t) { latest = std::max(latest, now(t)); });
  // Products of mma.sync, and loads from the warp's quarter of tensor memory: the warp waits for both.
  const Work work = work_since_last();
  const double tmem_rate = count_.rates.tmem_bytes / 4,
               cost =
                   work.tensor_cycles + (tmem_rate > 0 ? double(work.tmem_loaded + work.tmem_stored) / tmem_rate : 0);
  each([&](Thread& t) {
    go_on(t, latest, count > 32 ? kWarpgroup : kWarp);
    be_busy(lane_of(t), cost);
  });
  see(latest + cost);
  place_tensor_memory(latest, latest + std::max(cost, 1.0));
}

// ---- tensor memory --------------------------------------------------------------------------------------------------

void Recorder::tensor_memory_allocated(uint32_t rank, uint32_t first_column, uint32_t columns) {
  if (!timed_) return;
  const Aside aside;
  record_.tensor_memory.push_back(
      {TensorMemoryUse::Kind::allocated, rank, first_column, columns, now(*aside.thread), -1});
}

void Recorder::tensor_memory_freed(uint32_t rank, uint32_t first_column, uint32_t columns) {
  if (!timed_) return;
  const Aside aside;
  for (TensorMemoryUse& use : record_.tensor_memory)
    if (use.kind == TensorMemoryUse::Kind::allocated && use.end < 0 && use.rank == rank &&
        use.first_column == first_column && use.columns == columns)
      use.end = now(*aside.thread);
}

void Recorder::tensor_memory_access(uint32_t rank, int first_column, int columns, bool tensor_core, bool write) {
  if (!timed_) return;
  const Aside aside;
  using enum TensorMemoryUse::Kind;
  const TensorMemoryUse::Kind kind = tensor_core ? (write ? product : operand) : write ? stored : read;
  unplaced_.push_back({kind, rank, uint32_t(first_column), uint32_t(columns), 0, 0});
}

void Recorder::place_tensor_memory(double begin, double end) {
  for (TensorMemoryUse use : unplaced_) {
    use.begin = begin;
    use.end = end;
    record_.tensor_memory.push_back(use);
  }
  unplaced_.clear();
}

// ---- rows of the timeline -------------------------------------------------------------------------------------------

std::string Recorder::place_of(SiteId site) const { return to_string(machine_.sites.resolve(site)); }

std::string Recorder::name_of(uint64_t barrier) const {
  switch (barrier >> 32) {
    case 0:
      return "mbarrier " + machine_.place_in_cta(uint32_t(barrier));
    case 1:
      return format("barrier %d", int(barrier & 255));
    case 2:
      return "cluster barrier";
    case 3:
    case 6:
      return "its own asynchronous operations";
    case 4:
      return "the other warps of the warpgroup";
    default:
      return "other lanes";
  }
}

std::string Recorder::waits_for(const Wait& wait) const {
  return "waits for " + name_of(wait.barrier) + " at " + place_of(wait.site);
}

// The parts of intervals that are in none of `cut`.
std::vector<Recorder::Interval> Recorder::without(const std::vector<Interval>& intervals, std::vector<Interval> cut) {
  std::sort(cut.begin(), cut.end(), [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
  std::vector<Interval> gaps;  // the union of `cut`
  for (const Interval& interval : cut) {
    if (gaps.empty() || interval.begin > gaps.back().end)
      gaps.push_back(interval);
    else
      gaps.back().end = std::max(gaps.back().end, interval.end);
  }
  std::vector<Interval> left;
  for (const Interval& interval : intervals) {
    double begin = interval.begin;
    auto gap =
        std::upper_bound(gaps.begin(), gaps.end(), begin, [](double at, const Interval& g) { return at < g.end; });
    for (; gap != gaps.end() && gap->begin < interval.end; ++gap) {
      if (gap->begin > begin) left.push_back({begin, gap->begin});
      begin = gap->end;
    }
    if (begin < interval.end) left.push_back({begin, interval.end});
  }
  return left;
}

// A warp is busy when any lane is busy, but not while a lane waits in cp.async.wait_group: the lanes of a warp execute
// it together. In a gap the warp waits for the event that the first lane to resume has waited for.
TimelineRow Recorder::row_of_warp(size_t warp) const {
  TimelineRow row;
  row.rank = uint32_t(warp / record_.warps_a_cta);
  row.name = format("warp %zu", warp % record_.warps_a_cta);
  std::vector<Interval> busy;
  std::vector<Wait> waits;
  for (const Thread* t : machine_.ctas[row.rank].threads) {
    if (warp_of(*t) != warp) continue;
    const Lane& lane = lanes_[size_t(t - machine_.threads.data())];
    busy.insert(busy.end(), lane.busy.begin(), lane.busy.end());
    waits.insert(waits.end(), lane.waits.begin(), lane.waits.end());
  }
  std::vector<Interval> blocked;
  for (const Wait& wait : waits)
    if (wait.barrier == kOwnCopies) blocked.push_back({wait.begin, wait.end});
  busy = without(busy, std::move(blocked));
  std::sort(busy.begin(), busy.end(), [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
  // The wait for copies comes first among those that end together: the others end because it does.
  std::sort(waits.begin(), waits.end(), [](const Wait& a, const Wait& b) {
    return std::tuple(a.end, a.barrier != kOwnCopies, a.begin) < std::tuple(b.end, b.barrier != kOwnCopies, b.begin);
  });
  for (const Interval& interval : busy) {
    if (row.busy.empty() || interval.begin > row.busy.back().end) {
      if (!row.busy.empty()) {
        const auto wait = std::lower_bound(waits.begin(), waits.end(), interval.begin,
                                           [](const Wait& w, double end) { return w.end < end; });
        const bool known = wait != waits.end() && wait->end == interval.begin;
        row.waits.push_back({row.busy.back().end, interval.begin, known ? waits_for(*wait) : "waits"});
      }
      row.busy.push_back({interval.begin, interval.end, "busy"});
    } else {
      row.busy.back().end = std::max(row.busy.back().end, interval.end);
    }
  }
  // If nothing visible follows the last barrier, the row ends with the wait for it.
  if (!row.busy.empty() && !waits.empty() && waits.back().end > row.busy.back().end)
    row.waits.push_back({row.busy.back().end, waits.back().end, waits_for(waits.back())});
  return row;
}

void Recorder::draw_rows() {
  for (Thread& t : machine_.threads) now(t);
  for (size_t warp = 0; warp < open_accesses_.size(); ++warp) record_.rows.push_back(row_of_warp(warp));
  for (const auto& [key, engine] : engines_) {
    if (engine.runs.empty()) continue;
    const size_t warp = key.second;
    TimelineRow row;
    row.rank = uint32_t(warp / record_.warps_a_cta);
    row.name =
        format("%s of warp %zu", key.first == Engine::tensor ? "products" : "copies", warp % record_.warps_a_cta);
    for (const Run& run : engine.runs)
      row.busy.push_back({run.begin, run.end,
                          run.instruction + (run.operations > 1 ? format(" × %u", run.operations) : std::string()) +
                              " at " + place_of(run.site)});
    record_.rows.push_back(std::move(row));
  }
  std::stable_sort(record_.rows.begin(), record_.rows.end(),
                   [](const TimelineRow& a, const TimelineRow& b) { return a.rank < b.rank; });
  for (const auto& [key, barrier] : barriers_) {
    BarrierRow row{name_of(key), key >> 32 == 0 ? rank_of(uint32_t(key)) : uint32_t(key >> 8 & 255), {}};
    for (size_t phase = 0; phase < barrier.phases.size(); ++phase)
      row.phases.push_back({barrier.phases[phase].begin, barrier.phases[phase].end, format("phase %zu", phase)});
    record_.barriers.push_back(std::move(row));
  }
  for (TensorMemoryUse& use : record_.tensor_memory)
    if (use.end < 0) use.end = record_.end;
}

}  // namespace hopwell::arch::emu
