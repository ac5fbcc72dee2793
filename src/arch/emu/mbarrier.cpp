// mbarriers: phases, pending arrivals, transaction counts, and the knowledge that a wait acquires.
#include <algorithm>

#include "machine.hpp"
#include "sm90.hpp"

namespace hopwell::arch::emu {

namespace {

// Contents of a live mbarrier's word, opaque to kernels. A different value means that something has overwritten it.
uint64_t opaque_word(uint32_t address) { return 0x6d62617272696572u + address; }
constexpr int64_t kTransactionLimit = (1 << 20) - 1;  // PTX ISA, "Valid range of tx-count"

// An instruction uses an mbarrier from its own thread, so it must be ordered after the init.
void check_initialised(const Mbarrier& b, bool async) {
  Machine& m = *machine;
  if (!m.options.check) return;
  if (!current->knows.ordered.covers(b.init))
    m.find(Kind::race,
           "uses the mbarrier at " + m.place(b.address) + ", not ordered after its init by " + m.describe(b.init) +
               ": no barrier in between",
           &b.init);
  else if (async && !b.init_fenced)
    m.find(Kind::proxy,
           "the mbarrier at " + m.place(b.address) +
               " is used by the async proxy with no fence.mbarrier_init or fence.proxy.async after its init by " +
               m.describe(b.init),
           &b.init);
}

enum class Release { cta, cluster, none };

void arrive(Mbarrier& b, uint32_t count, Release scope) {
  Machine& m = *machine;
  if (count == 0 || count > b.pending)
    m.stop(Kind::barrier, format("%u arrivals on the mbarrier at %s, which expects %u more in this phase", count,
                                 m.place(b.address).c_str(), b.pending));
  const bool remote = rank_of(b.address) != current->cta->rank;
  if (remote && scope == Release::cta) m.stop(Kind::barrier, "a release at CTA scope on an mbarrier of another CTA");
  if (scope == Release::none)
    m.release_freed(*current, b.arriving);
  else
    m.release(*current, remote && m.options.policy.remote_arrival_needs_cluster_wait ? b.arriving_cluster : b.arriving);
  b.pending -= count;
  m.finish_phase(b);
}

// A wait that succeeds has observed the end of every phase before the current one.
void remember_phase(Thread& t, const Mbarrier& b) {
  for (NextPhase& next : t.next_phases)
    if (next.address == b.address) return void(next.phase = b.phase);
  t.next_phases.push_back({b.address, b.phase});
}

void expect(Mbarrier& b, uint32_t bytes) {
  b.transactions += bytes;
  b.expected_bytes += bytes;
  if (b.transactions > kTransactionLimit)
    machine->stop(Kind::transaction,
                  format("the tx-count of the mbarrier at %s exceeds 2^20 - 1", machine->place(b.address).c_str()));
}

}  // namespace

Mbarrier& Machine::mbarrier_at(uint32_t address, bool async) {
  Mbarrier* b = find_mbarrier(address);
  if (!b)
    stop(Kind::barrier, "no mbarrier has been initialised at " +
                            (inside(address, 8) ? place(address) : format("address 0x%x", address)));
  if (load<uint64_t>(address) != opaque_word(address))
    stop(Kind::barrier, "the mbarrier at " + place(address) + " was overwritten");
  if (current) check_initialised(*b, async);
  return *b;
}

void Machine::finish_phase(Mbarrier& b) {
  if (recorder) recorder->arrived(b.address);
  if (b.pending || b.transactions) return;
  if (recorder) recorder->phase_ended(b.address);
  ++b.phase;
  b.pending = b.count;
  if (options.check) {
    b.arrived.join(b.arriving);
    b.arriving.clear();
    b.arrived_cluster.join(b.arriving_cluster);
    b.arriving_cluster.clear();
  }
  wake(b.waiters);
}

Epoch Machine::begin_transaction(Mbarrier& b) {
  if (b.agent == kNoAgent)
    b.agent = new_agent("a copy that completes on the mbarrier at " + place(b.address) + ", issued",
                        "no wait on that mbarrier in between, or its byte count is too small");
  b.open_steps.push_back(++b.issued);
  return {b.issued, b.agent, current->site};
}

void Machine::complete_transaction(uint32_t address, uint32_t step, uint32_t bytes) {
  Mbarrier* b = find_mbarrier(address);
  if (!b)
    return find(Kind::barrier, "a copy completes on the mbarrier at " + place(address) + ", which no longer exists");
  b->open_steps.erase(std::find(b->open_steps.begin(), b->open_steps.end(), step));
  uint32_t complete = b->issued;
  for (uint32_t open : b->open_steps) complete = std::min(complete, open - 1);
  if (options.check) b->arriving.ordered.raise(b->agent, complete);
  b->transactions -= bytes;
  b->completed_bytes += bytes;
  if (b->transactions < -kTransactionLimit)
    stop(Kind::transaction, "the tx-count of the mbarrier at " + place(address) + " fell below -(2^20 - 1)");
  finish_phase(*b);
}

void mbarrier_init(uint32_t address, uint32_t count, const Site& site) {
  enter("mbarrier.init", site);
  Machine& m = *machine;
  m.require_shared(address, 8, 8, "mbarrier.init");
  if (rank_of(address) != current->cta->rank) m.stop(Kind::barrier, "on another CTA's shared memory");
  const BarrierArray& array = m.barrier_array(address, count);
  if (m.options.change_count && m.options.change_count->barriers == array)
    count += uint32_t(m.options.change_count->by);
  if (count == 0 || count >= 1u << 20) m.stop(Kind::barrier, format("count %u; must be 1 to 2^20 - 1", count));
  if (m.find_mbarrier(address))
    m.stop(Kind::barrier, "on the live mbarrier at " + m.place(address) + ": mbarrier.inval must come first");
  m.generic_access(*current, address, 8, Access::write, current->site);
  Mbarrier& b = m.mbarriers[address];
  b.address = address;
  b.count = b.pending = count;
  b.init = {current->step(), current->agent, current->site};
  m.store(address, opaque_word(address));
}

void mbarrier_invalidate(uint32_t address, const Site& site) {
  enter("mbarrier.inval", site);
  Mbarrier& b = machine->mbarrier_at(address, false);
  if (!b.waiters.empty()) machine->stop(Kind::barrier, "while threads wait on it");
  machine->mbarriers.erase(address);
  for (Thread& t : machine->threads)
    std::erase_if(t.next_phases, [&](const NextPhase& next) { return next.address == address; });
}

void mbarrier_arrive(uint32_t address, uint32_t count, bool cluster_scope, const Site& site) {
  if (enter_synchronisation("mbarrier.arrive", site)) return;
  arrive(machine->mbarrier_at(address, false), count, cluster_scope ? Release::cluster : Release::cta);
}

void mbarrier_arrive_relaxed(uint32_t address, const Site& site) {
  if (enter_synchronisation("mbarrier.arrive.relaxed", site)) return;
  arrive(machine->mbarrier_at(address, false), 1, Release::none);
}

void mbarrier_arrive_expect_tx(uint32_t address, uint32_t bytes, bool cluster_scope, const Site& site) {
  if (enter_synchronisation("mbarrier.arrive.expect_tx", site)) return;
  Mbarrier& b = machine->mbarrier_at(address, false);
  expect(b, bytes);
  arrive(b, 1, cluster_scope ? Release::cluster : Release::cta);
}

void mbarrier_expect_tx(uint32_t address, uint32_t bytes, const Site& site) {
  if (enter_synchronisation("mbarrier.expect_tx", site)) return;
  expect(machine->mbarrier_at(address, false), bytes);
}

bool mbarrier_try_wait(uint32_t address, uint32_t parity, WaitScope scope, bool may_block, const Site& site) {
  const char* instruction = may_block ? "mbarrier.try_wait" : "mbarrier.test_wait";
  if (enter_synchronisation(instruction, site)) return true;
  Machine& m = *machine;
  if (rank_of(address) != current->cta->rank) m.stop(Kind::barrier, "on another CTA's mbarrier");
  if (parity > 1) m.stop(Kind::barrier, format("parity %u; must be 0 or 1", parity));
  Mbarrier* b = &m.mbarrier_at(address, false);
  if ((b->phase & 1) == parity) {
    if (!may_block || m.random.chance(m.options.spurious_wakeups)) {
      m.pause();
      return false;
    }
    b->waiters.push_back(current);
    m.block("mbarrier.try_wait", address, int(parity));
    current->wait_parity = -1;
    b = &m.mbarrier_at(address, false);
    if ((b->phase & 1) == parity) return false;  // another phase ended before this thread resumed
  }
  remember_phase(*current, *b);
  if (m.recorder) m.recorder->passed(*current, address);
  if (scope != WaitScope::relaxed) m.acquire(*current, b->arrived);
  if (scope == WaitScope::cluster) m.acquire(*current, b->arrived_cluster);
  return true;
}

// ---- fences ---------------------------------------------------------------------------------------------------------

namespace {
void fence_own_inits() {
  for (auto& [address, b] : machine->mbarriers)
    if (b.init.agent == current->agent) b.init_fenced = true;
}
}  // namespace

void fence_mbarrier_init(const Site& site) {
  if (enter_synchronisation("fence.mbarrier_init", site)) return;
  fence_own_inits();
}

void fence_proxy_async(const Site& site) {
  if (enter_synchronisation("fence.proxy.async", site)) return;
  Machine& m = *machine;
  fence_own_inits();
  if (!m.options.check) return;
  Knowledge& k = current->knows;
  if (m.options.policy.proxy_fence_on_writer_side) {
    k.proxied.raise(current->agent, current->step());
    // cp.async that completes on an mbarrier: the writing thread does not wait for it, so only a thread that has waited
    // on the mbarrier can fence these writes.
    for (AgentId agent : m.reader_fenced_agents) k.proxied.raise(agent, k.ordered[agent]);
  } else {
    k.proxied.join(k.ordered);
  }
  current->tick();
}

}  // namespace hopwell::arch::emu
