// Common definitions of the instruction layer: compiler detection, storage types, and call sites.
//
// One kernel source serves two compilers. nvcc sees PTX. Any other compiler sees calls to the emulator (emu/), so that
// the same file runs on a CPU. Only the arch layer contains this distinction.
#pragma once

#include <cstdint>
#include <type_traits>

#if defined(__CUDACC__)
#define HOPWELL_ON_DEVICE 1
#define HOPWELL_DEVICE __device__ __forceinline__
#define HOPWELL_NO_INLINE __device__ __noinline__
#define HOPWELL_HOST_DEVICE __host__ __device__ __forceinline__
#define HOPWELL_UNROLL _Pragma("unroll")
#define HOPWELL_NO_UNROLL _Pragma("unroll 1")
// nvcc compiles a file once for every architecture, and once more for the host, where device functions are only parsed.
// The bodies of sm_90a and sm_100a instructions must be omitted for other architectures.
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HOPWELL_HAS_SM90A 1
#else
#define HOPWELL_HAS_SM90A 0
#endif
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM100_ALL) || \
    (defined(__CUDA_ARCH_FAMILY_SPECIFIC__) && __CUDA_ARCH_FAMILY_SPECIFIC__ == 1000)
#define HOPWELL_HAS_SM100A 1
#else
#define HOPWELL_HAS_SM100A 0
#endif
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define HOPWELL_HAS_SM90 1
#else
#define HOPWELL_HAS_SM90 0
#endif
#else
#include <cstring>
#include <source_location>
#define HOPWELL_ON_DEVICE 0
#define HOPWELL_HAS_SM90 1
#define HOPWELL_HAS_SM90A 1
#define HOPWELL_HAS_SM100A 1
#define HOPWELL_DEVICE inline __attribute__((always_inline))
#define HOPWELL_NO_INLINE inline __attribute__((noinline))
#define HOPWELL_HOST_DEVICE inline __attribute__((always_inline))
#define HOPWELL_UNROLL
#define HOPWELL_NO_UNROLL
// CUDA keywords that kernel files use.
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#endif

namespace hopwell::arch {

#if HOPWELL_ON_DEVICE
/// Empty on the device, so that call sites cost nothing there.
struct Site {
  static HOPWELL_HOST_DEVICE constexpr Site current() { return {}; }
};
#else
/// Source location of an instruction in a kernel. Every arch function takes it as its last, defaulted argument.
using Site = std::source_location;
#endif

/// Storage of a 16-bit float. Arithmetic is done in fp32; see to_float and the packing conversions in sm80/convert.hpp.
struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};
/// Storage of an 8-bit float of 4 exponent and 3 mantissa bits, without infinities (float8_e4m3fn).
struct e4m3 {
  uint8_t bits;
};

/// Reinterprets the bits as another type of the same size.
template <class To, class From>
HOPWELL_HOST_DEVICE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From) && std::is_trivially_copyable_v<To> && std::is_trivially_copyable_v<From>);
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}

HOPWELL_HOST_DEVICE float to_float(bf16 x) { return bit_cast<float>(uint32_t{x.bits} << 16); }

}  // namespace hopwell::arch
