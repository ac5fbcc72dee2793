#include "ops/paged_attention/split_kernel.hpp"

namespace hopwell::ops::paged_attention::HOPWELL_TARGET {

// Hopper gives a CTA 227 KiB; a GPU that gives less gets fewer warps.
static_assert(kSplitBytes<MmaTile<bf16, 256, 0>>.with(kMaxWarps) <= 227 * 1024);
static_assert(kSplitBytes<MmaTile<bf16, 256, 0, 1, false>>.with(kMaxWarps - 2) <= 227 * 1024);

template TileKernel<Params> mma_kernel<Params, bf16, 256>(const Problem&);

}  // namespace hopwell::ops::paged_attention::HOPWELL_TARGET
