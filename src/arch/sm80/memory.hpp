// Loads, stores and reductions with cache hints, memory orders and vectors.
// "PTX:" anchors are sections of https://docs.nvidia.com/cuda/parallel-thread-execution/
#pragma once

#include "threads.hpp"

namespace hopwell::arch {

/// Four 32-bit words, moved by one instruction; 16-byte aligned.
struct alignas(16) Words4 {
  uint32_t w[4];
};
struct alignas(8) Words2 {
  uint32_t w[2];
};

/// A load or store of a vector type that is aligned to its size. nvcc compiles a load to one instruction. It may split
/// a store into the struct's elements, where kInOne prevents it. The emulator reports a misaligned one; it cannot do so
/// for a plain C++ access, because the host compiler splits vectors.
template <class Vector>
HOPWELL_DEVICE Vector load_vector(const void* pointer, [[maybe_unused]] Site site = Site::current()) {
#if !HOPWELL_ON_DEVICE
  emu::require_global("ld.v", pointer, alignof(Vector), site);
#endif
  return *static_cast<const Vector*>(pointer);
}
/// Stores a vector type that is aligned to its size. kInOne: as one PTX instruction, for Words2 and Words4.
/// PTX: #data-movement-and-conversion-instructions-st
template <bool kInOne = false, class Vector>
HOPWELL_DEVICE void store_vector(void* pointer, const Vector& v, [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  if constexpr (kInOne && sizeof(Vector) == 8)
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(pointer), "r"(v.w[0]), "r"(v.w[1]) : "memory");
  else if constexpr (kInOne)
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(pointer), "r"(v.w[0]), "r"(v.w[1]), "r"(v.w[2]),
                 "r"(v.w[3])
                 : "memory");
  else
    *static_cast<Vector*>(pointer) = v;
#else
  emu::require_global("st.v", pointer, alignof(Vector), site);
  *static_cast<Vector*>(pointer) = v;
#endif
}

/// An L2 eviction policy made by createpolicy.
struct CachePolicy {
  uint64_t bits;
};

/// createpolicy.fractional.L2::evict_first / evict_last / evict_normal, for all accesses. PTX:
/// #data-movement-and-conversion-instructions-createpolicy
HOPWELL_DEVICE CachePolicy evict_first_policy() {
  CachePolicy policy{0};
#if HOPWELL_ON_DEVICE
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy.bits));
#endif
  return policy;
}
HOPWELL_DEVICE CachePolicy evict_last_policy() {
  CachePolicy policy{0};
#if HOPWELL_ON_DEVICE
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy.bits));
#endif
  return policy;
}
HOPWELL_DEVICE CachePolicy evict_normal_policy() {
  CachePolicy policy{0};
#if HOPWELL_ON_DEVICE
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy.bits));
#endif
  return policy;
}

/// ld.global.nc.L1::no_allocate: 16 bytes of memory that nothing writes during the kernel, streamed. PTX:
/// #data-movement-and-conversion-instructions-ld-global-nc
HOPWELL_DEVICE Words4 load_streaming(const void* pointer, [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  Words4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
               : "l"(pointer));
  return v;
#else
  emu::require_global("ld.global.v4", pointer, 16, site);
  return *static_cast<const Words4*>(pointer);
#endif
}

/// The same with an L2 policy.
HOPWELL_DEVICE Words4 load_streaming(const void* pointer, [[maybe_unused]] CachePolicy policy,
                                     [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  Words4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
               : "l"(pointer), "l"(policy.bits));
  return v;
#else
  emu::require_global("ld.global.v4", pointer, 16, site);
  return *static_cast<const Words4*>(pointer);
#endif
}

/// st.global.L1::no_allocate: 16 bytes that are not read again soon. PTX: #data-movement-and-conversion-instructions-st
HOPWELL_DEVICE void store_streaming(void* pointer, const Words4& v, [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(pointer), "r"(v.w[0]), "r"(v.w[1]),
               "r"(v.w[2]), "r"(v.w[3])
               : "memory");
#else
  emu::require_global("st.global.v4", pointer, 16, site);
  *static_cast<Words4*>(pointer) = v;
#endif
}

/// ld.acquire.gpu / ld.relaxed.gpu: a word that other CTAs write. In the emulator, polling lets other threads run. PTX:
/// #data-movement-and-conversion-instructions-ld
HOPWELL_DEVICE uint32_t load_acquire(const uint32_t* pointer) {
#if HOPWELL_ON_DEVICE
  uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(pointer) : "memory");
  return v;
#else
  emu::yield();
  return *pointer;
