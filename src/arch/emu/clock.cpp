#include "clock.hpp"

#include "vector_clones.hpp"

namespace hopwell::arch::emu {

HOPWELL_VECTOR_CLONES
void join_steps(uint32_t* __restrict mine, const uint32_t* __restrict theirs, size_t count) {
  for (size_t i = 0; i < count; ++i) mine[i] = mine[i] < theirs[i] ? theirs[i] : mine[i];
}

HOPWELL_VECTOR_CLONES
void lower_steps(uint32_t* __restrict least, const uint32_t* __restrict steps, size_t count) {
  for (size_t i = 0; i < count; ++i) least[i] = steps[i] < least[i] ? steps[i] : least[i];
}

}  // namespace hopwell::arch::emu
