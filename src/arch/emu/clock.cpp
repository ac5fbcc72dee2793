#include "clock.hpp"

#include "vector_clones.hpp"

namespace hopwell::arch::emu {

namespace {

// Result bit 0: some step of a is higher than in b. Bit 1: some step of a is lower.
HOPWELL_VECTOR_CLONES
int compare(const uint32_t* a, const uint32_t* b) {
  uint32_t higher = 0, lower = 0;
  for (size_t i = 0; i < ClockBlock::kAgents; ++i) {
    higher |= a[i] > b[i] ? 1u : 0u;
    lower |= a[i] < b[i] ? 1u : 0u;
  }
  return int(higher | lower << 1);
}

HOPWELL_VECTOR_CLONES
void raise_steps(uint32_t* __restrict mine, const uint32_t* __restrict theirs) {
  for (size_t i = 0; i < ClockBlock::kAgents; ++i) mine[i] = mine[i] < theirs[i] ? theirs[i] : mine[i];
}

}  // namespace

HOPWELL_VECTOR_CLONES
void lower_steps(uint32_t* __restrict least, const uint32_t* __restrict steps) {
  for (size_t i = 0; i < ClockBlock::kAgents; ++i) least[i] = steps[i] < least[i] ? steps[i] : least[i];
}

void VectorClock::join_block(ClockBlockOwner& mine, const ClockBlockOwner& theirs) {
  if (!theirs.get()) return;
  const int order = mine.get() ? compare(mine.get()->steps.data(), theirs.get()->steps.data()) : 2;
  if (!(order & 1))
    mine = theirs;
  else if (order & 2)
    raise_steps(mine.own().steps.data(), theirs.get()->steps.data());
}

}  // namespace hopwell::arch::emu
