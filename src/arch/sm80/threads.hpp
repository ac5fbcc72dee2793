// Thread indices, barriers of a CTA, warp collectives.
// "PTX:" anchors are sections of https://docs.nvidia.com/cuda/parallel-thread-execution/
#pragma once

#include "../platform.hpp"
#if !HOPWELL_ON_DEVICE
#include "../emu/sm80.hpp"
#endif

namespace hopwell::arch {

#if HOPWELL_ON_DEVICE
extern __shared__ __align__(1024) unsigned char dynamic_shared_memory[];
#endif

/// The CTA's dynamic shared memory as one struct, 1024-byte aligned. Contents are undefined until written.
template <class Storage>
HOPWELL_DEVICE Storage& dynamic_smem() {
#if HOPWELL_ON_DEVICE
  return *reinterpret_cast<Storage*>(dynamic_shared_memory);
#else
  return *static_cast<Storage*>(emu::dynamic_shared(emu::member_name<Storage>()));
#endif
}

/// Address of a shared-memory object in the shared window, the form that instructions take. PTX:
/// #data-movement-and-conversion-instructions-cvta
HOPWELL_DEVICE uint32_t shared_address(const void* pointer) {
#if HOPWELL_ON_DEVICE
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
#else
  return emu::shared_address(pointer);
#endif
}

/// %tid.x, %ctaid.x, %nctaid.x. PTX: #special-registers-tid
HOPWELL_DEVICE int thread_index() {
#if HOPWELL_ON_DEVICE
  return int(threadIdx.x);
#else
  return int(emu::thread_index().x);
#endif
}
/// The same, read again at each call, so that values derived from it need not stay in registers across a loop.
HOPWELL_DEVICE int thread_index_anew() {
#if HOPWELL_ON_DEVICE
  int t;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(t));
  return t;
#else
  return thread_index();
#endif
}
struct BlockIndex {
  int x, y, z;
};
HOPWELL_DEVICE BlockIndex block_index_3d() {
#if HOPWELL_ON_DEVICE
  return {int(blockIdx.x), int(blockIdx.y), int(blockIdx.z)};
#else
  return {int(emu::block_index().x), int(emu::block_index().y), int(emu::block_index().z)};
#endif
}
HOPWELL_DEVICE int block_index() { return block_index_3d().x; }
/// The same, read again at each call: see thread_index_anew().
HOPWELL_DEVICE int block_index_anew() {
#if HOPWELL_ON_DEVICE
  int b;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(b));
  return b;
#else
  return block_index();
#endif
}
HOPWELL_DEVICE int grid_size() {
#if HOPWELL_ON_DEVICE
  return int(gridDim.x);
#else
  return int(emu::grid_extent().x);
#endif
}
HOPWELL_DEVICE int lane_index() { return thread_index() % 32; }
/// bar.sync 0: waits for all threads of the CTA. PTX: #parallel-synchronization-and-communication-instructions-bar
HOPWELL_DEVICE void syncthreads([[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  __syncthreads();
#else
  emu::barrier_sync(0, 0, site);
#endif
}

/// barrier.sync: waits until `threads` threads (a multiple of 32) have arrived at barrier `id`, 0 to 15. Not the
/// aligned form, bar.sync, which requires that all threads execute the same instruction: warps with different roles do
/// not. PTX: #parallel-synchronization-and-communication-instructions-bar
HOPWELL_DEVICE void barrier_sync(int id, int threads, [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
#else
  emu::barrier_sync(id, threads, site);
#endif
}

/// barrier.arrive: the calling thread arrives and does not wait; `threads` arrivals complete the barrier. PTX:
/// #parallel-synchronization-and-communication-instructions-bar
HOPWELL_DEVICE void barrier_arrive(int id, int threads, [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile("barrier.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
#else
  emu::barrier_arrive(id, threads, site);
#endif
}

/// bar.warp.sync: waits for the lanes of `mask` and orders their memory accesses. PTX:
/// #parallel-synchronization-and-communication-instructions-bar-warp-sync
HOPWELL_DEVICE void syncwarp(uint32_t mask = 0xffffffff, [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  __syncwarp(mask);
#else
  emu::warp_sync(mask, site);
#endif
}

/// shfl.sync.idx over the whole warp: the value of lane `source` (mod 32), 4 bytes. PTX:
/// #data-movement-and-conversion-instructions-shfl-sync
template <class T>
HOPWELL_DEVICE T shuffle(T value, int source, [[maybe_unused]] Site site = Site::current()) {
  static_assert(sizeof(T) == 4);
#if HOPWELL_ON_DEVICE
  return __shfl_sync(0xffffffff, value, source);
#else
  return bit_cast<T>(emu::shuffle(0xffffffff, bit_cast<uint32_t>(value), source, site));
#endif
}

/// Index of the warp in the CTA, known to the compiler to be equal in all lanes. It uses a shuffle, so all lanes of the
/// warp must execute it together, outside of divergent branches.
HOPWELL_DEVICE int warp_index([[maybe_unused]] Site site = Site::current()) {
  return arch::shuffle(thread_index() / 32, 0, site);
}
/// Index of the warpgroup, in the same way.
HOPWELL_DEVICE int warpgroup_index([[maybe_unused]] Site site = Site::current()) {
  return arch::shuffle(thread_index() / 128, 0, site);
}

/// shfl.sync.bfly over the whole warp: the value of lane `lane ^ mask`. PTX:
/// #data-movement-and-conversion-instructions-shfl-sync
template <class T>
HOPWELL_DEVICE T shuffle_xor(T value, int lane_mask, [[maybe_unused]] Site site = Site::current()) {
  static_assert(sizeof(T) == 4);
#if HOPWELL_ON_DEVICE
  return __shfl_xor_sync(0xffffffff, value, lane_mask);
#else
  return bit_cast<T>(emu::shuffle(0xffffffff, bit_cast<uint32_t>(value), lane_index() ^ lane_mask, site));
#endif
}

/// vote.sync.ballot over the whole warp: bit i is lane i's predicate. PTX:
/// #parallel-synchronization-and-communication-instructions-vote-sync
HOPWELL_DEVICE uint32_t ballot(bool predicate, [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  return __ballot_sync(0xffffffff, predicate);
#else
  return emu::ballot(0xffffffff, predicate, site);
#endif
}

}  // namespace hopwell::arch
