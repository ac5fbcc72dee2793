// Rendezvous of warps and warpgroups: every participant supplies an argument, the last one to arrive acts for all.
#pragma once

namespace hopwell::arch::emu {

template <class Action>
void* Machine::meet(Rendezvous& r, const char* instruction, uint32_t mask, int needed, int position,
                   Thread* const* members, int n, void* argument, Action action) {
  if (r.arrived == 0) {
    r.instruction = instruction;
    r.mask = mask;
    r.needed = needed;
  } else if (r.instruction != instruction || r.mask != mask) {
    stop(Kind::divergence, format("%s (mask 0x%08x) meets %s (mask 0x%08x) of other threads of the same %s",
                                  instruction, mask, r.instruction, r.mask, n == 32 ? "warp" : "warpgroup"));
  }
  r.argument[size_t(position)] = argument;
  if (++r.arrived < r.needed) {
    block(instruction);
    return r.argument[size_t(position)];
  }
  r.arrived = 0;
  action(r);
  if (recorder) recorder->met(members, n, mask);
  for (int i = 0; i < n; ++i)
    if (members[i] != current && (n > 32 || mask >> i & 1)) wake(members[i]);
  return r.argument[size_t(position)];
}

template <class Action>
void* Machine::warp_collective(const char* instruction, uint32_t mask, void* argument, Action action) {
  Cta& cta = *current->cta;
  const int first = current->warp * 32, lanes = std::min(32, int(cta.threads.size()) - first);
  if (lanes < 32) mask &= (1u << lanes) - 1;
  if (!(mask >> current->lane & 1))
    stop(Kind::divergence, format("%s by lane %d, which its mask 0x%08x leaves out", instruction, current->lane, mask));
  return meet(cta.warps[size_t(current->warp)].rendezvous, instruction, mask, __builtin_popcount(mask), current->lane,
       &cta.threads[size_t(first)], lanes == 32 ? 32 : lanes, argument, action);
}

template <class Action>
void Machine::warpgroup_collective(const char* instruction, void* argument, Action action) {
  Cta& cta = *current->cta;
  const size_t first = size_t(current->linear / 128 * 128);
  if (cta.threads.size() < first + 128)
    stop(Kind::divergence, std::string(instruction) + " outside of a whole warpgroup of 128 threads");
  meet(cta.warpgroups[first / 128].rendezvous, instruction, ~0u, 128, current->linear % 128, &cta.threads[first], 128,
       argument, action);
}

}  // namespace hopwell::arch::emu
