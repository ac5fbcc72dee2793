#include "ops/paged_attention/split_kernel.hpp"

namespace hopwell::ops::paged_attention::HOPWELL_TARGET {

// Hopper gives a CTA 227 KiB; a GPU that gives less gets fewer warps.
static_assert(kSplitBytes<MmaTile<bf16, 128, 0>>.with(kMaxWarps) <= 227 * 1024);
static_assert(kSplitBytes<MmaTile<bf16, 128, 4, 2>>.with(kMaxWarps) <= 227 * 1024);
static_assert(kSplitBytes<MmaTile<bf16, 128, 2, 2, false>>.with(kMaxWarps) <= 227 * 1024);

template TileKernel<Params> mma_kernel<Params, bf16, 128>(const Problem&);

}  // namespace hopwell::ops::paged_attention::HOPWELL_TARGET
