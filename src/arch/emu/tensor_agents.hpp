// Ordering in tensor memory: which earlier accesses a tcgen05 operation is ordered after.
#pragma once

#include "machine.hpp"

namespace hopwell::arch::emu {

/// A tcgen05 operation that touches tensor memory.
struct TensorAccess {
  Observer& who;
  Epoch epoch;
  const char* what;
  bool tensor_core;    // an mma or cp; in order of issue if a fence::before/after pair orders their threads
  Epoch own_waited{};  // this agent's accesses up to this step are complete for the warp (after wait::ld or wait::st)
};

/// Checks and records an access to lanes [lane, lane + lanes) and columns [column, column + columns) of CTA `rank`.
void access_tmem(const TensorAccess& access, uint32_t rank, int lane, int lanes, int column, int columns, bool write);

/// Agent of the tensor-core operations that `t` issues. The next agent id counts operations that are issued but may
/// still run.
AgentId tensor_agent(Thread& t);

/// A kernel must use one cta_group in all tcgen05 instructions (PTX ISA, "CTA pair"). Stops the launch otherwise.
void check_cta_group(int cta_group);

/// One word of tensor memory.
inline uint32_t& tmem_word(Cta& cta, int lane, int column) { return cta.tmem[size_t(lane * kTmemColumns + column)]; }

constexpr int tmem_lane(uint32_t address) { return int(address >> 16); }
constexpr int tmem_column(uint32_t address) { return int(address & 0xffff); }

}  // namespace hopwell::arch::emu
