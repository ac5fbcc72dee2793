// paged_attention on GPUs: how the lanes of a warp divide a tile, for which problems.
//
//     layout     type, d           queries a KV head   a warp's lanes have         in
//     nhd, hnd   16 bit, d ≤ 128   2 and more          fragments of mma            sm80_fragments.hpp
//     vllm       16 bit, d ≤ 128   any                 fragments of mma            sm80_fragments.hpp
//     nhd, hnd   any other         any, one a pass     rows of keys and values     sm80_lanes.hpp
//     vllm       any other, or r   any, one a pass     columns of keys and values  sm80_lanes.hpp
#pragma once

#include "ops/paged_attention/sm80_fragments.hpp"
#include "ops/paged_attention/sm80_lanes.hpp"
#include "ops/paged_attention/sm80_params.hpp"

namespace hopwell::ops::paged_attention {
namespace {

// Calls start<Lanes>() with those of the problem.
template <class T, int kD, class Start>
void with_fragments(const Problem& problem, const Start& start) {
  constexpr int kKeys = FragmentTile<T, kD, 0>::kKeys;
  if (problem.layout != HOPWELL_CACHE_VLLM) return start.template operator()<Fragments<T, kD, 0>>();
  if (problem.block % kKeys == 0) return start.template operator()<Fragments<T, kD, kKeys / 8>>();
  start.template operator()<Fragments<T, kD, 2>>();
}
template <class T, class Start>
void with_lanes_of(const Problem& problem, const Start& start) {
  const Kind kind = kind_of(problem);
  if (kind == Kind::columns) return start.template operator()<Columns<T>>();
  if constexpr (sizeof(T) == 2) {
    if (kind == Kind::fragments)
      return problem.d <= 64 ? with_fragments<T, 64>(problem, start) : with_fragments<T, 128>(problem, start);
  }
  if (problem.r) return start.template operator()<Rows<T, true>>();
  start.template operator()<Rows<T, false>>();
}
template <class Start>
void with_lanes(const Problem& problem, const Start& start) {
  if (problem.q.dtype == DType::kFloat32) return with_lanes_of<float>(problem, start);
  if (problem.q.dtype == DType::kFloat16) return with_lanes_of<fp16>(problem, start);
  with_lanes_of<bf16>(problem, start);
}

}  // namespace
}  // namespace hopwell::ops::paged_attention
