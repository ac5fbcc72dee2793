// Emulator entry points for the instructions of Hopper. Called by the arch layer only.
#pragma once

#include <cstdint>

#include "../descriptor.hpp"
#include "../platform.hpp"

namespace hopwell::arch {
struct TensorMap;  // sm90/tensor_map.hpp
}

namespace hopwell::arch::emu {

// ---- clusters (barrier.cpp) ----
uint32_t cluster_rank();
uint32_t cluster_size();
void cluster_arrive(bool release, const Site&);
void cluster_wait(const Site&);
bool elect(const Site&);

// ---- mbarriers and fences (mbarrier.cpp) ----
enum class WaitScope : uint8_t { relaxed, cta, cluster };
void mbarrier_init(uint32_t address, uint32_t count, const Site&);
void mbarrier_invalidate(uint32_t address, const Site&);
void mbarrier_arrive(uint32_t address, uint32_t count, bool cluster_scope, const Site&);
void mbarrier_arrive_relaxed(uint32_t address, const Site&);
void mbarrier_arrive_expect_tx(uint32_t address, uint32_t bytes, bool cluster_scope, const Site&);
void mbarrier_expect_tx(uint32_t address, uint32_t bytes, const Site&);
bool mbarrier_try_wait(uint32_t address, uint32_t parity, WaitScope scope, bool may_block, const Site&);
void cp_async_mbarrier_arrive_noinc(uint32_t address, const Site&);
void fence_mbarrier_init(const Site&);
void fence_proxy_async(const Site&);

// ---- bulk copies (bulk_copy.cpp) ----
enum class ReduceType : uint8_t { f32, bf16, s64 };
void bulk_load(uint32_t destination, const void* source, uint32_t bytes, uint32_t mbarrier, int cta_mask, const Site&);
void bulk_store(void* destination, uint32_t source, uint32_t bytes, const Site&);
void bulk_copy_to_cta(uint32_t destination, uint32_t source, uint32_t bytes, uint32_t mbarrier, const Site&);
void bulk_reduce(void* destination, uint32_t source, uint32_t bytes, ReduceType type, const Site&);
void bulk_commit(const Site&);
void bulk_wait(int pending_groups, bool read_only, const Site&);
void store_async(uint32_t destination, const void* value, uint32_t bytes, uint32_t mbarrier, const Site&);

// ---- tensor copies (tma.cpp) ----
enum class TmaMode : uint8_t { tile, gather4 };
void tma_load(uint32_t destination, const TensorMap& map, const int* coordinates, int rank, uint32_t mbarrier,
              TmaMode mode, int cta_group, int cta_mask, const Site&);
enum class TmaStore : uint8_t { store, reduce_add, scatter4 };
void tma_store(const TensorMap& map, const int* coordinates, int rank, uint32_t source, TmaStore mode, const Site&);

// ---- wgmma (wgmma.cpp) ----
void wgmma_fence(const Site&);
void wgmma(float* d, int n, WgmmaType type, const uint32_t* a_registers, uint64_t a, uint64_t b, Major a_major,
           Major b_major, bool negate_a, bool negate_b, bool accumulate, const Site&);
void wgmma_commit(const Site&);
void wgmma_wait(int pending_groups, const Site&);

// ---- registers ----
void setmaxnreg(int registers, bool increase, const Site&);

}  // namespace hopwell::arch::emu
