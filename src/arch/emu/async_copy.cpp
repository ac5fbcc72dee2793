// cp.async: a thread copies 4, 8 or 16 bytes. Copies complete in commit groups, through wait_group or an mbarrier.
#include "machine.hpp"
#include "sm80.hpp"
#include "sm90.hpp"

namespace hopwell::arch::emu {

namespace {

AgentId copy_agent(Thread& t) {
  Machine& m = *machine;
  if (t.copies.agent == kNoAgent) {
    t.copies.agent = m.new_agent(
        "cp.async of ", "no cp.async.wait_group (or arrival on an mbarrier that is waited for) in between", &t);
    m.reader_fenced_agents.push_back(t.copies.agent);
  }
  return t.copies.agent;
}

}  // namespace

void cp_async(uint32_t destination, const void* source, uint32_t bytes, uint32_t source_bytes, const Site& site) {
  enter("cp.async", site);
  Machine& m = *machine;
  Thread& t = *current;
  if (bytes != 4 && bytes != 8 && bytes != 16) m.stop(Kind::unsupported, format("%u bytes; must be 4, 8 or 16", bytes));
  if (source_bytes > bytes) m.stop(Kind::bounds, format("src-size %u exceeds cp-size %u", source_bytes, bytes));
  m.require_shared(destination, bytes, bytes, "the destination");
  if (rank_of(destination) != t.cta->rank) m.stop(Kind::bounds, "the destination is in another CTA");
  if (reinterpret_cast<uintptr_t>(source) % bytes)  // also of a source that is not read
    m.stop(Kind::bounds, format("the global address must be %u-byte aligned", bytes));
  const Epoch epoch{t.copies.issue(), copy_agent(t), t.site};
  Observer self(t);
  m.async_access(self, epoch, destination, bytes, true, Proxy::cp_async, "it");
  if (m.work) m.work->touch(source, source_bytes, false);
  count_work([&](Work& w) { w.copied_bytes += bytes; });
  m.poison(destination, bytes);
  // The captures take 16 bytes, which std::function stores without an allocation.
  const auto copy = [source, destination, bytes = uint8_t(bytes), source_bytes = uint8_t(source_bytes)] {
    std::byte* const to = machine->memory(destination);
    __builtin_memcpy(to, source, source_bytes);
    __builtin_memset(to + source_bytes, 0, size_t(bytes - source_bytes));
  };
  static_assert(sizeof copy <= 16);
  m.submit_group(t, t.copies, {copy, t.copies.open_group});
}

void cp_async_commit(const Site& site) {
  if (enter_synchronisation("cp.async.commit_group", site)) return;
  ++current->copies.open_group;
}

void cp_async_wait(int pending_groups, const Site& site) {
  if (enter_synchronisation(pending_groups < 0 ? "cp.async.wait_all" : "cp.async.wait_group", site)) return;
  GroupQueue& queue = current->copies;
  if (pending_groups < 0) ++queue.open_group;
  const uint64_t keep = uint64_t(std::max(pending_groups, 0)),
                 before = queue.open_group > keep ? queue.open_group - keep : 0;
  machine->complete_groups(queue, before);
  if (machine->options.check && queue.agent != kNoAgent)
    current->knows.ordered.raise(queue.agent, queue.last_step_before(before));
}

void cp_async_mbarrier_arrive_noinc(uint32_t address, const Site& site) {
  if (enter_synchronisation("cp.async.mbarrier.arrive.noinc", site)) return;
  Machine& m = *machine;
  Thread& t = *current;
  m.mbarrier_at(address, true);
  const AgentId agent = copy_agent(t);
  const uint32_t step = t.copies.issued;
  m.submit_group(t, t.copies,
                 {[&m, address, agent, step] {
                    Mbarrier* b = m.find_mbarrier(address);
                    if (!b)
                      return m.find(Kind::barrier, "cp.async.mbarrier.arrive.noinc arrives on the mbarrier at " +
                                                       m.place(address) + ", which no longer exists");
                    if (b->pending == 0)
                      m.stop(Kind::barrier, "cp.async.mbarrier.arrive.noinc arrives more often than the mbarrier at " +
                                                m.place(address) + " expects");
                    if (m.options.check) b->arriving.ordered.raise(agent, step);
                    --b->pending;
                    m.finish_phase(*b);
                  },
                  t.copies.open_group, true});
}

}  // namespace hopwell::arch::emu
