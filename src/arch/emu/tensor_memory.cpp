// Tensor memory: allocation, loads and stores by warps, waits and fences.
#include <algorithm>

#include "sm100.hpp"
#include "tensor_agents.hpp"

namespace hopwell::arch::emu {

AgentId tensor_agent(Thread& t) {
  Machine& m = *machine;
  if (t.tensor_agent == kNoAgent) {
    t.tensor_agent =
        m.new_agent("a tensor-core operation of " + m.describe(t),
                    "no tcgen05.commit and wait in between, or no tcgen05.fence::after_thread_sync after it");
    m.agents[t.tensor_agent].tensor_core = true;
    t.tensor_issued_agent = m.new_agent("the issue of it", "");
  }
  return t.tensor_agent;
}

void check_cta_group(int cta_group) {
  Machine& m = *machine;
  Cta& cta = *current->cta;
  if (cta_group == 2 && m.ctas.size() % 2) m.stop(Kind::tensor_memory, "cta_group::2 in a cluster without CTA pairs");
  if (cta.cta_group && cta.cta_group != cta_group)
    m.stop(Kind::tensor_memory,
           format("cta_group::%d after cta_group::%d: all tcgen05 instructions of a kernel must use the same",
                  cta_group, cta.cta_group));
  cta.cta_group = cta_group;
}

void access_tmem(const TensorAccess& access, uint32_t rank, int lane, int lanes, int column, int columns, bool write) {
  Machine& m = *machine;
  Cta& cta = m.ctas[rank];
  for (int c = column; c < column + columns; ++c)
    if (c < 0 || c >= kTmemColumns || !(cta.tmem_used >> (c / 32) & 1))
      m.stop(Kind::tensor_memory,
             format("%s touches column %d of tensor memory of CTA %u, which is not allocated", access.what, c, rank));
  if (m.recorder) m.recorder->tensor_memory_access(rank, column, columns, access.tensor_core, write);
  if (!m.options.check) return;
  const auto finished = [&](const Epoch& e) {
    if (e.empty() || e.agent == access.epoch.agent || access.who.tensor(e)) return true;
    if (e.agent == access.own_waited.agent && e.step <= access.own_waited.step) return true;
    // Tensor-core operations of different threads are in order if the issue of the first happened before the second.
    return access.tensor_core && m.is_tensor_agent(e.agent) && access.who.tensor({e.step, AgentId(e.agent + 1), 0});
  };
  const auto race = [&](const Epoch& e, int group, int c, const char* earlier) {
    const char* missing =
        !access.who.ordered(e) ? m.agents[e.agent].remedy : "tcgen05.fence::after_thread_sync is missing";
    m.find(Kind::race,
           format("%s %s lanes %d-%d, column %d of tensor memory, not ordered after the %s by ", access.what,
                  write ? "writes" : "reads", group * 16, group * 16 + 15, c, earlier) +
               m.describe(e) + ": " + missing,
           &e);
  };
  for (int group = lane / 16; group < (lane + lanes + 15) / 16; ++group)
    for (int c = column; c < column + columns; ++c) {
      TensorCell& cell = cta.tmem_shadow[size_t(group * kTmemColumns + c)];
      if (cell.write.empty() && !write)
        m.find(Kind::uninitialized,
               format("%s reads lanes %d-%d, column %d of tensor memory, where nothing has been written", access.what,
                      group * 16, group * 16 + 15, c));
      if (!finished(cell.write)) race(cell.write, group, c, "write");
      if (write) {
        for (Epoch& read : cell.reads) {
          if (!finished(read)) race(read, group, c, "read");
          read = {};
        }
        cell.write = access.epoch;
      } else {
        const int slot = choose_slot(
            cell.reads, access.epoch, [&](const Epoch& e) { return access.who.tensor(e); },
            [&] { return m.random.bit(); });
        cell.reads[size_t(slot)] = access.epoch;
      }
    }
}

// ---- allocation -----------------------------------------------------------------------------------------------------

namespace {

uint32_t column_mask(uint32_t columns, uint32_t first) {
  return uint32_t(((uint64_t{1} << columns / 32) - 1) << first / 32);
}

void take_columns(Cta& cta, uint32_t columns, uint32_t first) {
  cta.tmem_used |= column_mask(columns, first);
  if (machine->recorder) machine->recorder->tensor_memory_allocated(cta.rank, first, columns);
  if (cta.tmem.empty()) {
    cta.tmem.assign(size_t(kTmemLanes * kTmemColumns), kPoison);
    cta.tmem_shadow.assign(size_t(kTmemLanes / 16 * kTmemColumns), {});
  }
  for (uint32_t c = first; c < first + columns; ++c)
    for (int lane = 0; lane < kTmemLanes; ++lane) {
      tmem_word(cta, lane, int(c)) = kPoison;
      cta.tmem_shadow[size_t(lane / 16 * kTmemColumns) + c] = {};
    }
}

// Chooses free columns at random, because kernels must not assume a position. -1: no free columns.
int find_columns(uint32_t used, uint32_t columns) {
  const uint32_t slots = kTmemColumns / columns, start = machine->random.below(slots);
  for (uint32_t i = 0; i < slots; ++i) {
    const uint32_t first = (start + i) % slots * columns;
    if (!(used & column_mask(columns, first))) return int(first);
  }
  return -1;
}

uint32_t allocate_alone(Cta& cta, uint32_t columns) {
  for (;;) {
    const int first = find_columns(cta.tmem_used, columns);
    if (first >= 0) {
      take_columns(cta, columns, uint32_t(first));
      return uint32_t(first);
    }
    cta.tmem_waiters.push_back(current);
    machine->block("tcgen05.alloc (columns in use by others)");
  }
}

// Both CTAs of the pair request the same number of columns and get the same columns.
uint32_t allocate_pair(Cta& cta, uint32_t columns) {
  Machine& m = *machine;
  Cta& peer = m.ctas[cta.rank ^ 1];
  cta.pair_request = int(columns);
  if (peer.pair_request < 0) {
    while (cta.pair_request >= 0) {
      cta.tmem_waiters.push_back(current);
      m.block("tcgen05.alloc.cta_group::2 (the other CTA of the pair)");
    }
    return cta.pair_column;
  }
  if (peer.pair_request != int(columns))
    m.stop(Kind::tensor_memory, format("the CTAs of the pair ask for %u and %d columns", columns, peer.pair_request));
  const int first = find_columns(cta.tmem_used | peer.tmem_used, columns);
  if (first < 0) m.stop(Kind::deadlock, format("%u columns are not free in both CTAs of the pair", columns));
  take_columns(cta, columns, uint32_t(first));
  take_columns(peer, columns, uint32_t(first));
  cta.pair_request = peer.pair_request = -1;
  cta.pair_column = peer.pair_column = uint32_t(first);
  m.wake(peer.tmem_waiters);
  return uint32_t(first);
}

void check_columns(uint32_t columns) {
  if (columns < 32 || columns > 512 || (columns & (columns - 1)))
    machine->stop(Kind::tensor_memory, format("%u columns; must be a power of two from 32 to 512", columns));
}

}  // namespace

void tmem_allocate(int cta_group, uint32_t destination, uint32_t columns, const Site& site) {
  enter("tcgen05.alloc", site);
  Machine& m = *machine;
  check_cta_group(cta_group);
  check_columns(columns);
  m.require_shared(destination, 4, 4, "the destination");
  if (current->cta->tmem_relinquished) m.stop(Kind::tensor_memory, "after tcgen05.relinquish_alloc_permit");
  m.warp_collective("tcgen05.alloc", ~0u, nullptr, [](Rendezvous&) {});
  if (current->lane == 0) {
    const uint32_t first =
        cta_group == 2 ? allocate_pair(*current->cta, columns) : allocate_alone(*current->cta, columns);
    m.store(destination, first);
    current->cta->tmem_allocation = {current->step(), current->agent, current->site};
    m.generic_access(*current, destination, 4, Access::write, current->site);
  }
  m.warp_collective(
      "tcgen05.alloc (written)", ~0u, nullptr, [&](Rendezvous&) {  // after the whole warp has executed the write
        Thread& writer = *current->cta->threads[size_t(current->warp * 32)];
        for (int i = 1; i < 32; ++i)
          current->cta->threads[size_t(current->warp * 32 + i)]->knows.ordered.raise(writer.agent, writer.step());
        writer.tick();
      });
}

void tmem_deallocate(int cta_group, uint32_t address, uint32_t columns, const Site& site) {
  if (enter_synchronisation("tcgen05.dealloc", site)) return;
  Machine& m = *machine;
  check_cta_group(cta_group);
  check_columns(columns);
  m.warp_collective("tcgen05.dealloc", ~0u, nullptr, [&](Rendezvous&) {
    Cta& cta = *current->cta;
    const uint32_t first = uint32_t(tmem_column(address)), mask = column_mask(columns, first);
    if (address % columns || (cta.tmem_used & mask) != mask)
      m.stop(Kind::tensor_memory, format("columns %u to %u, which were not allocated so", first, first + columns - 1));
    const Warp& warp = cta.warps[size_t(current->warp)];
    Observer self(*current);
    const auto finished = [&](const Epoch& e) {
      if (e.empty() || (m.options.policy.dealloc_needs_fence_after ? self.tensor(e) : self.ordered(e))) return true;
      return (e.agent == warp.load_agent && e.step <= warp.loads_waited) ||
             (e.agent == warp.store_agent && e.step <= warp.stores_waited);
    };
    for (uint32_t c = first; m.options.check && c < first + columns; ++c)
      for (int group = 0; group < kTmemLanes / 16; ++group) {
        TensorCell& cell = cta.tmem_shadow[size_t(group * kTmemColumns) + c];
        for (const Epoch& e : {cell.write, cell.reads[0], cell.reads[1]})
          if (!finished(e))
            m.find(Kind::race,
                   format("column %u is still in use by ", c) + m.describe(e) + ": " + m.agents[e.agent].remedy, &e);
      }
    cta.tmem_used &= ~mask;
    if (m.recorder) m.recorder->tensor_memory_freed(cta.rank, first, columns);
    m.wake(cta.tmem_waiters);
  });
}

void tmem_relinquish(int cta_group, const Site& site) {
  enter("tcgen05.relinquish_alloc_permit", site);
  check_cta_group(cta_group);
  machine->warp_collective("tcgen05.relinquish_alloc_permit", ~0u, nullptr,
                           [](Rendezvous&) { current->cta->tmem_relinquished = true; });
}

// ---- loads and stores -----------------------------------------------------------------------------------------------

namespace {

Warp& warp_of(Thread& t) { return t.cta->warps[size_t(t.warp)]; }

void create_agents(Warp& warp) {
  if (warp.load_agent != kNoAgent) return;
  Machine& m = *machine;
  const std::string whose = format(" of CTA %u warp %d", current->cta->rank, current->warp);
  warp.load_agent =
      m.new_agent("tcgen05.ld" + whose, "no tcgen05.wait::ld and tcgen05.fence::before_thread_sync before the barrier");
  warp.store_agent =
      m.new_agent("tcgen05.st" + whose,
                  "no tcgen05.wait::st (and, for others, tcgen05.fence::before_thread_sync before the barrier)");
}

// A warp can access only the 32 lanes of its quarter: warp w of a warpgroup accesses lanes 32 w to 32 w + 31.
uint32_t check_quarter(TmemShape shape, uint32_t address) {
  Machine& m = *machine;
  const int quarter = 32 * (current->warp % 4);
  if (!m.options.policy.tmem_quarter_must_be_named && tmem_lane(address) < 32) address += uint32_t(quarter) << 16;
  const int lane = tmem_lane(address);
  if (lane != quarter && (shape == TmemShape::b32x32 || lane != quarter + 16))
    m.stop(Kind::tensor_memory, format("warp %d reaches lanes %d to %d, and the address names lane %d", current->warp,
                                       quarter, quarter + 31, lane));
  return address;
}

struct MoveArgument {
  uint32_t* registers;
  uint32_t address;
};

template <class Move>
void move_fragments(const char* instruction, TmemShape shape, uint32_t* registers, int count, uint32_t address,
                    int split, bool write, Move move) {
  Machine& m = *machine;
  MoveArgument mine{registers, check_quarter(shape, address)};
  m.warp_collective(instruction, ~0u, &mine, [&](Rendezvous& r) {
    Cta& cta = *current->cta;
    Warp& warp = warp_of(*current);
    create_agents(warp);
    const uint32_t at = mine.address;
    count_work([&](Work& w) { (write ? w.tmem_stored : w.tmem_loaded) += uint64_t(count) * 128; });
    for (size_t lane = 0; lane < 32; ++lane)
      if (static_cast<MoveArgument*>(r.argument[lane])->address != at)
        m.stop(Kind::divergence, "the addresses differ within the warp");
    Observer all(&cta.threads[size_t(current->warp * 32)], 32, cta.warps[size_t(current->warp)].common);
    const Epoch load{warp.load_step, warp.load_agent, current->site},
        store{warp.store_step, warp.store_agent, current->site};
    const TensorAccess access{
        all, write ? store : load, "it", false,
        write ? Epoch{warp.loads_waited, warp.load_agent, 0} : Epoch{warp.stores_waited, warp.store_agent, 0}};
    const auto block = [&](int column, int columns) {
      access_tmem(access, cta.rank, tmem_lane(at), tmem_lanes(shape), column, columns, write);
    };
    if (shape == TmemShape::b16x32x2) {
      block(tmem_column(at), count);
      block(tmem_column(at) + split, count);
    } else {
      block(tmem_column(at), tmem_columns(shape, count));
    }
    for (int lane = 0; lane < 32; ++lane)
      move(*cta.threads[size_t(current->warp * 32 + lane)],
           static_cast<MoveArgument*>(r.argument[size_t(lane)])->registers, [&](int reg) -> uint32_t& {
             const Coord c = tmem_fragment(shape, lane, reg, split);
             return tmem_word(cta, tmem_lane(at) + c.row, tmem_column(at) + c.col);
           });
  });
}

// Reports a load without a wait whose registers have been reused or no longer exist.
void report_lost(const Thread& t, const PendingLoad& load) {
  const Epoch issue{0, t.agent, load.site};
  machine->find(Kind::pending,
                "the registers of the tcgen05.ld at " + to_string(machine->sites.resolve(load.site)) +
                    " were given up or used for something else before they were loaded: no tcgen05.wait::ld after it",
                &issue);
}

// Two loads into the same registers: the result of the first is lost.
void give_up_loads_into(Thread& t, const uint32_t* registers, int count) {
  std::erase_if(t.loads, [&](const PendingLoad& load) {
    const bool overlap = load.registers < registers + count && registers < load.registers + load.count;
    if (overlap) report_lost(t, load);
    return overlap;
  });
  if (t.loads.empty()) t.loaded.clear();
}

// Writes the loaded values to the registers if these still hold the poison. Otherwise they may be variables of another
// function, and nothing is written. Nothing below `frame`, the current stack frame, is written either, because that
// memory is dead.
void arrive(const Thread& t, const PendingLoad& load, const void* frame) {
  const auto at = reinterpret_cast<uintptr_t>(load.registers), stack = reinterpret_cast<uintptr_t>(t.stack);
  const bool gone = at >= stack && at < reinterpret_cast<uintptr_t>(frame);
  if (gone || std::any_of(load.registers, load.registers + load.count, [](uint32_t w) { return w != kPoison; }))
    return report_lost(t, load);
  std::copy_n(t.loaded.begin() + load.first, load.count, load.registers);
}

}  // namespace

void tmem_load(TmemShape shape, uint32_t* registers, int count, uint32_t address, int split, const Site& site) {
  enter("tcgen05.ld", site);
  const bool late = machine->options.policy.tmem_load_poisoned_until_wait;
  give_up_loads_into(*current, registers, count);
  move_fragments("tcgen05.ld", shape, registers, count, address, split, false, [&](Thread& t, uint32_t* r, auto word) {
    t.loads.push_back({r, uint32_t(t.loaded.size()), uint32_t(count), current->site});
    for (int i = 0; i < count; ++i) {
      t.loaded.push_back(word(i));
      r[i] = late ? kPoison : word(i);
    }
  });
}

void tmem_store(TmemShape shape, const uint32_t* registers, int count, uint32_t address, int split, const Site& site) {
  enter("tcgen05.st", site);
  move_fragments("tcgen05.st", shape, const_cast<uint32_t*>(registers), count, address, split, true,
                 [&](Thread&, const uint32_t* r, auto word) {
                   for (int i = 0; i < count; ++i) word(i) = r[i];
                 });
}

void tmem_wait_load(const Site& site) {
  if (enter_synchronisation("tcgen05.wait::ld", site)) return;
  Machine& m = *machine;
  if (m.options.policy.tmem_load_poisoned_until_wait)
    for (const PendingLoad& load : current->loads) arrive(*current, load, __builtin_frame_address(0));
  current->loads.clear();
  current->loaded.clear();
  m.warp_collective("tcgen05.wait::ld", ~0u, nullptr, [&](Rendezvous&) {
    Warp& warp = warp_of(*current);
    warp.loads_waited = warp.load_step++;
    if (m.options.policy.tmem_wait_needs_fence_before || warp.load_agent == kNoAgent) return;
    for (int i = 0; i < 32; ++i)
      current->cta->threads[size_t(current->warp * 32 + i)]->knows.ordered.raise(warp.load_agent, warp.loads_waited);
  });
}

void tmem_wait_store(const Site& site) {
  if (enter_synchronisation("tcgen05.wait::st", site)) return;
  Machine& m = *machine;
  m.warp_collective("tcgen05.wait::st", ~0u, nullptr, [&](Rendezvous&) {
    Warp& warp = warp_of(*current);
    warp.stores_waited = warp.store_step++;
    if (m.options.policy.tmem_wait_needs_fence_before || warp.store_agent == kNoAgent) return;
    for (int i = 0; i < 32; ++i)
      current->cta->threads[size_t(current->warp * 32 + i)]->knows.ordered.raise(warp.store_agent, warp.stores_waited);
  });
}

// ---- fences ---------------------------------------------------------------------------------------------------------

void tcgen05_fence_before(const Site& site) {
  if (enter_synchronisation("tcgen05.fence::before_thread_sync", site)) return;
  if (!machine->options.check) return;
  Thread& t = *current;
  const Warp& warp = warp_of(t);
  if (warp.load_agent != kNoAgent) {
    t.knows.ordered.raise(warp.load_agent, warp.loads_waited);
    t.knows.ordered.raise(warp.store_agent, warp.stores_waited);
  }
  if (t.tensor_agent != kNoAgent) t.knows.ordered.raise(t.tensor_issued_agent, t.tensor_step++);
}

void tcgen05_fence_after(const Site& site) {
  if (enter_synchronisation("tcgen05.fence::after_thread_sync", site)) return;
  if (machine->options.check) current->tensor.join(current->knows.ordered);
}

}  // namespace hopwell::arch::emu
