#include "ops/paged_attention/split_kernel.hpp"

namespace hopwell::ops::paged_attention::HOPWELL_TARGET {

// Hopper gives a CTA 227 KiB; a GPU that gives less gets fewer warps.
static_assert(kSplitBytes<MmaTile<bf16, 64, 8>>.with(kMaxWarps) <= 227 * 1024);
static_assert(kSplitBytes<MmaTile<bf16, 64, 8, 2>>.with(kMaxWarps) <= 227 * 1024);
static_assert(kSplitBytes<MmaTile<bf16, 64, 4, 2, false>>.with(kMaxWarps) <= 227 * 1024);

template TileKernel<Params> mma_kernel<Params, bf16, 64>(const Problem&);

}  // namespace hopwell::ops::paged_attention::HOPWELL_TARGET
