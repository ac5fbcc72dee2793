// tcgen05: products of the tensor core of a CTA or of a CTA pair, with accumulators in tensor memory; issued by one
// thread.
//
// kCtaGroup 2: one thread of the pair issues for both CTAs. Each CTA holds half of the rows of A and D and half of the
// rows of B. "PTX:" anchors are sections of https://docs.nvidia.com/cuda/parallel-thread-execution/
#pragma once

#include "../descriptor.hpp"
#include "../sm90/mbarrier.hpp"
#include "tensor_memory.hpp"

namespace hopwell::arch {

#if HOPWELL_HAS_SM100A

/// tcgen05.mma kind::f16: D (+)= A B, K 16, both operands in shared memory. `instruction`: see instruction_descriptor.
/// PTX: #tcgen05-mma-instructions-mma
template <int kCtaGroup>
HOPWELL_DEVICE void tcgen05_mma_f16(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, bool accumulate,
                                    [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  if constexpr (kCtaGroup == 1)
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %4, 0; tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, p; }" ::"r"(d),
        "l"(a), "l"(b), "r"(instruction), "r"(uint32_t(accumulate))
        : "memory");
  else
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %4, 0; tcgen05.mma.cta_group::2.kind::f16 [%0], %1, %2, %3, p; }" ::"r"(d),
        "l"(a), "l"(b), "r"(instruction), "r"(uint32_t(accumulate))
        : "memory");
#else
  emu::tcgen05_mma({emu::MmaKind::f16, kCtaGroup, false, false, accumulate, d, 0, a, b, instruction, 0, 0}, site);
#endif
}

/// The same with A in tensor memory: row m in the lane of row m of D, two elements a column. PTX:
/// #tcgen05-mma-instructions-mma
template <int kCtaGroup>
HOPWELL_DEVICE void tcgen05_mma_f16_ts(uint32_t d, uint32_t a, uint64_t b, uint32_t instruction, bool accumulate,
                                       [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  if constexpr (kCtaGroup == 1)
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %4, 0; tcgen05.mma.cta_group::1.kind::f16 [%0], [%1], %2, %3, p; }" ::"r"(d),
        "r"(a), "l"(b), "r"(instruction), "r"(uint32_t(accumulate))
        : "memory");
  else
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %4, 0; tcgen05.mma.cta_group::2.kind::f16 [%0], [%1], %2, %3, p; }" ::"r"(d),
        "r"(a), "l"(b), "r"(instruction), "r"(uint32_t(accumulate))
        : "memory");
#else
  emu::tcgen05_mma({emu::MmaKind::f16, kCtaGroup, false, true, accumulate, d, a, 0, b, instruction, 0, 0}, site);
#endif
}

/// tcgen05.mma.ws kind::f16: M 32, 64 or 128, N 64, 128 or 256, one CTA; all 128 lanes hold results whatever M.
/// PTX: #tcgen05-mma-instructions-mma-ws
HOPWELL_DEVICE void tcgen05_mma_ws_f16(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, bool accumulate,
                                       [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %4, 0; tcgen05.mma.ws.cta_group::1.kind::f16 [%0], %1, %2, %3, p; }" ::"r"(d),
      "l"(a), "l"(b), "r"(instruction), "r"(uint32_t(accumulate))
      : "memory");
#else
  emu::tcgen05_mma({emu::MmaKind::f16, 1, true, false, accumulate, d, 0, a, b, instruction, 0, 0}, site);
#endif
}
HOPWELL_DEVICE void tcgen05_mma_ws_f16_ts(uint32_t d, uint32_t a, uint64_t b, uint32_t instruction, bool accumulate,
                                          [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %4, 0; tcgen05.mma.ws.cta_group::1.kind::f16 [%0], [%1], %2, %3, p; }" ::"r"(d),
      "r"(a), "l"(b), "r"(instruction), "r"(uint32_t(accumulate))
      : "memory");
#else
  emu::tcgen05_mma({emu::MmaKind::f16, 1, true, true, accumulate, d, a, 0, b, instruction, 0, 0}, site);
