// paged_attention on GPUs: which warp tile runs which problems (plan.cpp decides on the kind).
//
//     layout     type, d           queries a KV head   a warp's lanes have         in
//     nhd, hnd   16 bit            2 and more          fragments of mma            mma.hpp, 8 a pass; up to 16 heads
//                                                                                  where plan.cpp's mma_blocks is 2;
//                                                                                  d > 128 and q not exact: 3 and more
//     vllm       16 bit, d ≤ 128   any                 fragments of mma            mma.hpp
//     nhd, hnd   any other, or r   any, one a pass     rows of keys and values     key_major.hpp
//     vllm       any other, or r   any, one a pass     columns of keys and values  dimension_major.hpp
#pragma once

#include "ops/paged_attention/plan.hpp"
#include "ops/paged_attention/tiles/dimension_major.hpp"
#include "ops/paged_attention/tiles/key_major.hpp"
#include "ops/paged_attention/tiles/mma.hpp"

namespace hopwell::ops::paged_attention::HOPWELL_TARGET {

// Calls start<Tile>() with the tile of the problem.
template <class T, int kD, int kBlocks, bool kExactQuery, class Start>
void with_mma_tile_of_blocks(const Problem& problem, const Start& start) {
  constexpr int kKeys = MmaTileCopy<T, kD, 0, kBlocks, kExactQuery>::kKeys;
  if (problem.layout != HOPWELL_CACHE_VLLM) return start.template operator()<MmaTile<T, kD, 0, kBlocks, kExactQuery>>();
  if (problem.block % kKeys == 0) return start.template operator()<MmaTile<T, kD, kKeys / 8, kBlocks, kExactQuery>>();
  start.template operator()<MmaTile<T, kD, 2, kBlocks, kExactQuery>>();
}
template <class T, int kD, int kMaxBlocks, class Start>
void with_mma_tile(const Problem& problem, const Start& start) {
  if constexpr (kMaxBlocks == 2) {
    if (mma_blocks(problem) == 2)
      return exact_query(problem) ? with_mma_tile_of_blocks<T, kD, 2, true>(problem, start)
                                  : with_mma_tile_of_blocks<T, kD, 2, false>(problem, start);
  }
  with_mma_tile_of_blocks<T, kD, 1, false>(problem, start);
}
template <class T, class Start>
void with_key_major_tile(const Problem& problem, const Start& start) {
  constexpr int kMost = kElements<T>, kFew = kMost / 4;  // keys of a lane: key_major_shape
  const KeyMajorShape shape = key_major_shape(problem);
  if (problem.r) return start.template operator()<KeyMajorTile<T, 1, kMost, true>>();
  if (shape.octets == 2) return start.template operator()<KeyMajorTile<T, 2, 2 * kFew, false>>();
  if (shape.octets == 3) return start.template operator()<KeyMajorTile<T, 3, 2 * kFew, false>>();
  if (shape.octets == 4) return start.template operator()<KeyMajorTile<T, 4, kFew, false>>();
  if constexpr (sizeof(T) == 2) {
    if (shape.octets == 5) return start.template operator()<KeyMajorTile<T, 5, kFew, false>>();
    if (shape.keys == 4) return start.template operator()<KeyMajorTile<T, 1, 4, false>>();
  }
  start.template operator()<KeyMajorTile<T, 1, kMost, false>>();
}
template <class T, int kMaxBlocks, class Start>
void with_mma_tile_of_d(const Problem& problem, const Start& start) {
  if (problem.d <= 64) return with_mma_tile<T, 64, kMaxBlocks>(problem, start);
  if (problem.d <= 96 && problem.layout != HOPWELL_CACHE_VLLM && exact_query(problem)) {
    if constexpr (kMaxBlocks == 2)
      if (mma_blocks(problem) == 2) return start.template operator()<MmaTile<T, 96, 0, 2>>();
    return start.template operator()<MmaTile<T, 96, 0>>();
  }
  if (problem.d <= 128) return with_mma_tile<T, 128, kMaxBlocks>(problem, start);
  if (!exact_query(problem)) return start.template operator()<MmaTile<T, 256, 0, 1, false>>();
  if (problem.d <= 192) return start.template operator()<MmaTile<T, 192, 0>>();
  start.template operator()<MmaTile<T, 256, 0>>();
}
template <class T, int kMaxBlocks, class Start>
void with_tile_of(const Problem& problem, const Start& start) {
  const TileKind kind = tile_kind(problem);
  if (kind == TileKind::dimension_major) return start.template operator()<DimensionMajorTile<T>>();
  if constexpr (sizeof(T) == 2) {
    if (kind == TileKind::mma) return with_mma_tile_of_d<T, kMaxBlocks>(problem, start);
  }
  with_key_major_tile<T>(problem, start);
}
template <int kMaxBlocks, class Start>  // of mma
void with_tile(const Problem& problem, const Start& start) {
  if (problem.q.dtype == DType::kFloat32) return with_tile_of<float, kMaxBlocks>(problem, start);
  if (problem.q.dtype == DType::kFloat16) return with_tile_of<fp16, kMaxBlocks>(problem, start);
  with_tile_of<bf16, kMaxBlocks>(problem, start);
}

}  // namespace hopwell::ops::paged_attention::HOPWELL_TARGET
