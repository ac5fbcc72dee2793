// paged_attention on GPUs: the tile of a problem within a family (families.hpp). Files that compile a family include
// this header and a kernel's: split_kernel.hpp or cluster_kernel.hpp.
#pragma once

#include "ops/paged_attention/tiles/dimension_major.hpp"
#include "ops/paged_attention/tiles/families.hpp"
#include "ops/paged_attention/tiles/key_major.hpp"
#include "ops/paged_attention/tiles/mma.hpp"

namespace hopwell::ops::paged_attention::HOPWELL_TARGET {

// Specialised next to each kernel: `value` is the kernel of a tile.
template <class P, class Tile>
struct KernelOf;

template <class P, class T>
TileKernel<P> cuda_core_kernel(const Problem& problem) {
  if (tile_kind(problem) == TileKind::dimension_major) return KernelOf<P, DimensionMajorTile<T>>::value;
  constexpr int kMost = kElements<T>, kFew = kMost / 4;  // keys of a lane: key_major_shape
  const KeyMajorShape shape = key_major_shape(problem);
  if (problem.r) return KernelOf<P, KeyMajorTile<T, 1, kMost, true>>::value;
  if (shape.vectors == 2) return KernelOf<P, KeyMajorTile<T, 2, 2 * kFew, false>>::value;
  if (shape.vectors == 3) return KernelOf<P, KeyMajorTile<T, 3, 2 * kFew, false>>::value;
  if (shape.vectors == 4) return KernelOf<P, KeyMajorTile<T, 4, kFew, false>>::value;
  if constexpr (sizeof(T) == 2) {
    if (shape.vectors == 5) return KernelOf<P, KeyMajorTile<T, 5, kFew, false>>::value;
    if (shape.keys == 4) return KernelOf<P, KeyMajorTile<T, 1, 4, false>>::value;
  }
  return KernelOf<P, KeyMajorTile<T, 1, kMost, false>>::value;
}

template <class P, class T, int kD, int kBlocks, bool kExactQuery>
TileKernel<P> mma_kernel_of_layout(const Problem& problem) {
  constexpr int kKeys = MmaTileCopy<T, kD, 0, kBlocks, kExactQuery>::kKeys;
  if (problem.layout != HOPWELL_CACHE_VLLM) return KernelOf<P, MmaTile<T, kD, 0, kBlocks, kExactQuery>>::value;
  if (problem.block % kKeys == 0) return KernelOf<P, MmaTile<T, kD, kKeys / 8, kBlocks, kExactQuery>>::value;
  return KernelOf<P, MmaTile<T, kD, 2, kBlocks, kExactQuery>>::value;
}
template <class P, class T, int kD>
TileKernel<P> mma_kernel(const Problem& problem) {
  constexpr bool kHasTwoBlocks = std::is_same_v<P, Params>;  // calls of the cluster kernel are too short
  const bool exact = exact_query(problem);
  if constexpr (kD > 128) {
    if (!exact) return KernelOf<P, MmaTile<T, 256, 0, 1, false>>::value;
    return problem.d <= 192 ? KernelOf<P, MmaTile<T, 192, 0>>::value : KernelOf<P, MmaTile<T, 256, 0>>::value;
  } else {
    [[maybe_unused]] const bool two_blocks = kHasTwoBlocks && mma_blocks(problem) == 2;
    if constexpr (kD == 128) {
      if (problem.d <= 96 && problem.layout != HOPWELL_CACHE_VLLM && exact) {
        if constexpr (kHasTwoBlocks)
          if (two_blocks) return KernelOf<P, MmaTile<T, 96, 0, 2>>::value;
        return KernelOf<P, MmaTile<T, 96, 0>>::value;
      }
    }
    if constexpr (kHasTwoBlocks)
      if (two_blocks)
        return exact ? mma_kernel_of_layout<P, T, kD, 2, true>(problem)
                     : mma_kernel_of_layout<P, T, kD, 2, false>(problem);
    return mma_kernel_of_layout<P, T, kD, 1, false>(problem);
  }
}

}  // namespace hopwell::ops::paged_attention::HOPWELL_TARGET
