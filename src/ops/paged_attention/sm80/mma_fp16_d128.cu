#include "ops/paged_attention/split_kernel.hpp"

namespace hopwell::ops::paged_attention::HOPWELL_TARGET {

template TileKernel<Params> mma_kernel<Params, fp16, 128>(const Problem&);

}  // namespace hopwell::ops::paged_attention::HOPWELL_TARGET
