// tcgen05: products of the tensor core of a CTA or of a CTA pair, with accumulators in tensor memory. One thread issues
// them.
//
// kCtaGroup 2: one thread of the pair issues for both CTAs. Each CTA holds half of the rows of A and D and half of the
// rows of B. "PTX:" anchors are sections of https://docs.nvidia.com/cuda/parallel-thread-execution/
#pragma once

#include "../descriptor.hpp"
#include "../sm90/mbarrier.hpp"
#include "cta_group.hpp"
#include "tensor_memory.hpp"

namespace hopwell::arch {

#if HOPWELL_ON_DEVICE
/// Use of a collector buffer, which can keep one operand between products: A, or with .ws one of the four buffers for
/// B. `none` discards the contents of A's buffer, or with .ws of b0. PTX: #tcgen05-mma-instructions-mma
enum class CollectorUsage : uint8_t { none, fill, use, lastuse, discard };
/// Shapes of tcgen05.cp; emu/geometry.hpp has the destination of the rows.
enum class CopyShape : uint8_t { b128x256, b128x128, b64x128_02_13, b64x128_01_23, b32x128_x4, b4x256 };

/// Qualifiers of instruction names.
namespace detail {
template <CollectorUsage kUsage>
struct CollectorUsageName {
  static constexpr const char text[] = "";
};
template <>
struct CollectorUsageName<CollectorUsage::fill> {
  static constexpr const char text[] = "::fill";
};
template <>
struct CollectorUsageName<CollectorUsage::use> {
  static constexpr const char text[] = "::use";
};
template <>
struct CollectorUsageName<CollectorUsage::lastuse> {
  static constexpr const char text[] = "::lastuse";
};
template <>
struct CollectorUsageName<CollectorUsage::discard> {
  static constexpr const char text[] = "::discard";
};

template <CollectorUsage kUsage>
struct CollectorAName {
  static constexpr const char text[] = ".collector::a";
};
template <>
struct CollectorAName<CollectorUsage::none> {
  static constexpr const char text[] = "";
};
template <CollectorUsage kUsage, int kBuffer>
struct CollectorBName {
  static constexpr const char text[] = {'.', 'c', 'o', 'l', 'l', 'e',           'c', 't',
                                        'o', 'r', ':', ':', 'b', '0' + kBuffer, 0};
};
template <int kBuffer>
struct CollectorBName<CollectorUsage::none, kBuffer> {
  static constexpr const char text[] = "";
};

template <CopyShape kShape>
struct CopyShapeName;
template <>
struct CopyShapeName<CopyShape::b128x256> {
  static constexpr const char text[] = "128x256b";
};
template <>
struct CopyShapeName<CopyShape::b128x128> {
  static constexpr const char text[] = "128x128b";
};
template <>
struct CopyShapeName<CopyShape::b64x128_02_13> {
  static constexpr const char text[] = "64x128b.warpx2::02_13";
};
template <>
struct CopyShapeName<CopyShape::b64x128_01_23> {
  static constexpr const char text[] = "64x128b.warpx2::01_23";
};
template <>
struct CopyShapeName<CopyShape::b32x128_x4> {
  static constexpr const char text[] = "32x128b.warpx4";
};
template <>
struct CopyShapeName<CopyShape::b4x256> {
  static constexpr const char text[] = "4x256b";
};
}  // namespace detail
#else
using emu::CollectorUsage;
using emu::CopyShape;
#endif

#if HOPWELL_HAS_SM100A

/// tcgen05.mma kind::f16: D (+)= A B, K 16, both operands in shared memory. `instruction`: see instruction_descriptor.
/// PTX: #tcgen05-mma-instructions-mma
template <int kCtaGroup, CollectorUsage kCollector = CollectorUsage::none>
HOPWELL_DEVICE void tcgen05_mma_f16(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, bool accumulate,
                                    [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %4, 0; tcgen05.mma.%5.kind::f16%6%7 [%0], %1, %2, %3, p; }" ::"r"(d),
               "l"(a), "l"(b), "r"(instruction), "r"(uint32_t(accumulate)), "C"(detail::CtaGroupName<kCtaGroup>::text),
               "C"(detail::CollectorAName<kCollector>::text), "C"(detail::CollectorUsageName<kCollector>::text)
               : "memory");
#else
  emu::tcgen05_mma({emu::MmaKind::f16, kCtaGroup, false, false, accumulate, d, 0, a, b, instruction, 0, 0, kCollector},
                   site);
#endif
}

