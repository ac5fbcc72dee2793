// Order in tensor memory: which accesses a tcgen05 operation may follow.
#pragma once

#include "machine.hpp"

namespace hopwell::arch::emu {

/// A tcgen05 operation that touches tensor memory.
struct TensorAccess {
  Observer& who;
  Epoch epoch;
  const char* what;
  bool tensor_core;  // an mma or cp; these run in order of issue if a fence::before/after pair hands the order on
  Epoch
      own_waited{};  // accesses of this agent up to this step are finished for the warp (its own wait::ld or wait::st)
};

/// Checks and remembers an access to lanes [lane, lane + lanes) and columns [column, column + columns) of CTA `rank`.
void access_tmem(const TensorAccess& access, uint32_t rank, int lane, int lanes, int column, int columns, bool write);

/// The agent of tensor-core operations that `t` issues; the agent after it counts operations that are issued but may
/// still run.
AgentId tensor_agent(Thread& t);

/// One kernel uses one cta_group in all tcgen05 instructions (PTX ISA, "CTA pair"); stops otherwise.
void check_cta_group(int cta_group);

/// Word of tensor memory.
inline uint32_t& tmem_word(Cta& cta, int lane, int column) { return cta.tmem[size_t(lane * kTmemColumns + column)]; }

constexpr int tmem_lane(uint32_t address) { return int(address >> 16); }
constexpr int tmem_column(uint32_t address) { return int(address & 0xffff); }

}  // namespace hopwell::arch::emu
