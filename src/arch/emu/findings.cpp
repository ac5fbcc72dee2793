// Formats the text of findings.
#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <utility>

#include "machine.hpp"

// A debugger breaks here to stop at each new finding, in the thread that made it. The assembler statement keeps the
// calls.
extern "C" __attribute__((noinline, used)) void hopwell_emulator_finding(const char* kind, const char* text) {
  asm volatile("" ::"r"(kind), "r"(text) : "memory");
}

namespace hopwell::arch::emu {

std::string format(const char* pattern, ...) {
  char buffer[512];
  va_list arguments;
  va_start(arguments, pattern);
  vsnprintf(buffer, sizeof buffer, pattern, arguments);
  va_end(arguments);
  return buffer;
}

AgentId Machine::new_agent(std::string description, const char* remedy, const Thread* thread) {
  if (agents.size() >= kNoAgent)
    stop(Kind::unsupported, "more than 65534 threads and asynchronous engines in one cluster");
  agents.push_back({std::move(description), remedy, thread, false});
  return AgentId(agents.size() - 1);
}

std::string Machine::describe(const Thread& t) const { return format("CTA %u thread %d", t.cta->rank, t.linear); }

std::string Machine::describe(const Epoch& e) {
  const Agent& agent = agents[e.agent];
  return agent.description + (agent.thread ? describe(*agent.thread) : "") + " at " + to_string(sites.resolve(e.site));
}

std::string Machine::place(uint32_t address) const {
  return "shared " + place_in_cta(address) + format(" of CTA %u", rank_of(address));
}

std::string Machine::place_in_cta(uint32_t address) const {
  const Cta& cta = ctas[rank_of(address)];
  const uint32_t offset = offset_of(address) - kReservedBytes;
  Thread* const asking = std::exchange(current, nullptr);  // the hooks must not count this function's accesses
  std::string name;
  const bool named = cta.names && !cta.several_structs && cta.names(cta.shared + kReservedBytes, offset, name);
  current = asking;
  return named ? name : format("+0x%x", offset);
}

const BarrierArray& Machine::barrier_array(uint32_t address, uint32_t arrivals) {
  BarrierArray array{sites.resolve(current->site), "", arrivals};
  for (const char c : place_in_cta(address)) {
    if (c == ']' || array.name.empty() || array.name.back() != '[') array.name += c;  // without the digits after '['
  }
  if (array.name.front() == '+') array.name = "barriers";
  const auto known = std::find(report.barriers.begin(), report.barriers.end(), array);
  return known == report.barriers.end() ? report.barriers.emplace_back(std::move(array)) : *known;
}

void Machine::find(Kind kind, const std::string& text, const Epoch* other) {
  const SiteId here = current ? current->site : 0, there = other ? other->site : 0;
  const uint64_t key = uint64_t(kind) << 32 | uint64_t{here} << 16 | there;
  const auto [known, added] = known_findings_.try_emplace(key, report.findings.size());
  if (!added) {
    if (known->second < report.findings.size()) ++report.findings[known->second].count;
    return;
  }
  if (report.findings.size() >= options.max_findings) return;
  Finding finding{kind, "", sites.resolve(here), other ? sites.resolve(there) : CallSite{}, 1};
  if (current) finding.text = std::string(current->instruction) + " by " + describe(*current) + ": ";
  finding.text += text;
  hopwell_emulator_finding(name(kind), finding.text.c_str());
  report.findings.push_back(std::move(finding));
  stopped |= options.throw_findings;
}

void Machine::stop(Kind kind, const std::string& text) {
  find(kind, text);
  stopped = true;
  if (!current) throw Stopped{};
  current->state = Thread::State::blocked;
  current->fiber.suspend();
  __builtin_unreachable();
}

bool enter_synchronisation(const char* instruction, const Site& site) {
  enter(instruction, site);
  Machine& m = *machine;
  if (m.synchronisation_.size() <= current->site) m.synchronisation_.resize(size_t{current->site} + 1);
  auto& entries = m.synchronisation_[current->site];
  auto entry =
      std::find_if(entries.begin(), entries.end(), [&](const auto& e) { return e.instruction == instruction; });
  if (entry == entries.end()) {
    SynchronisationCall call{instruction, m.sites.resolve(current->site)};
    entry = entries.insert(entry, {instruction, m.report.synchronisation.size(), m.options.leave_out == call});
    m.report.synchronisation.push_back({std::move(call), 0});
  }
  ++m.report.synchronisation[entry->index].calls;
  return entry->left_out;
}

}  // namespace hopwell::arch::emu