#endif
}

/// tcgen05.mma kind::mxf4nvf4 block16: e2m1 operands, K 64, one ue4m3 scale for every 16 of K, scales in tensor memory.
/// `instruction`: see nvfp4_instruction_descriptor. PTX: #tcgen05-mma-instructions-mma
template <int kCtaGroup>
HOPWELL_DEVICE void tcgen05_mma_nvfp4(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, uint32_t scale_a,
                                      uint32_t scale_b, bool accumulate, [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  if constexpr (kCtaGroup == 1)
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %6, 0; tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16 [%0], %1, "
        "%2, %3, [%4], [%5], p; }" ::"r"(d),
        "l"(a), "l"(b), "r"(instruction), "r"(scale_a), "r"(scale_b), "r"(uint32_t(accumulate))
        : "memory");
  else
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %6, 0; tcgen05.mma.cta_group::2.kind::mxf4nvf4.block_scale.block16 [%0], %1, "
        "%2, %3, [%4], [%5], p; }" ::"r"(d),
        "l"(a), "l"(b), "r"(instruction), "r"(scale_a), "r"(scale_b), "r"(uint32_t(accumulate))
        : "memory");
#else
  emu::tcgen05_mma(
      {emu::MmaKind::mxf4nvf4, kCtaGroup, false, false, accumulate, d, 0, a, b, instruction, scale_a, scale_b}, site);
#endif
}

/// The same with A in tensor memory: row m in the lane of row m of D, eight elements a column. PTX:
/// #tcgen05-mma-instructions-mma
template <int kCtaGroup>
HOPWELL_DEVICE void tcgen05_mma_nvfp4_ts(uint32_t d, uint32_t a, uint64_t b, uint32_t instruction, uint32_t scale_a,
                                         uint32_t scale_b, bool accumulate,
                                         [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  if constexpr (kCtaGroup == 1)
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %6, 0; tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16 [%0], "
        "[%1], %2, %3, [%4], [%5], p; }" ::"r"(d),
        "r"(a), "l"(b), "r"(instruction), "r"(scale_a), "r"(scale_b), "r"(uint32_t(accumulate))
        : "memory");
  else
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %6, 0; tcgen05.mma.cta_group::2.kind::mxf4nvf4.block_scale.block16 [%0], "
        "[%1], %2, %3, [%4], [%5], p; }" ::"r"(d),
        "r"(a), "l"(b), "r"(instruction), "r"(scale_a), "r"(scale_b), "r"(uint32_t(accumulate))
        : "memory");
#else
  emu::tcgen05_mma(
      {emu::MmaKind::mxf4nvf4, kCtaGroup, false, true, accumulate, d, a, 0, b, instruction, scale_a, scale_b}, site);
#endif
}

/// tcgen05.commit: one arrival on the mbarrier (a shared::cluster address) once all that this thread has issued is
/// complete. PTX: #tcgen05-async-sync-operations-commit
template <int kCtaGroup>
HOPWELL_DEVICE void tcgen05_commit(mbarrier& b, [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  if constexpr (kCtaGroup == 1)
    asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(shared_address(&b))
                 : "memory");
  else
    asm volatile("tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(shared_address(&b))
                 : "memory");
#else
  emu::tcgen05_commit(kCtaGroup, emu::shared_address(&b), -1, site);
#endif
}

/// The same on the mbarrier at this offset in every CTA of `cta_mask`. PTX: #tcgen05-async-sync-operations-commit
template <int kCtaGroup>
HOPWELL_DEVICE void tcgen05_commit_multicast(mbarrier& b, uint16_t cta_mask,
                                             [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  if constexpr (kCtaGroup == 1)
    asm volatile(
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%0], %1;" ::"r"(
            shared_address(&b)),
        "h"(cta_mask)
        : "memory");
  else
    asm volatile(
        "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%0], %1;" ::"r"(
            shared_address(&b)),
        "h"(cta_mask)
        : "memory");
#else
  emu::tcgen05_commit(kCtaGroup, emu::shared_address(&b), cta_mask, site);
#endif
}