/// The same with A in tensor memory: row m in the lane of row m of D, two elements per column. With M 128 of a pair,
/// D's 64 rows occupy both halves of the lanes, and both halves must hold A. PTX: #tcgen05-mma-instructions-mma
template <int kCtaGroup, CollectorUsage kCollector = CollectorUsage::none>
HOPWELL_DEVICE void tcgen05_mma_f16_ts(uint32_t d, uint32_t a, uint64_t b, uint32_t instruction, bool accumulate,
                                       [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %4, 0; tcgen05.mma.%5.kind::f16%6%7 [%0], [%1], %2, %3, p; }" ::"r"(d),
               "r"(a), "l"(b), "r"(instruction), "r"(uint32_t(accumulate)), "C"(detail::CtaGroupName<kCtaGroup>::text),
               "C"(detail::CollectorAName<kCollector>::text), "C"(detail::CollectorUsageName<kCollector>::text)
               : "memory");
#else
  emu::tcgen05_mma({emu::MmaKind::f16, kCtaGroup, false, true, accumulate, d, a, 0, b, instruction, 0, 0, kCollector},
                   site);
#endif
}

/// tcgen05.mma.ws kind::f16: M 32, 64 or 128, N 64, 128 or 256, one CTA. All 128 lanes hold results for any M. A
/// collector buffer (kBuffer 0 to 3) keeps B. PTX: #tcgen05-mma-instructions-mma-ws
template <CollectorUsage kCollector = CollectorUsage::none, int kBuffer = 0>
HOPWELL_DEVICE void tcgen05_mma_ws_f16(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, bool accumulate,
                                       [[maybe_unused]] Site site = Site::current()) {
  static_assert(kBuffer >= 0 && kBuffer < 4);
#if HOPWELL_ON_DEVICE
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %4, 0; tcgen05.mma.ws.cta_group::1.kind::f16%5%6 [%0], %1, %2, %3, p; }" ::"r"(d),
      "l"(a), "l"(b), "r"(instruction), "r"(uint32_t(accumulate)),
      "C"(detail::CollectorBName<kCollector, kBuffer>::text), "C"(detail::CollectorUsageName<kCollector>::text)
      : "memory");
#else
  emu::tcgen05_mma({emu::MmaKind::f16, 1, true, false, accumulate, d, 0, a, b, instruction, 0, 0, kCollector, kBuffer},
                   site);
#endif
}

/// The same with A in tensor memory. With M 64 each half of the lanes, with M 32 each quarter, has its own A for its
/// half or quarter of N. If these A differ, the instruction computes two or four products at once. PTX:
/// #tcgen05-mma-instructions-mma-ws
template <CollectorUsage kCollector = CollectorUsage::none, int kBuffer = 0>
HOPWELL_DEVICE void tcgen05_mma_ws_f16_ts(uint32_t d, uint32_t a, uint64_t b, uint32_t instruction, bool accumulate,
                                          [[maybe_unused]] Site site = Site::current()) {
  static_assert(kBuffer >= 0 && kBuffer < 4);
#if HOPWELL_ON_DEVICE
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %4, 0; tcgen05.mma.ws.cta_group::1.kind::f16%5%6 [%0], [%1], %2, %3, p; }" ::"r"(
          d),
      "r"(a), "l"(b), "r"(instruction), "r"(uint32_t(accumulate)),
      "C"(detail::CollectorBName<kCollector, kBuffer>::text), "C"(detail::CollectorUsageName<kCollector>::text)
      : "memory");
#else
  emu::tcgen05_mma({emu::MmaKind::f16, 1, true, true, accumulate, d, a, 0, b, instruction, 0, 0, kCollector, kBuffer},
                   site);
#endif
}

