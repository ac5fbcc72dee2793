// paged_attention on Hopper: number of clusters of `size` CTAs that run at a time, one CTA an SM.
#pragma once

#include "runtime/device.hpp"

namespace hopwell::ops::paged_attention::HOPWELL_TARGET {

int clusters_that_fit(int size, const runtime::Device& device);

}  // namespace hopwell::ops::paged_attention::HOPWELL_TARGET
