// Bulk copies of contiguous bytes, bulk reductions, and st.async.
#include <utility>

#include "box_walk.hpp"
#include "machine.hpp"
#include "numeric.hpp"
#include "sm90.hpp"

namespace hopwell::arch::emu {

namespace {

void check_bulk(uint32_t bytes, const void* global) {
  if (bytes == 0 || bytes % 16) machine->stop(Kind::bounds, format("%u bytes; must be a multiple of 16", bytes));
  if (reinterpret_cast<uintptr_t>(global) % 16)
    machine->stop(Kind::bounds, "the global address must be 16-byte aligned");
}

void check_same_cta(uint32_t destination, uint32_t mbarrier) {
  if (rank_of(destination) != rank_of(mbarrier))
    machine->stop(Kind::barrier, format("the destination is in CTA %u and the mbarrier in CTA %u", rank_of(destination),
                                        rank_of(mbarrier)));
}

}  // namespace

void bulk_load(uint32_t destination, const void* source, uint32_t bytes, uint32_t mbarrier, int cta_mask,
               const Site& site) {
  enter("cp.async.bulk (load)", site);
  Machine& m = *machine;
  check_bulk(bytes, source);
  m.require_shared(destination, bytes, 16, "the destination");
  if (cta_mask < 0)
    check_same_cta(destination, mbarrier);
  else if (cta_mask == 0 || uint32_t(cta_mask) >> m.ctas.size())
    m.stop(Kind::bounds, format("CTA mask 0x%x in a cluster of %zu", cta_mask, m.ctas.size()));
  ++m.report.statistics.bulk_copies;
  if (m.work) m.work->touch(source, bytes, false);
  Observer self(*current);
  for (uint32_t r = 0; r < m.ctas.size(); ++r) {
    if (cta_mask < 0 ? r != rank_of(destination) : !(cta_mask >> r & 1)) continue;
    const uint32_t target = in_rank(r, destination), signal = in_rank(r, mbarrier);
    const Epoch epoch = m.begin_transaction(m.mbarrier_at(signal, true));
    m.async_access(self, epoch, target, bytes, true, Proxy::async, "it");
    m.poison(target, bytes);
    if (m.work) m.work->of(r, r == current->cta->rank ? current->warp : 0).copied_bytes += bytes;
    m.submit({[&m, source, target, signal, step = epoch.step, bytes] {
      __builtin_memcpy(m.memory(target), source, bytes);
      m.complete_transaction(signal, step, bytes);
    }});
  }
}

void bulk_copy_to_cta(uint32_t destination, uint32_t source, uint32_t bytes, uint32_t mbarrier, const Site& site) {
  enter("cp.async.bulk (to another CTA)", site);
  Machine& m = *machine;
  check_bulk(bytes, nullptr);
  m.require_shared(destination, bytes, 16, "the destination");
  m.require_shared(source, bytes, 16, "the source");
  if (rank_of(source) != current->cta->rank) m.stop(Kind::bounds, "the source is in another CTA");
  check_same_cta(destination, mbarrier);
  ++m.report.statistics.bulk_copies;
  count_work([&](Work& w) { w.shared_bytes += 2 * bytes; });
  Observer self(*current);
  const Epoch epoch = m.begin_transaction(m.mbarrier_at(mbarrier, true));
  m.async_access(self, epoch, source, bytes, false, Proxy::async, "it");
  m.async_access(self, epoch, destination, bytes, true, Proxy::async, "it");
  m.poison(destination, bytes);
  m.submit({[&m, source, destination, mbarrier, step = epoch.step, bytes] {
    __builtin_memcpy(m.memory(destination), m.memory(source), bytes);
    m.complete_transaction(mbarrier, step, bytes);
  }});
}

void submit_bulk_store(uint32_t source, uint32_t bytes, std::function<void(const std::byte*)> write) {
  Machine& m = *machine;
  Thread& t = *current;
  ++m.report.statistics.bulk_copies;
  count_work([&](Work& w) { w.shared_bytes += bytes; });
  if (rank_of(source) != t.cta->rank) m.stop(Kind::bounds, "the source is in another CTA");
  if (t.bulk.agent == kNoAgent)
    t.bulk.agent = m.new_agent("a bulk copy out of shared memory by " + m.describe(t),
                               "no cp.async.bulk.wait_group followed by a barrier in between");
  const Epoch epoch{t.bulk.issue(), t.bulk.agent, t.site};
  Observer self(t);
  m.async_access(self, epoch, source, bytes, false, Proxy::async, "it");
  const uint64_t group = t.bulk.open_group;
  m.submit_group(t, t.bulk,
                 {[&m, &t, source, bytes, group, write = std::move(write)] {
                    std::vector<std::byte> data(m.memory(source), m.memory(source) + bytes);
                    if (!m.reading_only) return write(data.data());
                    t.unfinished_writes.push_back({[write, data] { write(data.data()); }, group});
                  },
                  group});
}

void bulk_store(void* destination, uint32_t source, uint32_t bytes, const Site& site) {
  enter("cp.async.bulk (store)", site);
  check_bulk(bytes, destination);
  machine->require_shared(source, bytes, 16, "the source");
  if (machine->work) machine->work->touch(destination, bytes, true);
  submit_bulk_store(source, bytes,
                    [destination, bytes](const std::byte* data) { __builtin_memcpy(destination, data, bytes); });
}

void bulk_reduce(void* destination, uint32_t source, uint32_t bytes, ReduceType type, const Site& site) {
  enter("cp.reduce.async.bulk.add", site);
  check_bulk(bytes, destination);
  machine->require_shared(source, bytes, 16, "the source");
  if (machine->work) machine->work->touch(destination, bytes, true);
  count_work([&](Work& w) { w.added_bytes += bytes; });
  submit_bulk_store(source, bytes, [destination, bytes, type](const std::byte* data) {
    const auto add = [&](auto zero, auto sum) {
      using T = decltype(zero);
      for (uint32_t i = 0; i < bytes; i += sizeof(T)) {
        T a, b;
        __builtin_memcpy(&a, static_cast<std::byte*>(destination) + i, sizeof(T));
        __builtin_memcpy(&b, data + i, sizeof(T));
        a = sum(a, b);
        __builtin_memcpy(static_cast<std::byte*>(destination) + i, &a, sizeof(T));
      }
    };
    switch (type) {
      case ReduceType::f32:
        return add(float{}, [](float a, float b) { return canonical(a + b); });
      case ReduceType::bf16:
        return add(uint16_t{}, [](uint16_t a, uint16_t b) { return to_bf16_bits(from_bf16(a) + from_bf16(b)); });
      case ReduceType::s64:
        return add(uint64_t{}, [](uint64_t a, uint64_t b) { return a + b; });
    }
  });
}

void bulk_commit(const Site& site) {
  if (enter_synchronisation("cp.async.bulk.commit_group", site)) return;
  ++current->bulk.open_group;
}

void bulk_wait(int pending_groups, bool read_only, const Site& site) {
  if (enter_synchronisation(read_only ? "cp.async.bulk.wait_group.read" : "cp.async.bulk.wait_group", site)) return;
  Machine& m = *machine;
  Thread& t = *current;
  GroupQueue& queue = t.bulk;
  const uint64_t before = queue.open_group > uint64_t(pending_groups) ? queue.open_group - uint64_t(pending_groups) : 0;
  m.reading_only = read_only;
  m.complete_groups(queue, before);
  m.reading_only = false;
  while (!read_only && !t.unfinished_writes.empty() && t.unfinished_writes.front().group < before) {
    t.unfinished_writes.front().perform();
    t.unfinished_writes.erase(t.unfinished_writes.begin());
  }
  if (m.options.check && queue.agent != kNoAgent) t.knows.ordered.raise(queue.agent, queue.last_step_before(before));
}

void store_async(uint32_t destination, const void* value, uint32_t bytes, uint32_t mbarrier, const Site& site) {
  enter("st.async", site);
  Machine& m = *machine;
  count_work([&](Work& w) { w.shared_bytes += bytes; });
  m.require_shared(destination, bytes, bytes, "the destination");
  check_same_cta(destination, mbarrier);
  Mbarrier& b = m.mbarrier_at(mbarrier, true);
  const Epoch epoch = m.begin_transaction(b);
  if (!std::exchange(b.generic_writes, true)) m.reader_fenced_agents.push_back(b.agent);
  Observer self(*current);
  m.async_access(self, epoch, destination, bytes, true, Proxy::cp_async, "it");
  m.poison(destination, bytes);
  std::array<std::byte, 16> data{};
  __builtin_memcpy(data.data(), value, bytes);
  m.submit({[&m, data, destination, mbarrier, step = epoch.step, bytes] {
    __builtin_memcpy(m.memory(destination), data.data(), bytes);
    m.complete_transaction(mbarrier, step, bytes);
  }});
}

void setmaxnreg(int registers, bool increase, const Site& site) {
  enter(increase ? "setmaxnreg.inc" : "setmaxnreg.dec", site);
  Machine& m = *machine;
  if (registers % 8 || registers < 24 || registers > 256)
    m.stop(Kind::unsupported, format("%d registers; must be a multiple of 8 from 24 to 256", registers));
  m.warpgroup_collective(current->instruction, nullptr, [&](Rendezvous&) {
    Warpgroup& group = current->cta->warpgroups[size_t(current->linear / 128)];
    // At launch a thread has at most an equal fraction of the 65,536 registers of the register file, rounded down to a
    // multiple of 8.
    const int groups = static_cast<int>(current->cta->warpgroups.size()), launched = 65536 / (128 * groups) / 8 * 8;
    const int before = group.registers ? group.registers : increase ? 0 : launched;
    if (increase ? registers < before : registers > before)
      m.find(Kind::divergence, format("%d registers after %d: wrong direction", registers, before));
    group.registers = registers;
    int total = 0;  // registers of the warpgroups that have executed setmaxnreg
    for (const Warpgroup& g : current->cta->warpgroups) total += g.registers;
    if (total > launched * groups)
      m.find(
          Kind::deadlock,
          format("the warpgroups ask for %d registers in all; they were launched with %d at most: setmaxnreg.inc would "
                 "wait for ever",
                 total, launched * groups));
  });
}

}  // namespace hopwell::arch::emu