#if HOPWELL_ON_DEVICE
/// Shapes of tcgen05.cp; see emu/geometry.hpp for where rows go.
enum class CopyShape : uint8_t { b128x256, b128x128, b64x128_02_13, b64x128_01_23, b32x128_x4, b4x256 };
#else
using emu::CopyShape;
#endif

/// tcgen05.cp: rows of shared memory (by matrix descriptor, of bytes, K-major) to tensor memory, in order with the
/// products that this thread issues. PTX: #tcgen05-instructions-tcgen05-cp
template <int kCtaGroup, CopyShape kShape>
HOPWELL_DEVICE void tcgen05_copy(uint32_t address, uint64_t descriptor, [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  if constexpr (kCtaGroup == 1) {
    if constexpr (kShape == CopyShape::b128x256)
      asm volatile("tcgen05.cp.cta_group::1.128x256b [%0], %1;" ::"r"(address), "l"(descriptor) : "memory");
    else if constexpr (kShape == CopyShape::b128x128)
      asm volatile("tcgen05.cp.cta_group::1.128x128b [%0], %1;" ::"r"(address), "l"(descriptor) : "memory");
    else if constexpr (kShape == CopyShape::b64x128_02_13)
      asm volatile("tcgen05.cp.cta_group::1.64x128b.warpx2::02_13 [%0], %1;" ::"r"(address), "l"(descriptor)
                   : "memory");
    else if constexpr (kShape == CopyShape::b64x128_01_23)
      asm volatile("tcgen05.cp.cta_group::1.64x128b.warpx2::01_23 [%0], %1;" ::"r"(address), "l"(descriptor)
                   : "memory");
    else if constexpr (kShape == CopyShape::b32x128_x4)
      asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;" ::"r"(address), "l"(descriptor) : "memory");
    else
      asm volatile("tcgen05.cp.cta_group::1.4x256b [%0], %1;" ::"r"(address), "l"(descriptor) : "memory");
  } else {
    if constexpr (kShape == CopyShape::b128x256)
      asm volatile("tcgen05.cp.cta_group::2.128x256b [%0], %1;" ::"r"(address), "l"(descriptor) : "memory");
    else if constexpr (kShape == CopyShape::b128x128)
      asm volatile("tcgen05.cp.cta_group::2.128x128b [%0], %1;" ::"r"(address), "l"(descriptor) : "memory");
    else if constexpr (kShape == CopyShape::b64x128_02_13)
      asm volatile("tcgen05.cp.cta_group::2.64x128b.warpx2::02_13 [%0], %1;" ::"r"(address), "l"(descriptor)
                   : "memory");
    else if constexpr (kShape == CopyShape::b64x128_01_23)
      asm volatile("tcgen05.cp.cta_group::2.64x128b.warpx2::01_23 [%0], %1;" ::"r"(address), "l"(descriptor)
                   : "memory");
    else if constexpr (kShape == CopyShape::b32x128_x4)
      asm volatile("tcgen05.cp.cta_group::2.32x128b.warpx4 [%0], %1;" ::"r"(address), "l"(descriptor) : "memory");
    else
      asm volatile("tcgen05.cp.cta_group::2.4x256b [%0], %1;" ::"r"(address), "l"(descriptor) : "memory");
  }
#else
  emu::tcgen05_copy(kShape, kCtaGroup, address, descriptor, site);
#endif
}

/// tcgen05.shift.down: rows of 32 bytes move down by one. The emulator does not model it and says so.
/// PTX: #tcgen05-instructions-tcgen05-shift
template <int kCtaGroup>
HOPWELL_DEVICE void tcgen05_shift([[maybe_unused]] uint32_t address, [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  if constexpr (kCtaGroup == 1)
    asm volatile("tcgen05.shift.cta_group::1.down [%0];" ::"r"(address) : "memory");
  else
    asm volatile("tcgen05.shift.cta_group::2.down [%0];" ::"r"(address) : "memory");
#else
  emu::unsupported("tcgen05.shift", site);
#endif
}

#endif

}  // namespace hopwell::arch