/// tcgen05.mma kind::mxf4nvf4 block16: e2m1 operands, K 64, one ue4m3 scale for every 16 of K, scales in tensor memory.
/// N is a multiple of 8 (16 in a pair). `instruction`: see nvfp4_instruction_descriptor. PTX:
/// #tcgen05-mma-instructions-mma
template <int kCtaGroup, CollectorUsage kCollector = CollectorUsage::none>
HOPWELL_DEVICE void tcgen05_mma_nvfp4(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, uint32_t scale_a,
                                      uint32_t scale_b, bool accumulate, [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %6, 0; tcgen05.mma.%7.kind::mxf4nvf4.block_scale.block16%8%9 [%0], %1, %2, %3, "
      "[%4], [%5], p; }" ::"r"(d),
      "l"(a), "l"(b), "r"(instruction), "r"(scale_a), "r"(scale_b), "r"(uint32_t(accumulate)),
      "C"(detail::CtaGroupName<kCtaGroup>::text), "C"(detail::CollectorAName<kCollector>::text),
      "C"(detail::CollectorUsageName<kCollector>::text)
      : "memory");
#else
  emu::tcgen05_mma({emu::MmaKind::mxf4nvf4, kCtaGroup, false, false, accumulate, d, 0, a, b, instruction, scale_a,
                    scale_b, kCollector},
                   site);
#endif
}

/// The same with A in tensor memory: row m in the lane of row m of D, eight elements per column. PTX:
/// #tcgen05-mma-instructions-mma
template <int kCtaGroup, CollectorUsage kCollector = CollectorUsage::none>
HOPWELL_DEVICE void tcgen05_mma_nvfp4_ts(uint32_t d, uint32_t a, uint64_t b, uint32_t instruction, uint32_t scale_a,
                                         uint32_t scale_b, bool accumulate,
                                         [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %6, 0; tcgen05.mma.%7.kind::mxf4nvf4.block_scale.block16%8%9 [%0], [%1], %2, %3, "
      "[%4], [%5], p; }" ::"r"(d),
      "r"(a), "l"(b), "r"(instruction), "r"(scale_a), "r"(scale_b), "r"(uint32_t(accumulate)),
      "C"(detail::CtaGroupName<kCtaGroup>::text), "C"(detail::CollectorAName<kCollector>::text),
      "C"(detail::CollectorUsageName<kCollector>::text)
      : "memory");
#else
  emu::tcgen05_mma({emu::MmaKind::mxf4nvf4, kCtaGroup, false, true, accumulate, d, a, 0, b, instruction, scale_a,
                    scale_b, kCollector},
                   site);
#endif
}

/// tcgen05.commit: one arrival on the mbarrier (a shared::cluster address) when all operations that this thread has
/// issued are complete. PTX: #tcgen05-async-sync-operations-commit
template <int kCtaGroup>
HOPWELL_DEVICE void tcgen05_commit(mbarrier& b, [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile("tcgen05.commit.%1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(shared_address(&b)),
               "C"(detail::CtaGroupName<kCtaGroup>::text)
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
  asm volatile("tcgen05.commit.%2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%0], %1;" ::"r"(
                   shared_address(&b)),
               "h"(cta_mask), "C"(detail::CtaGroupName<kCtaGroup>::text)
               : "memory");
#else
  emu::tcgen05_commit(kCtaGroup, emu::shared_address(&b), cta_mask, site);
#endif
}

/// tcgen05.cp: copies rows of shared memory (a K-major matrix descriptor of bytes) to tensor memory, in order with the
/// products that this thread issues. PTX: #tcgen05-instructions-tcgen05-cp
template <int kCtaGroup, CopyShape kShape>
HOPWELL_DEVICE void tcgen05_copy(uint32_t address, uint64_t descriptor, [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile("tcgen05.cp.%2.%3 [%0], %1;" ::"r"(address), "l"(descriptor), "C"(detail::CtaGroupName<kCtaGroup>::text),
               "C"(detail::CopyShapeName<kShape>::text)
               : "memory");
#else
  emu::tcgen05_copy(kShape, kCtaGroup, address, descriptor, site);
#endif
}

/// tcgen05.shift.down: moves rows of 32 bytes down by one. The emulator does not model it and stops the launch with a
/// message.
/// PTX: #tcgen05-instructions-tcgen05-shift
template <int kCtaGroup>
HOPWELL_DEVICE void tcgen05_shift([[maybe_unused]] uint32_t address, [[maybe_unused]] Site site = Site::current()) {
#if HOPWELL_ON_DEVICE
  asm volatile("tcgen05.shift.%1.down [%0];" ::"r"(address), "C"(detail::CtaGroupName<kCtaGroup>::text) : "memory");
#else
  emu::unsupported("tcgen05.shift", site);
#endif
}

#endif

}  // namespace hopwell::arch
