// Emulator entry points for the instructions of Ampere and later GPUs. Called by the arch layer only.
#pragma once

#include <cstdint>

#include "../platform.hpp"
#include "launch.hpp"
#include "members.hpp"

namespace hopwell::arch::emu {

// ---- identity ----
const Index& thread_index();
const Index& block_index();
const Extent& block_extent();
const Extent& grid_extent();
void* dynamic_shared(MemberName names);        // null: no names for findings
uint32_t shared_address(const void* pointer);  // stops if the pointer is not in shared memory
void yield();                                  // lets other threads run: for polling loops

// ---- barriers and warps ----
void barrier_sync(int id, int threads, const Site&);  // id 0 with 0 threads: the whole CTA
void barrier_arrive(int id, int threads, const Site&);
void warp_sync(uint32_t mask, const Site&);
uint32_t shuffle(uint32_t mask, uint32_t value, int source_lane, const Site&);
uint32_t ballot(uint32_t mask, bool predicate, const Site&);

// ---- global memory ----
[[noreturn]] void misaligned(const char* instruction, uint32_t alignment, const Site&);
inline void require_global(const char* instruction, const void* pointer, uint32_t alignment, const Site& site) {
  if (reinterpret_cast<uintptr_t>(pointer) % alignment) misaligned(instruction, alignment, site);
}
void red_add(float* pointer, const float* values, uint32_t count, const Site&);

// ---- accesses to shared memory that the compiler's hooks do not see ----
void read_shared(uint32_t address, uint32_t bytes, void* value, const Site&);  // any CTA of the cluster
void write_shared(uint32_t address, uint32_t bytes, const void* value, const Site&);
void red_add_shared(uint32_t address, uint32_t value, const Site&);
uint32_t atomic_or_shared(uint32_t address, uint32_t bits, const Site&);

// ---- cp.async ----
void cp_async(uint32_t destination, const void* source, uint32_t bytes, uint32_t source_bytes, const Site&);
void cp_async_commit(const Site&);
void cp_async_wait(int pending_groups, const Site&);  // -1: cp.async.wait_all

// ---- matrices ----
void ldmatrix(uint32_t* registers, int count, bool transposed, uint32_t row_address, const Site&);
void stmatrix(const uint32_t* registers, int count, bool transposed, uint32_t row_address, const Site&);
enum class MmaType : uint8_t { fp16, bf16 };
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], MmaType type, const Site&);

}  // namespace hopwell::arch::emu
