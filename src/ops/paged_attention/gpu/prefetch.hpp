// paged_attention on GPUs: what is read first, on its way to L2 while the kernel ahead is still running.
#pragma once

#include "arch/sm80/async_copy.hpp"
#include "ops/paged_attention/gpu/params.hpp"

namespace hopwell::ops::paged_attention::HOPWELL_TARGET {

// Nothing of it is used here: the kernel ahead may be writing it.
HOPWELL_DEVICE void prefetch_inputs(const Params& p) {
  const auto line_of = [](const void* of, int i) { return static_cast<const char*>(of) + int64_t{i} * 128; };
  const int i = arch::block_index() * p.schedule.threads + arch::thread_index();
  if (i < p.prefetch.lens) arch::prefetch_l2(line_of(p.cache.context_lens, i));
  if (i < p.prefetch.tables) arch::prefetch_l2(line_of(p.cache.block_tables, i));
  if (i < p.prefetch.q) arch::prefetch_l2(line_of(p.query.q, i));
}

}  // namespace hopwell::ops::paged_attention::HOPWELL_TARGET
