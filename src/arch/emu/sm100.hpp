// Emulator entry points for the instructions of Blackwell. Called by the arch layer only.
#pragma once

#include <cstdint>

#include "geometry.hpp"
#include "sm90.hpp"

namespace hopwell::arch::emu {

// ---- tensor memory (tensor_memory.cpp) ----
void tmem_allocate(int cta_group, uint32_t destination, uint32_t columns, const Site&);
void tmem_deallocate(int cta_group, uint32_t address, uint32_t columns, const Site&);
void tmem_relinquish(int cta_group, const Site&);
void tmem_load(TmemShape shape, uint32_t* registers, int count, uint32_t address, int split, const Site&);
void tmem_store(TmemShape shape, const uint32_t* registers, int count, uint32_t address, int split, const Site&);
void tmem_wait_load(const Site&);
void tmem_wait_store(const Site&);
void tcgen05_fence_before(const Site&);
void tcgen05_fence_after(const Site&);

// ---- products and copies (tcgen05.cpp) ----
enum class MmaKind : uint8_t { f16, mxf4nvf4 };
enum class CollectorUsage : uint8_t { none, fill, use, lastuse, discard };
struct TensorProduct {
  MmaKind kind;
  int cta_group;
  bool ws, a_in_tmem, accumulate;
  uint32_t d, a_tmem;  // tensor-memory addresses
  uint64_t a, b;       // shared-memory descriptors
  uint32_t instruction;
  uint32_t scale_a, scale_b;  // tensor-memory addresses of block scales
  CollectorUsage collector = CollectorUsage::none;
  int collector_buffer = 0;  // with ws: index of the buffer for B, 0 to 3
};
void tcgen05_mma(const TensorProduct& product, const Site&);
void tcgen05_copy(CopyShape shape, int cta_group, uint32_t address, uint64_t descriptor, const Site&);
void tcgen05_commit(int cta_group, uint32_t mbarrier, int cta_mask, const Site&);
[[noreturn]] void unsupported(const char* instruction, const Site&);

// ---- cluster launch control (cluster_launch.cpp) ----
void try_cancel_cluster(uint32_t response, uint32_t mbarrier, const Site&);

}  // namespace hopwell::arch::emu
