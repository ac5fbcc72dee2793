// Accesses to shared memory: bounds, initialisation, races and proxies.
#include "machine.hpp"

namespace hopwell::arch::emu {

namespace {

std::string race_text(Machine& m, bool write, const char* what, uint32_t address, const Epoch& other,
                      bool other_writes) {
  return format("%s %s %s, not ordered after the %s by ", what, write ? "writes" : "reads", m.place(address).c_str(),
                other_writes ? "write" : "read") +
         m.describe(other) + ": " + m.agents[other.agent].remedy;
}

}  // namespace

void Machine::require_shared(uint32_t address, uint32_t bytes, uint32_t alignment, const char* what) {
  if (!inside(address, bytes))
    stop(Kind::bounds,
         format("%s of %u bytes at offset %d of CTA %u is outside of its %zu bytes of dynamic shared memory", what,
                bytes, int(offset_of(address)) - int(kReservedBytes), rank_of(address), shape.shared_bytes));
  if (address % alignment)
    stop(Kind::bounds, format("%s at %s must be %u-byte aligned", what, place(address).c_str(), alignment));
}

void Machine::generic_access(Thread& t, uint32_t address, uint32_t bytes, Access access, SiteId site) {
  const bool write = access != Access::read;
  ++report.statistics.shared_accesses;
  count_work([&](Work& w) { w.shared_bytes += bytes; });
  if (recorder) recorder->shared_access(t, address, bytes, site);
  if (!inside(address, bytes)) {
    find(Kind::bounds,
         format("%s of %u bytes at offset %d of CTA %u is outside of its %zu bytes of dynamic shared memory",
                write ? "write" : "read", bytes, int(offset_of(address)) - int(kReservedBytes), rank_of(address),
                shape.shared_bytes));
    return;
  }
  if (!options.check) return;
  Cta& cta = ctas[rank_of(address)];
  if (&cta != t.cta && cta.live == 0)
    find(Kind::bounds, format("access to shared memory of CTA %u, which has exited", cta.rank));
  const Epoch epoch{t.step(), t.agent, site};
  const char* what = "it";
  cta.shadow.visit(offset_of(address), bytes, write, [&](SharedCell& cell, uint32_t offset, uint8_t mask) {
    const uint32_t a = in_rank(cta.rank, offset);
    if (access != Access::write && (cell.written & mask) != mask) {
      find(Kind::uninitialized, "reads " + place(a) + ", where nothing has been written");
      cell.written |= mask;  // reported once
    }
    const auto overwritable = [&](const Epoch& e) { return t.knows.ordered.covers(e) || t.knows.freed.covers(e); };
    const auto covered = [&](const Epoch& e) { return t.knows.ordered.covers(e); };
    for (int i = 0; i < 2; ++i) {
      const bool both_add = access == Access::add && cell.added[i];
      if ((cell.write_bytes[i] & mask) && cell.writes[i].agent != t.agent && !both_add &&
          !(access == Access::write ? overwritable(cell.writes[i]) : covered(cell.writes[i])))
        find(Kind::race, race_text(*this, write, what, a, cell.writes[i], true), &cell.writes[i]);
      if (write && (cell.read_bytes[i] & mask) && cell.reads[i].agent != t.agent && !overwritable(cell.reads[i]))
        find(Kind::race, race_text(*this, write, what, a, cell.reads[i], false), &cell.reads[i]);
    }
    const auto random_bit = [&] { return random.bit(); };
    if (access == Access::add) {
      remember_add(cell, epoch, covered, random_bit);
    } else if (write) {
      remember_write(cell, epoch, mask, Proxy::generic);
    } else {
      const int slot = choose_slot(cell.reads, epoch, covered, random_bit);
      cell.read_bytes[size_t(slot)] =
          cell.reads[size_t(slot)].agent == t.agent ? cell.read_bytes[size_t(slot)] | mask : mask;
      cell.reads[size_t(slot)] = epoch;
    }
  });
}

void Machine::async_access(Observer& who, Epoch epoch, uint32_t address, uint32_t bytes, bool write, Proxy proxy,
                           const char* what) {
  if (!inside(address, bytes))
    stop(Kind::bounds,
         format("%s of %u bytes at offset %d of CTA %u is outside of its %zu bytes of dynamic shared memory", what,
                bytes, int(offset_of(address)) - int(kReservedBytes), rank_of(address), shape.shared_bytes));
  if (!options.check) return;
  Cta& cta = ctas[rank_of(address)];
  if (cta.live == 0) find(Kind::bounds, format("%s touches shared memory of CTA %u, which has exited", what, cta.rank));
  Epoch known_write;  // of the previous cell: neighbouring cells mostly have the same writer
  Proxy known_proxy = Proxy::async;
  cta.shadow.visit(offset_of(address), bytes, write, [&](SharedCell& cell, uint32_t offset, uint8_t mask) {
    const uint32_t a = in_rank(cta.rank, offset);
    if (!write && (cell.written & mask) != mask) {
      find(Kind::uninitialized, format("%s reads ", what) + place(a) + ", where nothing has been written");
      cell.written |= mask;
    }
    for (int i = 0; i < 2; ++i) {
      const Epoch& w = cell.writes[i];
      if ((cell.write_bytes[i] & mask) && !w.same_step(epoch) &&
          !(w.same_step(known_write) && cell.write_proxy[i] == known_proxy)) {
        if (!who.ordered(w) && !(write && who.freed(w)))
          find(Kind::race, race_text(*this, write, what, a, w, true), &w);
        else if (proxy == Proxy::async &&
                 (cell.write_proxy[i] == Proxy::generic ||
                  (cell.write_proxy[i] == Proxy::cp_async && options.policy.cp_async_needs_proxy_fence)) &&
                 !who.proxied(w))
          find(Kind::proxy,
               format("%s %s ", what, write ? "writes" : "reads") + place(a) +
                   " by the async proxy with no fence.proxy.async after the write by " + describe(w),
               &w);
        else
          known_write = w, known_proxy = cell.write_proxy[i];
      }
      const Epoch& r = cell.reads[i];
      if (write && (cell.read_bytes[i] & mask) && !r.same_step(epoch) && !who.ordered(r) && !who.freed(r))
        find(Kind::race, race_text(*this, true, what, a, r, false), &r);
    }
    if (write) {
      remember_write(cell, epoch, mask, proxy);
    } else {
      const int slot =
          choose_slot(cell.reads, epoch, [&](const Epoch& e) { return who.ordered(e); }, [&] { return random.bit(); });
      cell.read_bytes[size_t(slot)] =
          cell.reads[size_t(slot)].same_step(epoch) ? cell.read_bytes[size_t(slot)] | mask : mask;
      cell.reads[size_t(slot)] = epoch;
    }
  });
}

void Machine::poison(uint32_t address, uint32_t bytes) {
  std::byte* const at = memory(address);
  uint32_t i = 0;
  const auto poison_byte = [&] { at[i] = std::byte(kPoison >> 8 * ((address + i) % 4)), ++i; };
  while (i < bytes && (address + i) % 4) poison_byte();
  for (; i + 4 <= bytes; i += 4) __builtin_memcpy(at + i, &kPoison, 4);
  while (i < bytes) poison_byte();
}

}  // namespace hopwell::arch::emu
