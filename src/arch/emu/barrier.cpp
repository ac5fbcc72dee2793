// Named barriers, the cluster barrier, and warp collectives.
#include "machine.hpp"
#include "sm80.hpp"
#include "sm90.hpp"

namespace hopwell::arch::emu {

// ---- identity -------------------------------------------------------------------------------------------------------

const Index& thread_index() { return current->index; }
const Index& block_index() { return current->cta->index; }
const Extent& block_extent() { return machine->shape.block; }
const Extent& grid_extent() { return machine->shape.grid; }
void* dynamic_shared(MemberName names) {
  Cta& cta = *current->cta;
  if (names && names != cta.names) {
    cta.several_structs |= cta.names != nullptr;
    cta.names = names;
  }
  return cta.shared + kReservedBytes;
}

uint32_t shared_address(const void* pointer) {
  const ptrdiff_t offset = static_cast<const std::byte*>(pointer) - machine->window;
  if (offset < 0 || size_t(offset) >= machine->ctas.size() * kWindowBytes)
    machine->stop(Kind::bounds, "a pointer that is not into shared memory where a shared address is needed");
  return uint32_t(offset);
}

void yield() { machine->pause(); }

// ---- named barriers -------------------------------------------------------------------------------------------------

namespace {

void arrive_at(int id, int count, bool wait) {
  Machine& m = *machine;
  Cta& cta = *current->cta;
  if (id < 0 || id > 15) m.stop(Kind::barrier, format("barrier %d; there are 16, from 0 to 15", id));
  NamedBarrier& b = cta.barriers[size_t(id)];
  const int needed = count ? count : int(cta.threads.size());
  if (count % 32 || needed > int(cta.threads.size()))
    m.stop(Kind::barrier, format("barrier %d for %d threads: must be a multiple of 32, at most the CTA's %zu", id,
                                 count, cta.threads.size()));
  if (b.arrived > 0 && b.needed != needed)
    m.stop(Kind::barrier,
           format("barrier %d is used for %d and for %d threads at the same time", id, b.needed, needed));
  b.needed = needed;
  m.release(*current, b.arriving);
  if (m.recorder) m.recorder->arrived(Recorder::named_barrier(cta.rank, id));
  if (++b.arrived < b.needed) {
    if (!wait) return;
    b.waiting.push_back(current);
    m.block(id == 0 && count == 0 ? "bar.sync 0 (the whole CTA)" : "bar.sync", uint32_t(id));
    return;
  }
  b.arrived = 0;
  if (wait) m.acquire(*current, b.arriving);
  for (Thread* t : b.waiting) m.acquire(*t, b.arriving);
  if (m.recorder) m.recorder->phase_ended(Recorder::named_barrier(cta.rank, id), b.waiting, wait ? current : nullptr);
  m.wake(b.waiting);
  b.arriving.clear();
}

}  // namespace

void barrier_sync(int id, int threads, const Site& site) {
  if (enter_synchronisation("bar.sync", site)) return;
  arrive_at(id, threads, true);
}
void barrier_arrive(int id, int threads, const Site& site) {
  if (enter_synchronisation("bar.arrive", site)) return;
  arrive_at(id, threads, false);
}

// ---- the cluster barrier --------------------------------------------------------------------------------------------

uint32_t cluster_rank() { return current->cta->rank; }
uint32_t cluster_size() { return machine->shape.cluster.volume(); }

void cluster_arrive(bool release, const Site& site) {
  if (enter_synchronisation("barrier.cluster.arrive", site)) return;
  Machine& m = *machine;
  if (current->in_cluster_barrier) m.stop(Kind::barrier, "a second arrive without barrier.cluster.wait in between");
  current->in_cluster_barrier = true;
  current->cluster_phase = m.cluster_phase;
  if (release) m.release(*current, m.cluster_barrier.arriving);
  if (m.recorder) m.recorder->arrived(Recorder::kClusterBarrier);
  ++m.cluster_barrier.arrived;
  m.finish_cluster_barrier();
}

void Machine::finish_cluster_barrier() {
  NamedBarrier& b = cluster_barrier;
  if (b.arrived == 0 || b.arrived < b.needed) return;
  b.arrived = 0;
  ++cluster_phase;
  if (recorder) recorder->phase_ended(Recorder::kClusterBarrier);
  cluster_arrived.join(b.arriving);
  b.arriving.clear();
  wake(b.waiting);
}

void cluster_wait(const Site& site) {
  if (enter_synchronisation("barrier.cluster.wait", site)) return;
  Machine& m = *machine;
  if (!current->in_cluster_barrier) m.stop(Kind::barrier, "without barrier.cluster.arrive before it");
  while (m.cluster_phase == current->cluster_phase) {
    m.cluster_barrier.waiting.push_back(current);
    m.block("barrier.cluster.wait");
  }
  current->in_cluster_barrier = false;
  if (m.recorder) m.recorder->passed(*current, Recorder::kClusterBarrier);
  m.acquire(*current, m.cluster_arrived);
}

// ---- warps ----------------------------------------------------------------------------------------------------------

void warp_sync(uint32_t mask, const Site& site) {
  if (enter_synchronisation("bar.warp.sync", site)) return;
  Machine& m = *machine;
  m.warp_collective("bar.warp.sync", mask, current, [&](Rendezvous& r) {
    if (!m.options.check) return;
    Knowledge all;
    for (int lane = 0; lane < 32; ++lane)
      if (r.mask >> lane & 1) m.release(*static_cast<Thread*>(r.argument[size_t(lane)]), all);
    for (int lane = 0; lane < 32; ++lane)
      if (r.mask >> lane & 1) m.acquire(*static_cast<Thread*>(r.argument[size_t(lane)]), all);
  });
}

// A lane's input and output of a register exchange are stored in its slot of the Rendezvous. No other lane touches the
// slot before this lane has read its result. Reading the stacks of 32 threads instead would cost more than the rest of
// the exchange.
namespace {
void* as_argument(uint32_t value, uint32_t other) { return reinterpret_cast<void*>(uintptr_t{other} << 32 | value); }
uint32_t value_of(void* argument) { return uint32_t(reinterpret_cast<uintptr_t>(argument)); }
uint32_t other_of(void* argument) { return uint32_t(reinterpret_cast<uintptr_t>(argument) >> 32); }
}  // namespace

// A shuffle exchanges registers. PTX does not say that it orders memory accesses.
uint32_t shuffle(uint32_t mask, uint32_t value, int source_lane, const Site& site) {
  enter("shfl.sync", site);
  return value_of(
      machine->warp_collective("shfl.sync", mask, as_argument(value, uint32_t(source_lane) & 31), [](Rendezvous& r) {
        std::array<uint32_t, 32> values;  // a lane that does not participate has an undefined value: poison
        for (size_t lane = 0; lane < 32; ++lane)
          values[lane] = r.mask >> lane & 1 ? value_of(r.argument[lane]) : kPoison;
        for (size_t lane = 0; lane < 32; ++lane)
          if (r.mask >> lane & 1) r.argument[lane] = as_argument(values[other_of(r.argument[lane])], 0);
      }));
}

uint32_t ballot(uint32_t mask, bool predicate, const Site& site) {
  enter("vote.sync.ballot", site);
  return value_of(machine->warp_collective("vote.sync.ballot", mask, as_argument(predicate, 0), [](Rendezvous& r) {
    uint32_t votes = 0;
    for (size_t lane = 0; lane < 32; ++lane)
      if (r.mask >> lane & 1) votes |= value_of(r.argument[lane]) << lane;
    for (size_t lane = 0; lane < 32; ++lane)
      if (r.mask >> lane & 1) r.argument[lane] = as_argument(votes, 0);
  }));
}

// elect.sync elects the same lane every time for one mask (PTX). PTX does not say which lane, so the choice is random.
bool elect(const Site& site) {
  enter("elect.sync", site);
  return current->lane == current->cta->warps[size_t(current->warp)].elected_lane;
}

}  // namespace hopwell::arch::emu
