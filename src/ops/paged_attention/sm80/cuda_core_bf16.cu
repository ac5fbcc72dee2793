#include "ops/paged_attention/split_kernel.hpp"

namespace hopwell::ops::paged_attention::HOPWELL_TARGET {

// Hopper gives a CTA 227 KiB; a GPU that gives less gets fewer warps.
static_assert(kSplitBytes<KeyMajorTile<bf16, 1, 8, false>>.with(kMaxWarps) == 159232);
static_assert(kSplitBytes<DimensionMajorTile<bf16>>.with(kMaxWarps) == 159232);
static_assert(kSplitBytes<KeyMajorTile<bf16, 2, 4, false>>.with(kMaxWarps) <= 227 * 1024);
static_assert(kSplitBytes<KeyMajorTile<bf16, 3, 4, false>>.with(kMaxWarps - 1) <= 227 * 1024);
static_assert(kSplitBytes<KeyMajorTile<bf16, 4, 2, false>>.with(kMaxWarps) <= 227 * 1024);
static_assert(kSplitBytes<KeyMajorTile<bf16, 5, 2, false>>.with(kMaxWarps - 1) <= 227 * 1024);
static_assert(kSplitBytes<KeyMajorTile<bf16, 1, 8, true>>.with(kMaxWarps) <= 227 * 1024);

template TileKernel<Params> cuda_core_kernel<Params, bf16>(const Problem&);

}  // namespace hopwell::ops::paged_attention::HOPWELL_TARGET