#endif
}
HOPWELL_DEVICE uint32_t load_relaxed(const uint32_t* pointer) {
#if HOPWELL_ON_DEVICE
  uint32_t v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(pointer) : "memory");
  return v;
#else
  emu::yield();
  return *pointer;
#endif
}

/// ld.relaxed.gpu.b128 / st.relaxed.gpu.b128: 16 bytes that other CTAs write or read, as a single access that is never
/// torn. PTX: #data-movement-and-conversion-instructions-ld
HOPWELL_DEVICE Words4 load_relaxed_v4(const Words4* pointer, [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  uint64_t low, high;
  asm volatile("{ .reg .b128 x; ld.relaxed.gpu.global.b128 x, [%2]; mov.b128 {%0, %1}, x; }"
               : "=l"(low), "=l"(high)
               : "l"(pointer)
               : "memory");
  return {{uint32_t(low), uint32_t(low >> 32), uint32_t(high), uint32_t(high >> 32)}};
#else
  emu::require_global("ld.relaxed.b128", pointer, 16, site);
  emu::yield();
  return *pointer;
#endif
}
HOPWELL_DEVICE void store_relaxed_v4(Words4* pointer, const Words4& v, [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  const uint64_t low = v.w[0] | uint64_t{v.w[1]} << 32, high = v.w[2] | uint64_t{v.w[3]} << 32;
  asm volatile("{ .reg .b128 x; mov.b128 x, {%1, %2}; st.relaxed.gpu.global.b128 [%0], x; }" ::"l"(pointer), "l"(low),
               "l"(high)
               : "memory");
#else
  emu::require_global("st.relaxed.b128", pointer, 16, site);
  *pointer = v;
#endif
}

/// red.global.add: *pointer += value, atomic, in any order with other reductions. PTX:
/// #parallel-synchronization-and-communication-instructions-red
HOPWELL_DEVICE void red_add(float* pointer, float value, [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(pointer), "f"(value) : "memory");
#else
  emu::red_add(pointer, &value, 1, site);
#endif
}
HOPWELL_DEVICE void red_add(uint32_t* pointer, uint32_t value) {
#if HOPWELL_ON_DEVICE
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(pointer), "r"(value) : "memory");
#else
  *pointer += value;
#endif
}

/// atom.global.add: returns the previous value. PTX: #parallel-synchronization-and-communication-instructions-atom
HOPWELL_DEVICE uint32_t atomic_add(uint32_t* pointer, uint32_t value) {
#if HOPWELL_ON_DEVICE
  uint32_t old;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(pointer), "r"(value) : "memory");
  return old;
#else
  const uint32_t old = *pointer;
  *pointer = old + value;
  return old;
#endif
}

#if HOPWELL_HAS_SM90
/// red.global.add.v2.f32 / .v4.f32 (from sm_90 on): 2 or 4 sums by one instruction, each atomic on its own; 8- or
/// 16-byte aligned. PTX: #parallel-synchronization-and-communication-instructions-red
HOPWELL_DEVICE void red_add_v2(float* pointer, float x, float y, [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(pointer), "f"(x), "f"(y) : "memory");
#else
  const float values[2] = {x, y};
  emu::red_add(pointer, values, 2, site);
#endif
}
HOPWELL_DEVICE void red_add_v4(float* pointer, float x, float y, float z, float w,
                               [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(pointer), "f"(x), "f"(y), "f"(z),
               "f"(w)
               : "memory");
#else
  const float values[4] = {x, y, z, w};
  emu::red_add(pointer, values, 4, site);
#endif
}
#endif

/// prefetch.global.L2: a hint. PTX: #data-movement-and-conversion-instructions-prefetch-prefetchu
HOPWELL_DEVICE void prefetch_l2([[maybe_unused]] const void* pointer) {
#if HOPWELL_ON_DEVICE
  asm volatile("prefetch.global.L2 [%0];" ::"l"(pointer));
#endif
}

/// ld.shared / st.shared by shared address, 16 bytes. PTX: #data-movement-and-conversion-instructions-ld
HOPWELL_DEVICE Words4 load_shared_v4(uint32_t address, [[maybe_unused]] Site site = Site::current()) {
  Words4 v;
#if HOPWELL_ON_DEVICE
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
               : "r"(address)
               : "memory");
#else
  emu::read_shared(address, 16, &v, site);
#endif
  return v;
}
HOPWELL_DEVICE void store_shared_v4(uint32_t address, const Words4& v, [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.w[0]), "r"(v.w[1]), "r"(v.w[2]),
               "r"(v.w[3])
               : "memory");
#else
  emu::write_shared(address, 16, &v, site);
#endif
}

}  // namespace hopwell::arch
