// paged_attention on GPUs: prefetches the first inputs to L2 while the kernel ahead is still running.
#pragma once

#include "arch/sm80/async_copy.hpp"
#include "ops/paged_attention/gpu/params.hpp"

namespace hopwell::ops::paged_attention::HOPWELL_TARGET {

// The kernel reads no value here, because the kernel ahead may still be writing it.
HOPWELL_DEVICE void prefetch_inputs(const Params& p) {
  const auto line_of = [](const void* of, int i) { return static_cast<const char*>(of) + int64_t{i} * 128; };
  const int i = arch::block_index() * p.schedule.threads + arch::thread_index();
  if (i < p.prefetch.lens) arch::prefetch_l2(line_of(p.cache.context_lens, i));
  if (i < p.prefetch.tables) arch::prefetch_l2(line_of(p.cache.block_tables, i));
  if (i < p.prefetch.q) arch::prefetch_l2(line_of(p.query.q, i));
}

}  // namespace hopwell::ops::paged_attention::HOPWELL_TARGET
